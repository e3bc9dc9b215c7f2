// Maps of codes as kernels read them.
#pragma once
#include "cuda_kernels/kernel_table.h"

namespace fusedstep::cuda {

CodeTable code_table(const CodeMap& map);

}  // namespace fusedstep::cuda
