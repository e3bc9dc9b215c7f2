#include "src/ops/trial_tensors.h"

namespace fusedstep::ops {

std::vector<Tensor> trial_tensors() {
  std::vector<Tensor> tensors;
  for (const int32_t dtype : {aoti_torch_dtype_float32(), aoti_torch_dtype_float64(),
                              aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16()}) {
    for (size_t dims = 0; dims <= kMostSizesInTensor; ++dims) {
      const std::vector<int64_t> ones(dims, 1);
      AtenTensorHandle handle = nullptr;
      TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(dims), ones.data(), ones.data(),
                                                      dtype, aoti_torch_device_type_cpu(), 0, &handle));
      tensors.emplace_back(handle);
    }
  }
  return tensors;
}

const int64_t* sizes_of(const Tensor& tensor) {
  int64_t* sizes = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
  return sizes;
}

}  // namespace fusedstep::ops
