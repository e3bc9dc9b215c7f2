// How kernels are launched: blocks of kThreads threads, on a stream.
#pragma once
#include <cstdint>

#include "cuda_kernels/kernel_table.h"

namespace fusedstep::cuda {

constexpr int kThreads = 256;

#if defined(__CUDACC__)
template <class... Parameters, class... Arguments>
void launch_blocks(void (*kernel)(Parameters...), int64_t blocks, Stream stream,
                   const Arguments&... arguments) {
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(arguments...);
}
#endif

}  // namespace fusedstep::cuda
