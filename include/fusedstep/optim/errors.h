// Errors of a step and of a load: c10::Error, which begin with the parameter or the group.
#pragma once
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <vector>

namespace fusedstep::optim::detail {

inline std::string name_of_group(size_t index) { return "group " + std::to_string(index); }

inline std::string name_of_parameter(size_t group, size_t place) {
  return "parameter " + std::to_string(place) + " of " + name_of_group(group);
}

// As Python has it: "float32".
inline std::string name_of_dtype(c10::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

// A weight's place among all of the optimizer: the group, and the weight in it.
inline int64_t place_of(size_t group, size_t index) { return static_cast<int64_t>((group << 32) + index); }

inline std::string name_of_place(int64_t place) {
  const auto whole = static_cast<uint64_t>(place);
  return name_of_parameter(whole >> 32, whole & 0xffffffff);
}

// An error's text, in which the engine counts tensors of a list, with parameters that are at these places.
inline std::string with_names(std::string_view text, const std::vector<int64_t>& places) {
  constexpr std::string_view kBefore = "tensor ", kAfter = " of the list";
  std::string found;
  while (!text.empty()) {
    const size_t at = text.find(kBefore);
    size_t end = at == text.npos ? text.size() : at + kBefore.size(), index = 0;
    const size_t digits = end;
    for (; end < text.size() && std::isdigit(static_cast<unsigned char>(text[end])) != 0; ++end) {
      index = 10 * index + static_cast<size_t>(text[end] - '0');
    }
    if (end > digits && index < places.size() && text.substr(end, kAfter.size()) == kAfter) {
      found.append(text.substr(0, at)).append(name_of_place(places[index]));
      end += kAfter.size();
    } else {
      found.append(text.substr(0, end));
    }
    text.remove_prefix(end);
  }
  return found;
}

// What to do about an error, where its text alone does not say so.
inline std::string_view advice(std::string_view text) {
  const auto has = [&](std::string_view part) { return text.find(part) != text.npos; };
  if (has("a state is ") && has(" but the weight is ")) {
    return ". If the dtype of the model has changed, save the optimizer and load it: the states get that of "
           "their weights";
  }
  if (has("shares memory with another weight")) {
    return ". Give each tensor once: a module that is registered under two names has its parameters twice";
  }
  return "";
}

// Calls work(), whose errors become c10::Error of text(what they say), but for memory that ran out.
template <class Work, class Text>
decltype(auto) with_text(const Text& text, const Work& work) {
  const auto raise = [&](std::string_view said) {
    throw c10::Error({"step", __FILE__, __LINE__}, text(said));
  };
  try {
    return work();
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    raise(error.what_without_backtrace());
  } catch (const std::exception& error) {
    raise(error.what());
  }
  std::abort();  // raise() throws
}

// Calls work(), whose errors become c10::Error of the same text.
template <class Work>
void as_c10(const Work& work) {
  with_text([](std::string_view said) { return std::string(said); }, work);
}

// Calls work(), whose errors get the name of a group or of a parameter in front: what name() returns.
template <class Work, class Name>
decltype(auto) in_name_of(const Name& name, const Work& work) {
  return with_text([&](std::string_view said) { return name() + ": " + std::string(said); }, work);
}

}  // namespace fusedstep::optim::detail
