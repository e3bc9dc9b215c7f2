// Ways to keep the float32 value of a 16-bit weight between steps, and the change from one way to another.
// Kernels do the same with the same bits (src/core/weight_code.h); this is for values that do not come from a
// step.
#pragma once
#include <torch/types.h>

#include <array>
#include <cstdint>
#include <limits>

#include "fusedstep/optim/options.h"

namespace fusedstep::optim::detail {

// The first have a tensor beside the weight, with its name at the same place in kBeside:
//   float32      the value, which counts where it rounds to the weight
//   split        its lower 16 bits, as int16. bfloat16 only
//   Kahan        the last rounding error, in the weight's dtype
//   stochastic   nothing is beside the weight: it is rounded at random. bfloat16 only
enum class Way : uint8_t { kFloat32, kSplit, kKahan, kStochastic, kNone };
inline constexpr std::array kBeside{"master_param", "low_param", "compensation"};
// Their storage, as new_states() takes it.
inline constexpr std::array kBesideStorage{"float32", "int16", "weight"};

inline bool has_beside(Way way) { return static_cast<size_t>(way) < kBeside.size(); }

inline bool has_16_bits(const torch::Tensor& weight) {
  return weight.scalar_type() == torch::kBFloat16 || weight.scalar_type() == torch::kFloat16;
}

// The way in which a weight keeps its value. Throws c10::Error if its dtype has not the one that is asked
// for.
inline Way way_of(const Storage& storage, const torch::Tensor& weight) {
  if (!storage.keeps_values() || !has_16_bits(weight)) return Way::kNone;
  if (storage.master_weights == "float32") return Way::kFloat32;
  if (storage.rounding == "kahan") return Way::kKahan;
  const bool is_split = storage.master_weights == "split";
  TORCH_CHECK(weight.scalar_type() == torch::kBFloat16,
              is_split ? "master_weights='split'" : "rounding='stochastic'",
              " takes bfloat16 weights, but one is float16");
  return is_split ? Way::kSplit : Way::kStochastic;
}

// The value of a bfloat16 weight and its lower bits.
inline torch::Tensor joined(const torch::Tensor& weight, const torch::Tensor& low) {
  const torch::Tensor upper = weight.view(torch::kInt16).to(torch::kInt32), lower = low.to(torch::kInt32);
  const torch::Tensor magnitude = upper.bitwise_and(0x7fff);
  // A weight that was changed: these would take zero across zero, or infinity to NaN.
  const torch::Tensor is_foreign = (lower.lt(0) & magnitude.eq(0)) | (lower.gt(0) & magnitude.ge(0x7f80));
  return (upper.bitwise_left_shift(16) + lower.masked_fill(is_foreign, 0)).view(torch::kFloat32);
}

// The value of a weight, in float32.
inline torch::Tensor value_of(Way way, const torch::Tensor& weight, const torch::Tensor& beside) {
  const torch::Tensor numbers = weight.to(torch::kFloat32);
  if (way == Way::kFloat32) return torch::where(beside.to(weight.dtype()) == weight, beside, numbers);
  if (way == Way::kKahan) return numbers + beside.to(torch::kFloat32);
  return way == Way::kSplit ? joined(weight, beside) : numbers;
}

// The tensor beside a weight that gives it this value, which rounds to it.
inline torch::Tensor beside_of(Way way, const torch::Tensor& weight, const torch::Tensor& value) {
  if (way == Way::kFloat32) {
    // The next value that rounds to this weight, for one in the middle of two weights.
    const torch::Tensor towards = torch::nextafter(value, weight.to(torch::kFloat32));
    return torch::where(value.to(weight.dtype()) == weight, value, towards);
  }
  if (way == Way::kKahan) {
    const torch::Tensor error = value - weight.to(torch::kFloat32);
    return torch::where(weight.isfinite(), error, torch::zeros_like(error)).to(weight.dtype());
  }
  using Low = std::numeric_limits<int16_t>;
  const torch::Tensor upper = weight.view(torch::kInt16).to(torch::kInt64).bitwise_left_shift(16);
  const torch::Tensor low = value.contiguous().view(torch::kInt32).to(torch::kInt64) - upper;
  return low.clamp(Low::min(), Low::max()).masked_fill(weight.isnan(), 0).to(torch::kInt16);
}

}  // namespace fusedstep::optim::detail
