// Archives of optimizers, ours and torch's, and the states in them as a step takes them.
#pragma once
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fusedstep/optim/errors.h"
#include "fusedstep/optim/options.h"
#include "fusedstep/optim/state_codes.h"
#include "fusedstep/optim/state_maker.h"
#include "fusedstep/optim/weight_value.h"

namespace fusedstep::optim::detail {

// A group in an archive: its options, and the keys of its parameters' states.
struct SavedGroup {
  torch::serialize::InputArchive options;
  std::vector<std::string> keys;
};

inline size_t read_size(torch::serialize::InputArchive& archive, const std::string& name) {
  torch::Tensor size;
  archive.read(name, size);
  TORCH_CHECK(size.numel() == 1 && size.item<int64_t>() >= 0, name, " of the archive must be a number");
  return static_cast<size_t>(size.item<int64_t>());
}

// The groups of an archive. Throws c10::Error unless they have as many parameters as these.
inline std::vector<SavedGroup> read_groups(torch::serialize::InputArchive& archive,
                                           const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  torch::serialize::InputArchive all;
  archive.read("param_groups", all);
  const size_t count = read_size(all, "param_groups/size");
  TORCH_CHECK(count == groups.size(), "the archive has ", count, " groups, but the optimizer has ",
              groups.size());
  std::vector<SavedGroup> found(count);
  for (size_t i = 0; i < count; ++i) {
    torch::serialize::InputArchive group;
    all.read("param_groups/" + std::to_string(i), group);
    const size_t params = read_size(group, "params/size"), own = groups[i].params().size();
    TORCH_CHECK(params == own, name_of_group(i), " of the archive has ", params,
                " parameters, but that of the optimizer has ", own);
    for (size_t k = 0; k < params; ++k) {
      c10::IValue key;
      group.read("params/" + std::to_string(k), key);
      found[i].keys.push_back(key.toStringRef());
    }
    group.read("options", found[i].options);
  }
  return found;
}

// Sets those options that a group of an archive has. Throws c10::Error if it has no rate, or one that the
// class has not: it is then of another optimizer. Archives of torch do not say of which they are.
template <class Options>
void read_options(const std::string& group, const std::string& optimizer, SavedGroup& saved,
                  Options& options) {
  const std::vector<std::string> names = saved.options.keys();
  std::string unknown;
  for (const std::string& name : names) {
    if (!Options::has_option(name)) unknown += (unknown.empty() ? "" : ", ") + name;
  }
  TORCH_CHECK(unknown.empty(), group, " of the archive has ", unknown, ": it is not one of ", optimizer);
  const auto has = [&](const char* name) { return std::ranges::find(names, name) != names.end(); };
  TORCH_CHECK(has("lr"), group, " of the archive has no lr: it is not one of ", optimizer);
  // The two are one choice.
  if (has("master_weights") || has("rounding")) options.master_weights(kNotSet).rounding(kNotSet);
  options.serialize(saved.options);
}

// Throws c10::Error unless a tensor of an archive is dense, and all of it within its memory.
inline void check_memory(const std::string& what, const torch::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == torch::kStrided && !tensor.is_meta(), what,
              " must be a dense tensor with values, not one of layout ", tensor.layout(), " on ",
              tensor.device());
  if (tensor.numel() == 0) return;
  int64_t left = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize()) - 1;
  const auto take = [&](int64_t count, int64_t stride) {
    const bool has_room = stride >= 0 && (count == 0 || stride <= left / count);
    TORCH_CHECK(has_room, what, " ends outside of its memory: the archive is corrupt");
    left -= count * stride;
  };
  take(1, tensor.storage_offset());
  for (int64_t d = 0; d < tensor.dim(); ++d) take(tensor.size(d) - 1, tensor.stride(d));
}

// A number of an archive as a step takes it. Throws c10::Error for what is none, or below 0.
inline torch::Tensor fit_number(const std::string& what, const torch::Tensor& tensor) {
  check_memory(what, tensor);
  const bool is_real = !tensor.is_complex() && tensor.scalar_type() != torch::kBool;
  TORCH_CHECK(is_real && tensor.numel() == 1, what, " must be one number, not a tensor of ",
              name_of_dtype(tensor.scalar_type()), " of the shape ", tensor.sizes());
  const auto value = tensor.item<double>();
  TORCH_CHECK(std::isfinite(value) && value >= 0, what, " must be finite and at least 0, not ", value);
  return new_number(value);
}

// A tensor of an archive on a weight's device, in memory of its own: two optimizers may load one archive.
inline torch::Tensor copied(const torch::Tensor& tensor, const torch::Tensor& weight, torch::Dtype dtype) {
  return tensor.to(weight.device(), dtype, /*non_blocking=*/false, /*copy=*/true);
}

// Numbers for each element of a weight, of this dtype and in memory of their own. Throws c10::Error for other
// numbers than real ones, or another shape.
inline torch::Tensor fit_numbers(const std::string& what, const torch::Tensor& tensor,
                                 const torch::Tensor& weight, torch::Dtype dtype) {
  check_memory(what, tensor);
  TORCH_CHECK(tensor.is_floating_point(), what, " must be floating-point numbers or codes, not ",
              name_of_dtype(tensor.scalar_type()));
  TORCH_CHECK(tensor.sizes() == weight.sizes(), what, " has the shape ", tensor.sizes(),
              ", but the weight has ", weight.sizes());
  return copied(tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous(), weight, dtype);
}

// Checks all tensors of a weight's state that comes from an archive, and casts them as a step takes them. If
// one state of a 16-bit weight is float32, all are.
template <class State>
void fit_state(const std::string& name, const torch::Tensor& weight, State& state) {
  const torch::Dtype dtype = weight.scalar_type();
  for (size_t i = 0; i < State::kNumbers.size(); ++i) {
    const std::string what = State::kNumbers[i].name + (" of " + name);
    if (state.number(i).defined()) state.number(i, fit_number(what, state.number(i)));
    TORCH_CHECK(state.number(i).defined() || !state.has_slots(), what, " is missing");
  }
  bool is_wide = false;
  for (size_t k = 0; k < std::size(State::kStates); ++k) {
    const torch::Tensor& tensor = state.slot(k);
    is_wide |= has_16_bits(weight) && tensor.defined() && tensor.scalar_type() == torch::kFloat32;
  }
  for (size_t k = 0; k < std::size(State::kStates); ++k) {
    const torch::Tensor tensor = state.slot(k);
    const std::string what = State::kStates[k].name + (" of " + name);
    if (!tensor.defined()) continue;
    if (is_codes(tensor)) {
      check_memory(what, tensor);
      if (state.absmax(k).defined()) check_memory("the absmax of " + what, state.absmax(k));
      check_codes(what, tensor, state.absmax(k), weight);
      state.slot(k, copied(tensor.contiguous(), weight, tensor.scalar_type()));
      state.absmax(k, copied(state.absmax(k).contiguous(), weight, torch::kFloat32));
    } else {
      state.slot(k, fit_numbers(what, tensor, weight, is_wide ? torch::kFloat32 : dtype));
      state.absmax(k, torch::Tensor());
    }
  }
  for (size_t i = 0; i < kBeside.size(); ++i) {
    const Way way{static_cast<uint8_t>(i)};
    const torch::Tensor tensor = state.beside(way);
    const std::string what = kBeside[i] + (" of " + name);
    if (!tensor.defined()) continue;
    if (way == Way::kSplit) {
      check_memory(what, tensor);
      TORCH_CHECK(tensor.scalar_type() == torch::kInt16, what, " must be int16, not ",
                  name_of_dtype(tensor.scalar_type()));
      TORCH_CHECK(tensor.sizes() == weight.sizes(), what, " has the shape ", tensor.sizes(),
                  ", but the weight has ", weight.sizes());
      state.beside(way, copied(tensor, weight, torch::kInt16));
    } else {
      state.beside(way, fit_numbers(what, tensor, weight, way == Way::kFloat32 ? torch::kFloat32 : dtype));
    }
  }
}

}  // namespace fusedstep::optim::detail
