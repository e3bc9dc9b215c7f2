#include "src/tensor_view.h"

namespace fusedstep {

int element_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return 4;
    case DType::kDouble:
      return 8;
    case DType::kBFloat16:
    case DType::kHalf:
      return 2;
  }
  return 0;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return "float32";
    case DType::kDouble:
      return "float64";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kHalf:
      return "float16";
  }
  return "?";
}

int64_t span_bytes(const TensorView& view) {
  int64_t last = 0;
  for (size_t d = 0; d < view.sizes.size(); ++d) {
    if (view.sizes[d] == 0) return 0;
    last += (view.sizes[d] - 1) * view.strides[d];
  }
  return (last + 1) * element_size(view.dtype);
}

}  // namespace fusedstep
