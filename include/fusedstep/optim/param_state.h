// The state of one parameter, by names, and its archives.
#pragma once
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "fusedstep/optim/state_codes.h"
#include "fusedstep/optim/weight_value.h"
#include "fusedstep/rules/list.h"

namespace fusedstep::optim {
namespace detail {

// A number of a state. Behind it in its memory a step keeps what float32 lacks of a long step count, from -1
// down: src/ops/native_plan.cpp.
inline torch::Tensor new_number(double value) {
  torch::Tensor number = torch::full({2}, -1, torch::kFloat32);
  number.resize_({});
  return number.fill_(value);
}

}  // namespace detail

// The numbers that a rule keeps for each parameter. The first is the step count.
template <class Rule>
constexpr auto numbers_of() {
  std::array<rules::NumberSpec, 1 + rules::kNumbersOf<Rule>> numbers{{{"step", 0}}};
  if constexpr (rules::kNumbersOf<Rule> != 0) {
    for (size_t i = 0; i < rules::kNumbersOf<Rule>; ++i) numbers[1 + i] = Rule::kNumbers[i];
  }
  return numbers;
}

// Declares the members by which torch's classes read and set a state, one of the rule's with this name.
#define FUSEDSTEP_STATE(name, ...)                                            \
  auto name(torch::Tensor tensor)->decltype(*this)& {                         \
    slot(slot_of(#name), std::move(tensor));                                  \
    return *this;                                                             \
  }                                                                           \
  const torch::Tensor& name() const noexcept { return slot(slot_of(#name)); } \
  torch::Tensor& name() noexcept { return slot(slot_of(#name)); }

// The state of one parameter: numbers (each a float32 tensor) and the rule's states, by name. A state in
// codes has an absmax beside it; a 16-bit weight may have its master_param, low_param or compensation.
template <class Derived, template <unsigned> class Rule>
class ParamState : public torch::optim::OptimizerCloneableParamState<Derived> {
 public:
  static constexpr auto& kStates = Rule<0>::kAllStates;
  static constexpr auto kNumbers = numbers_of<Rule<0>>();

  // The step count.
  const torch::Tensor& step() const { return number(0); }
  Derived& step(torch::Tensor step) {
    number(0, std::move(step));
    return static_cast<Derived&>(*this);
  }
  Derived& step(int64_t step) { return this->step(detail::new_number(static_cast<double>(step))); }
  const torch::Tensor& number(size_t i) const { return numbers_[i]; }
  void number(size_t i, torch::Tensor tensor) { numbers_[i] = std::move(tensor); }
  const torch::Tensor& slot(size_t i) const { return slots_[i]; }
  torch::Tensor& slot(size_t i) { return slots_[i]; }
  void slot(size_t i, torch::Tensor tensor) { slots_[i] = std::move(tensor); }
  const torch::Tensor& absmax(size_t i) const { return absmax_[i]; }
  void absmax(size_t i, torch::Tensor tensor) { absmax_[i] = std::move(tensor); }

  // The index of the state with this name.
  static consteval size_t slot_of(std::string_view name) {
    size_t i = 0;
    while (kStates[i].name != name) ++i;
    return i;
  }

  // The tensor that the weight keeps beside it in a way that has one.
  const torch::Tensor& beside(detail::Way way) const { return beside_[static_cast<size_t>(way)]; }
  void beside(detail::Way way, torch::Tensor tensor) {
    beside_[static_cast<size_t>(way)] = std::move(tensor);
  }
  const torch::Tensor& master_param() const { return beside(detail::Way::kFloat32); }
  const torch::Tensor& low_param() const { return beside(detail::Way::kSplit); }
  const torch::Tensor& compensation() const { return beside(detail::Way::kKahan); }

  static constexpr bool is_signed(size_t i) { return kStates[i].sign == rules::Sign::kAny; }

  bool has_slots() const {
    return std::any_of(slots_.begin(), slots_.end(),
                       [](const torch::Tensor& slot) { return slot.defined(); });
  }

  // As before a first step of the weight, whose value stays.
  void zero(const torch::Tensor& weight) {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < numbers_.size(); ++i) numbers_[i].fill_(kNumbers[i].first);
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].defined()) fill(i, 0, weight);
    }
  }

  // Sets all elements of a state of the weight to a value.
  void fill(size_t i, double value, const torch::Tensor& weight) {
    const std::string_view kind = detail::kind_of(slots_[i], weight);
    if (kind.empty()) {
      slots_[i].fill_(value);
    } else {
      detail::fill_codes(slots_[i], absmax_[i], kind, value, is_signed(i));
    }
  }

  // True if all tensors are there in both, or in none, and equal.
  friend bool operator==(const Derived& a, const Derived& b) {
    return are_equal(a.numbers_, b.numbers_) && are_equal(a.slots_, b.slots_) &&
           are_equal(a.absmax_, b.absmax_) && are_equal(a.beside_, b.beside_);
  }

  // A step count is an int, as torch's classes read it. One that is none is written as it is.
  void serialize(torch::serialize::OutputArchive& archive) const override {
    for (size_t i = 0; i < numbers_.size(); ++i) {
      const torch::Tensor& number = numbers_[i];
      if (!number.defined()) continue;
      if (i == 0 && is_count(number)) {
        archive.write(kNumbers[i].name, torch::IValue(number.item<int64_t>()));
      } else {
        archive.write(kNumbers[i].name, number, /*is_buffer=*/true);
      }
    }
    for_others(*this, [&](const std::string& name, const torch::Tensor& tensor) {
      if (tensor.defined()) archive.write(name, tensor, /*is_buffer=*/true);
    });
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    for (size_t i = 0; i < numbers_.size(); ++i) {
      torch::IValue value;
      if (!archive.try_read(kNumbers[i].name, value)) continue;
      numbers_[i] = value.isTensor() ? value.toTensor() : torch::full({}, value.toScalar(), torch::kFloat64);
    }
    for_others(*this, [&](const std::string& name, torch::Tensor& tensor) {
      archive.try_read(name, tensor, /*is_buffer=*/true);
    });
  }

 private:
  static bool is_count(const torch::Tensor& number) {
    if (number.numel() != 1 || number.is_complex()) return false;
    const auto value = number.item<double>();
    return value >= 0 && value < 0x1p53 && value == std::floor(value);
  }

  template <class All>
  static bool are_equal(const All& a, const All& b) {
    return std::ranges::equal(a, b, [](const torch::Tensor& x, const torch::Tensor& y) {
      if (!x.defined() || !y.defined()) return x.defined() == y.defined();
      if (x.dtype() != y.dtype() || x.device() != y.device() || x.sizes() != y.sizes()) return false;
      const bool is_float8 = x.scalar_type() == torch::kFloat8_e4m3fn;
      return is_float8 ? torch::equal(x.view(torch::kUInt8), y.view(torch::kUInt8)) : torch::equal(x, y);
    });
  }

  // Calls work(name, tensor) for all tensors but the numbers.
  template <class Self, class Work>
  static void for_others(Self& self, const Work& work) {
    for (size_t i = 0; i < self.slots_.size(); ++i) {
      work(kStates[i].name, self.slots_[i]);
      work(std::string(kStates[i].name) + "_absmax", self.absmax_[i]);
    }
    for (size_t i = 0; i < self.beside_.size(); ++i) work(detail::kBeside[i], self.beside_[i]);
  }

  std::array<torch::Tensor, kNumbers.size()> numbers_;
  std::array<torch::Tensor, std::size(Rule<0>::kAllStates)> slots_, absmax_;
  std::array<torch::Tensor, detail::kBeside.size()> beside_;
};

}  // namespace fusedstep::optim
