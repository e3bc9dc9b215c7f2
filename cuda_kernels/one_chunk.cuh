// Both phases of a rule with norms for tensors of one chunk each, in words: a block of threads takes a tensor
// through both by itself, and the update stays in shared memory in between. No block waits for another.
#pragma once
#include "cuda_kernels/two_phase.cuh"

namespace fusedstep::cuda {

// Blocks that a multiprocessor is to hold: what small tensors take is mostly waiting for memory.
template <class T>
constexpr int kOneChunkBlocks = sizeof(T) == sizeof(float) ? 4 : 2;

template <template <unsigned> class Rule, unsigned kFlags, class Weight, class State>
__global__ void __launch_bounds__(kThreads,
                                  kOneChunkBlocks<typename Operands<Rule<kFlags>, Weight, State>::T>)
    one_chunk_kernel(const __grid_constant__ TwoPhaseLaunch launch) {
  using Body = Operands<Rule<kFlags>, Weight, State>;
  using T = typename Body::T;
  __shared__ Found<2, T> found;
  __shared__ SegmentSums<2, kChunkSegments> sums;
  __shared__ double norms2[2], ratio;
  const Chunk chunk = launch.pass.chunks[blockIdx.x].chunk;
  if (left_out(launch.pass.found_inf)) {
    const Clear<Apply<Body, Updates::kStored>> body(launch.pass, chunk);
    if (body.clears) go_over(body, chunk);
    return;
  }
  T* const held = static_cast<T*>(block_memory());
  sum_words<T>(chunk, found, sums, Accumulate<Body>(launch.pass, chunk, held));
  __syncthreads();
  if (threadIdx.x < kWarp) {
    double total = 0;
    sums.add_to(total, segments_of(chunk));
    add_lanes<2>(total, norms2);
    __syncwarp();
    if (threadIdx.x == 0) {
      typename Rule<0>::Hyper hyper;
      memcpy(&hyper, &launch.hyper, sizeof hyper);
      ratio = Rule<0>::trust_ratio(hyper, norms2[0], norms2[1]);
    }
  }
  __syncthreads();
  go_over(Apply<Body, Updates::kHeld>(launch.pass, chunk, ratio, held), chunk);
}

template <template <unsigned> class Rule, unsigned kFlags, class Weight, class State>
void launch_one_chunk(const TwoPhaseLaunch& launch) {
  using T = typename Operands<Rule<kFlags>, Weight, State>::T;
  constexpr size_t kHeldBytes = kChunkElements * sizeof(T);
  constexpr auto kKernel = one_chunk_kernel<Rule, kFlags, Weight, State>;
  residents_of<kKernel>(launch.device, /*per_multiprocessor=*/1, /*most_slots=*/1, kHeldBytes);
  launch_with_memory(kKernel, launch.pass.chunk_count, kThreads, kHeldBytes, launch.pass.queue, launch);
}

}  // namespace fusedstep::cuda
