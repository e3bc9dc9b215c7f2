// Runs the kernels of cuda_kernels/ on the host, for machines without a GPU to test them: included before
// everything else when these are compiled as C++. The threads of a block are fibers that take turns; blocks
// run one after the other.
#pragma once
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>

// NOLINTBEGIN(bugprone-reserved-identifier): the words of CUDA
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
// NOLINTEND(bugprone-reserved-identifier)

namespace fusedstep::emulator {

struct Index {
  unsigned x;
};
extern Index thread_index, block_index, blocks_in_grid;

// Number of calls of run().
extern int launches;

// Runs `body` in each thread of each block.
void run(int64_t blocks, int threads, const std::function<void()>& body);
// Waits until all threads of the block that have not ended are here.
void wait_for_block();
// The same for the threads of a warp.
void wait_for_warp();
double value_of_neighbour(double value, int distance, int width);
unsigned largest_of_warp(unsigned value);

}  // namespace fusedstep::emulator

#define threadIdx (::fusedstep::emulator::thread_index)
#define blockIdx (::fusedstep::emulator::block_index)
#define gridDim (::fusedstep::emulator::blocks_in_grid)

// NOLINTBEGIN(bugprone-reserved-identifier)
inline void __syncthreads() { fusedstep::emulator::wait_for_block(); }
inline void __syncwarp() { fusedstep::emulator::wait_for_warp(); }
inline void __threadfence() {}
[[noreturn]] inline void __nanosleep(unsigned) { std::abort(); }  // blocks do not wait for later ones

inline unsigned atomicAdd(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at += value;
  return before;
}
inline unsigned long long atomicMin(unsigned long long* at, unsigned long long value) {
  const unsigned long long before = *at;
  *at = value < before ? value : before;
  return before;
}
[[noreturn]] inline void __trap() { std::abort(); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline double __shfl_down_sync(unsigned, double value, int distance, int width) {
  return fusedstep::emulator::value_of_neighbour(value, distance, width);
}

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return fusedstep::emulator::largest_of_warp(value);
}

template <class Word>
Word __ldcs(const Word* from) {
  return *from;
}
template <class Word>
Word __ldcg(const Word* from) {
  return *from;
}
template <class Word>
void __stcs(Word* to, Word word) {
  *to = word;
}
// NOLINTEND(bugprone-reserved-identifier)

#include "cuda_kernels/launch.cuh"
#include "src/core/reduction.h"

namespace fusedstep::cuda {

template <class... Parameters, class... Arguments>
void launch_blocks(void (*kernel)(Parameters...), int64_t blocks, Queue, const Arguments&... arguments) {
  emulator::run(blocks, kThreads, [&] { kernel(arguments...); });
}

template <class... Parameters, class... Arguments>
void launch_with_memory(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t, Queue,
                        const Arguments&... arguments) {
  emulator::run(blocks, threads, [&] { kernel(arguments...); });
}

// Fewer places than the tests' tensors have chunks: some have to do without.
constexpr Residents kEmulated{3, 4};

// As near as a float can be. A GPU's are off by a unit in the last place now and then, but never where a
// quotient or a root would then be rounded to the wrong side.
inline float approximate_reciprocal(float x) { return 1 / x; }
inline float approximate_inverse_root(float x) { return static_cast<float>(1 / std::sqrt(double{x})); }

inline void let_next_kernel_begin() {}
inline void wait_for_kernel_before() {}

inline void* block_memory() {
  alignas(kWordBytes) static std::byte bytes[kEmulated.slots * kChunkElements * sizeof(double)];
  return bytes;
}

template <class... Parameters>
Residents residents(int, void (*)(Parameters...), int, int, size_t) {
  return kEmulated;
}

}  // namespace fusedstep::cuda
