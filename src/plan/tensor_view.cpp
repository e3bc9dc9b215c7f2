#include "src/plan/tensor_view.h"

#include <algorithm>
#include <numeric>

namespace fusedstep {

int element_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return 4;
    case DType::kDouble:
      return 8;
    case DType::kBFloat16:
    case DType::kHalf:
    case DType::kInt16:
      return 2;
    case DType::kUInt8:
    case DType::kFloat8:
      return 1;
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
    case DType::kInt16:
      return "int16";
    case DType::kUInt8:
      return "uint8";
    case DType::kFloat8:
      return "float8_e4m3fn";
  }
  return "?";
}

std::vector<int64_t> strides_in_order(Dims sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

bool is_in_order(Dims sizes, Dims strides) {
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] == 0) return true;
    if (sizes[d] > 1 && strides[d] != stride) return false;
    stride *= sizes[d];
  }
  return true;
}

int64_t elements_of(Dims sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
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
