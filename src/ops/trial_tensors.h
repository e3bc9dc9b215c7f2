// Tensors to try on what torch's stable ABI does not tell.
#pragma once
#include <cstdint>
#include <vector>

#include "src/ops/native_plan.h"

namespace fusedstep::ops {

// One tensor of each dtype and number of dimensions whose sizes lie in the tensor itself.
std::vector<Tensor> trial_tensors();

const int64_t* sizes_of(const Tensor& tensor);

}  // namespace fusedstep::ops
