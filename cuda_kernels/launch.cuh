// Launches of kernels: blocks of kThreads threads, on a stream.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "cuda_kernels/kernel_table.h"

namespace fusedstep::cuda {

constexpr int kThreads = 256, kWarp = 32;

// Blocks of a kernel that are resident on a device at once, and slots that each keeps in shared memory.
struct Residents {
  int64_t blocks;
  int slots;
};

#if defined(__CUDACC__)
// With so many threads, and `memory` bytes of shared memory that the kernel may be launched with.
template <class... Parameters, class... Arguments>
void launch_with_memory(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t memory,
                        Queue queue, const Arguments&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = memory;
  config.stream = queue.stream;
  config.attrs = &early;
  config.numAttrs = queue.early ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <class... Parameters, class... Arguments>
void launch_blocks(void (*kernel)(Parameters...), int64_t blocks, Queue queue,
                   const Arguments&... arguments) {
  launch_with_memory(kernel, blocks, kThreads, 0, queue, arguments...);
}

// Lets the next kernel on the stream begin, if it is an early one.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// For what an early kernel reads that the one before writes.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float approximate_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float approximate_inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The shared memory that a block was launched with.
__device__ __forceinline__ void* block_memory() {
  extern __shared__ uint4 bytes[];
  return bytes;
}

// With `per_multiprocessor` blocks on each, and up to `most_slots` slots. The kernel may then be launched
// with that much memory.
template <class... Parameters>
Residents residents(int device, void (*kernel)(Parameters...), int per_multiprocessor, int most_slots,
                    size_t slot_bytes) {
  const auto ask = [&](cudaDeviceAttr attribute) {
    int value = 0;
    cudaDeviceGetAttribute(&value, attribute, device);
    return value;
  };
  cudaFuncAttributes used{};
  cudaFuncGetAttributes(&used, kernel);
  const int share = ask(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / per_multiprocessor -
                    ask(cudaDevAttrReservedSharedMemoryPerBlock);
  const int most = std::min(share, ask(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  const int left = most - static_cast<int>(used.sharedSizeBytes);
  const int slots = std::max(0, std::min(left / static_cast<int>(slot_bytes), most_slots));
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(slots * slot_bytes));
  return {static_cast<int64_t>(ask(cudaDevAttrMultiProcessorCount)) * per_multiprocessor, slots};
}
#endif

}  // namespace fusedstep::cuda
