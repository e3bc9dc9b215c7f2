// States in codes of 8 or 4 bits: which there are, checks of them, and numbers to codes and back. A state in
// codes is two tensors, the codes and the absolute maximum of each block of them (docs/small_states.md).
#pragma once
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "fusedstep/optim/operators.h"
#include "fusedstep/optim/options.h"

namespace fusedstep::optim::detail {

// A weight of fewer elements has float32 states.
inline constexpr int64_t kLeastElements = 4096;

inline bool is_codes(const torch::Tensor& state) {
  return state.scalar_type() == torch::kUInt8 || state.scalar_type() == torch::kFloat8_e4m3fn;
}

// The kind of codes that a group's options ask for; "" for numbers.
inline std::string_view asked_kind(const Storage& storage, const torch::Tensor& weight) {
  const auto dtype = weight.scalar_type();
  const bool can_be_coded =
      weight.numel() >= kLeastElements &&
      (dtype == torch::kFloat32 || dtype == torch::kBFloat16 || dtype == torch::kFloat16);
  return can_be_coded && storage.state_dtype != "float32" ? storage.state_dtype : std::string_view();
}

// The kind of codes that a state has; "" for numbers.
inline std::string_view kind_of(const torch::Tensor& state, const torch::Tensor& weight) {
  if (!is_codes(state)) return "";
  if (state.scalar_type() == torch::kFloat8_e4m3fn) return "fp8";
  return state.sizes() == weight.sizes() ? "int8" : "int4";
}

// The shape of tensors that have one number for so many elements: packed codes, absmax of blocks.
inline std::vector<int64_t> sizes_in_units(at::IntArrayRef sizes, int64_t unit) {
  const int64_t row = sizes.size() > 1 ? c10::multiply_integers(sizes.slice(1)) : 0;
  if (sizes.size() > 1 && row % unit == 0) return {sizes[0], row / unit};
  return {(c10::multiply_integers(sizes) + unit - 1) / unit};
}

// Throws c10::Error unless these are the codes of a state of the weight, and their absmax.
inline void check_codes(const std::string& name, const torch::Tensor& codes, const torch::Tensor& absmax,
                        const torch::Tensor& weight) {
  const std::string_view kind = kind_of(codes, weight);
  const std::vector<int64_t> packed = sizes_in_units(weight.sizes(), 2);
  const std::vector<int64_t> blocks = sizes_in_units(weight.sizes(), kind == "int4" ? 128 : 256);
  TORCH_CHECK(codes.sizes() == (kind == "int4" ? at::IntArrayRef(packed) : weight.sizes()), name,
              " has codes of the shape ", codes.sizes(), "; of a weight of the shape ", weight.sizes(),
              " they have ", weight.sizes(), ", or ", at::IntArrayRef(packed), " (int4)");
  TORCH_CHECK(absmax.defined() && absmax.scalar_type() == torch::kFloat32, "the absmax of ", name,
              " must be a dense tensor, since it has codes");
  TORCH_CHECK(absmax.sizes() == at::IntArrayRef(blocks), "the absmax of ", name, " has ", absmax.numel(),
              " numbers, of the shape ", absmax.sizes(), ", but there are ", c10::multiply_integers(blocks),
              " blocks, of the shape ", at::IntArrayRef(blocks));
}

// The float32 numbers of codes, in the weight's shape and on its device.
inline torch::Tensor decode(const torch::Tensor& codes, const torch::Tensor& absmax,
                            const torch::Tensor& weight, bool is_signed) {
  static const Op op("fusedstep::decode_state");
  const auto numbers = op({codes.cpu().contiguous(), absmax.cpu().contiguous(), weight.sizes(), is_signed});
  return numbers[0].toTensor().to(weight.device());
}

// The codes of numbers, and their absmax.
inline std::tuple<torch::Tensor, torch::Tensor> encode(const torch::Tensor& numbers, std::string_view kind,
                                                       bool is_signed) {
  static const Op op("fusedstep::encode_state"), index_of("fusedstep::storage_index");
  const int64_t storage = index_of({std::string(kind)})[0].toInt();
  const auto both = op({numbers.to(torch::kCPU, torch::kFloat32).contiguous(), storage, is_signed,
                        /*step=*/int64_t{0}});
  const torch::Tensor &codes = both[0].toTensor(), &absmax = both[1].toTensor();
  return {codes.to(numbers.device()), absmax.to(numbers.device())};
}

// Sets all elements of a state in codes to a value.
inline void fill_codes(const torch::Tensor& codes, const torch::Tensor& absmax, std::string_view kind,
                       double value, bool is_signed) {
  const auto [code, largest] = encode(torch::full({2}, value, torch::kFloat32), kind, is_signed);
  codes.view(torch::kUInt8).fill_(code.view(torch::kUInt8)[0].item());
  absmax.fill_(largest[0].item());
}

}  // namespace fusedstep::optim::detail
