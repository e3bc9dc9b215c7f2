// Lists of tensors as the passes around matrix products take them.
#pragma once
#include <algorithm>
#include <cmath>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "src/core/matrix_passes.h"
#include "src/ops/native_plan.h"

namespace fusedstep::ops {

// Throws std::runtime_error if there is no pass over tensors of these dtypes.
inline PassFormat format_of(DType stored, DType product) {
  switch (stored) {
    case DType::kFloat:
      if (product == DType::kBFloat16) return PassFormat::kFloatBFloat16;
      if (product == DType::kHalf) return PassFormat::kFloatHalf;
      if (product == stored) return PassFormat::kFloat;
      break;
    case DType::kDouble:
      if (product == stored) return PassFormat::kDouble;
      break;
    case DType::kBFloat16:
      if (product == stored) return PassFormat::kBFloat16;
      if (product == DType::kHalf) return PassFormat::kBFloat16Half;
      break;
    case DType::kHalf:
      if (product == stored) return PassFormat::kHalf;
      break;
    default:
      break;
  }
  throw std::runtime_error(std::string("no pass takes ") + name_of(stored) + " with " + name_of(product));
}

// The operands of a list, all alike.
class PassOperands {
 public:
  PassOperands(const Tensors& tensors, const char* what, const TensorView& like)
      : what_(what), dtype_(tensors.empty() ? like.dtype : view(tensors[0], what).dtype) {
    for (const Tensor& tensor : tensors) {
      const TensorView found = view(tensor, what);
      check(found.device == like.device && found.dtype == dtype_ && is_in_order(found.sizes, found.strides),
            std::string(what) + " must be contiguous, of one dtype, on the device of the others");
      data_.push_back(found.data);
      counts_.push_back(elements_of(found.sizes));
    }
  }
  DType dtype() const { return dtype_; }
  void* data(size_t i) const { return data_[i]; }
  const std::vector<int64_t>& counts() const { return counts_; }
  void check_is_of(const PassOperands& other) const {
    check(counts_ == other.counts_, std::string(what_) + " must have as many elements as the others");
  }

 private:
  const char* what_;
  DType dtype_;
  std::vector<void*> data_;
  std::vector<int64_t> counts_;
};

// Refuses numbers beyond the range of the maths, as torch's operations do.
inline void check_range(DType stored, std::span<const double> numbers) {
  const auto fits = [](double number) {
    return !std::isfinite(number) || std::isfinite(static_cast<float>(number));
  };
  check(stored == DType::kDouble || std::ranges::all_of(numbers, fits),
        "value cannot be converted to type float without overflow");
}

}  // namespace fusedstep::ops
