#include "src/operand_checks.h"

#include <algorithm>
#include <stdexcept>

#include "src/overlap.h"

namespace fusedstep {
namespace {

// States have the weight's dtype, or float32 where the weight has 16 bits. The latter may have a master copy.
Format format_of(size_t i, DType weight, DType state, bool has_master) {
  static constexpr struct {
    DType weight, state;
    bool has_master;
    Format format;
  } kFormats[] = {{DType::kFloat, DType::kFloat, false, Format::kFloat},
                  {DType::kDouble, DType::kDouble, false, Format::kDouble},
                  {DType::kBFloat16, DType::kBFloat16, false, Format::kBFloat16},
                  {DType::kHalf, DType::kHalf, false, Format::kHalf},
                  {DType::kBFloat16, DType::kFloat, false, Format::kBFloat16Float},
                  {DType::kHalf, DType::kFloat, false, Format::kHalfFloat},
                  {DType::kBFloat16, DType::kFloat, true, Format::kBFloat16Master},
                  {DType::kHalf, DType::kFloat, true, Format::kHalfMaster}};
  for (const auto& known : kFormats) {
    if (known.weight == weight && known.state == state && known.has_master == has_master) return known.format;
  }
  if (has_master) {
    refuse(i, std::string("a master copy takes a weight of 16 bits with float32 states; the weight is ") +
                  name_of(weight) + ", a state " + name_of(state));
  }
  refuse(i, std::string("a state is ") + name_of(state) + " but the weight is " + name_of(weight));
}

std::string name_of_device(int device) {
  return device == kHost ? "the CPU" : "cuda:" + std::to_string(device);
}

void check_device(size_t i, const char* what, const TensorView& view, int device) {
  if (view.device == device) return;
  refuse(i, std::string(what) + " is on " + name_of_device(view.device) + " but the weight is on " +
                name_of_device(device));
}

std::string text(Dims sizes) {
  std::string out = "[";
  for (size_t d = 0; d < sizes.size(); ++d) out += (d ? ", " : "") + std::to_string(sizes[d]);
  return out + "]";
}

void check_grad(size_t i, const TensorView& weight, const TensorView& grad) {
  if (!std::ranges::equal(grad.sizes, weight.sizes)) {
    refuse(i, "the gradient's shape " + text(grad.sizes) + " is not the weight's, " + text(weight.sizes));
  }
  if (grad.dtype != weight.dtype) {
    refuse(i, std::string("the gradient is ") + name_of(grad.dtype) + " but the weight is " +
                  name_of(weight.dtype));
  }
  if (overlaps_itself(weight.sizes, weight.strides)) {
    refuse(i, "the weight overlaps itself in memory (an expanded tensor?); clone() it first");
  }
}

void check_state(size_t i, const TensorView& weight, const TensorView& state) {
  if (!std::ranges::equal(state.sizes, weight.sizes)) {
    refuse(i, "a state's shape " + text(state.sizes) + " is not the weight's, " + text(weight.sizes));
  }
  if (overlaps_itself(state.sizes, state.strides)) {
    refuse(i, "a state overlaps itself in memory (an expanded tensor?); clone() it first");
  }
}

}  // namespace

void refuse(size_t i, const std::string& why) {
  throw std::runtime_error("tensor " + std::to_string(i) + " of the list: " + why);
}

void refuse_row(size_t i, int dim, int64_t at, int64_t size) {
  refuse(i, "the gradient's index " + std::to_string(at) + " is out of range: dimension " +
                std::to_string(dim) + " of the weight has size " + std::to_string(size));
}

void check_devices(size_t i, const TensorOperands& operands, int slots, int device) {
  check_device(i, "the gradient", operands.grad, device);
  for (int k = 0; k < slots; ++k) check_device(i, "a state", operands.states[k], device);
}

Format checked_format(size_t i, const TensorOperands& operands, int slots, bool masters) {
  const DType weight = operands.weight.dtype;
  check_grad(i, operands.weight, operands.grad);
  Format format = format_of(i, weight, weight, false);
  for (int k = 0; k < slots; ++k) {
    const TensorView& state = operands.states[k];
    check_state(i, operands.weight, state);
    format = format_of(i, weight, state.dtype, masters);
    if (state.dtype != operands.states[0].dtype) refuse(i, "its states have different dtypes");
  }
  return format;
}

void check_rows(size_t i, const RowIndex& rows, Dims sizes) {
  for (int d = 0; d < rows.dims; ++d) {
    for (int64_t entry = 0; entry < rows.entries; ++entry) {
      const int64_t at = rows.at(d, entry);
      if (at < 0 || at >= sizes[d]) refuse_row(i, d, at, sizes[d]);
    }
  }
}

}  // namespace fusedstep
