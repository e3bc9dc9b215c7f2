// The passes of a rule over operands that are stored in codes.
#pragma once
#include "cuda_kernels/coded_operands.cuh"

namespace fusedstep::cuda {

// Blocks of threads that a multiprocessor is to hold: eight numbers of each operand in registers.
template <class Body>
constexpr int kCodedResident = Body::kOperands <= 4   ? 4
                               : Body::kOperands == 5 ? 3
                                                      : 2;

// The last pass of a step over a part of a chunk: all of an elementwise rule, or the second phase of a rule
// with norms.
template <class Body>
__device__ __forceinline__ void update_part(const Launch& launch, const Chunk& chunk, int part,
                                            typename Body::Tables& tables) {
  using Rule = typename Body::Rule;
  const typename Body::At at(chunk, part);
  Body body(launch, chunk);
  if (left_out(launch.found_inf)) {
    if (body.clears) body.clear_grad(at);
    return;
  }
  typename Body::Read read;
  typename Body::States states;
  body.template load_weight<kOnce>(at, read);
  body.load_grad(at, read);
  if constexpr (kHasNorms<Rule>) {
    if (!launch.stores) body.load_states(at, states, read);
    body.template load_value<kOnce>(at, read);
    body.take_scalars(launch, chunk);
    const float factor = Rule::factor(body.scalars, launch.ratios[chunk.tensor]);
    if (launch.stores) {  // the gradients are updates
      constexpr int kTogether = 4;
      using V = Pack<float, kTogether>;
#pragma unroll
      for (int first = 0; first < kCodedWidth; first += kTogether) {
        V p = body.template weight_of<kTogether>(read, first);
        Rule::apply(body.scalars, factor, p, V(read.grad + first));
        body.put_weight(p, read, first);
      }
    } else {
      load_tables(launch, chunk, tables);
      body.decode(tables, states, read);
      body.with_packs(read, [&](int, auto& p, auto g, auto& s) {
        const auto u = Rule::direction(body.scalars, p, g, s);
        Rule::apply(body.scalars, factor, p, u);
      });
      body.store_states(at, tables, states, read);
    }
    body.store_weight(launch, chunk, at, read);
  } else {
    body.load_states(at, states, read);
    load_tables(launch, chunk, tables);
    body.template load_value<kOnce>(at, read);
    body.take_scalars(launch, chunk);
    if (body.scales) body.scale_grad(at, read);
    body.decode(tables, states, read);
    body.with_packs(read, [&](int, auto& p, auto g, auto& s) { update<Rule>(body.scalars, p, g, s); });
    body.store_weight(launch, chunk, at, read);
    body.store_states(at, tables, states, read);
  }
  if (body.clears) body.clear_grad(at);
}
// Not inlined, as what is rarely called, for the registers of what is not.
template <class Body>
__device__ __noinline__ void update_rest(const Launch& launch, const Chunk& chunk, int part,
                                         typename Body::Tables& tables) {
  update_part<Body>(launch, chunk, part, tables);
}

template <class Rule, class Weight, StatesIn kStatesIn>
__global__ void __launch_bounds__(kThreads, kCodedResident<Coded<Rule, Weight, kStatesIn, true>>)
    coded_update_kernel(const __grid_constant__ Launch launch, bool in_words) {
  using Whole = Coded<Rule, Weight, kStatesIn, true>;
  using Rest = Coded<Rule, Weight, kStatesIn, false>;
  __shared__ typename Whole::Tables tables;
  const Chunk chunk = launch.chunks[blockIdx.x / kCodedParts].chunk;
  const int part = static_cast<int>(blockIdx.x % kCodedParts);
  if (is_whole(chunk, part, in_words)) {
    update_part<Whole>(launch, chunk, part, tables);
  } else if (chunk.begin + part * kPartElements < chunk.end) {
    update_rest<Rest>(launch, chunk, part, tables);
  }
}

template <Access kAccess, class Rule, class Weight, StatesIn kStatesIn>
void launch_coded_update(const Launch& launch) {
  launch_blocks(coded_update_kernel<Rule, Weight, kStatesIn>, launch.chunk_count * kCodedParts, launch.queue,
                launch, kAccess == kInWords);
}

// Squares of a warp's elements, for their sums.
constexpr int kNorms = 2;
static_assert(kNorms * kLanes == kWarp);
struct CodedSums {
  SegmentSums<kNorms, kChunkSegments> of;
  float found[kWarps][kNorms][kHalves][kSegmentElements + kLanes];  // padded: norms in banks of their own
};

template <class Body>
__device__ __forceinline__ void accumulate_part(const Launch& launch, const Chunk& chunk, int part,
                                                const typename Body::Tables& tables, CodedSums& sums) {
  using Rule = typename Body::Rule;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, thread = static_cast<int>(threadIdx.x) % kWarp;
  auto& found = sums.found[warp];
  const typename Body::At at(chunk, part);
  Body body(launch, chunk);
  typename Body::Read read;
  typename Body::States states;
  body.template load_weight<kAgain>(at, read);
  body.load_grad(at, read);
  body.load_states(at, states, read);
  body.template load_value<kAgain>(at, read);
  body.take_scalars(launch, chunk);
  if (body.scales) body.scale_grad(at, read);
  body.decode(tables, states, read);
  __syncwarp();
  body.with_packs(read, [&](int first, auto p, auto g, auto& s) {
    const auto u = Rule::direction(body.scalars, p, g, s);
    const auto weight = Rule::decayed(body.scalars, p);
    const int half = first / kInHalf, count = at.count(half);
    u.each([&](int j) {
      found[0][half][thread * kInHalf + j] = j < count ? weight.of[j] : 0;
      found[1][half][thread * kInHalf + j] = j < count ? u.of[j] : 0;
    });
    u.copy_to(read.grad + first);
  });
  __syncwarp();
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int norm = thread / kLanes, lane = thread % kLanes;
    const int segment = (part * kWarps + warp) * kHalves + half;
    sums.of.of[norm][segment][lane] = sum_squares<float>(found[norm][half] + lane, kSegmentElements / kLanes);
  }
  if (launch.stores) {
    body.store_states(at, tables, states, read);
    body.store_grad(at, read);
  }
}
template <class Body>
__device__ __noinline__ void accumulate_rest(const Launch& launch, const Chunk& chunk, int part,
                                             const typename Body::Tables& tables, CodedSums& sums) {
  accumulate_part<Body>(launch, chunk, part, tables, sums);
}

// The first phase of a rule with norms, one block of threads a chunk. Updates go to the gradient if that
// stores them; if not, it leaves nothing but the norms.
template <class Rule, class Weight, StatesIn kStatesIn>
__global__ void __launch_bounds__(kThreads, kCodedResident<Coded<Rule, Weight, kStatesIn, true>>)
    coded_accumulate_kernel(const __grid_constant__ Launch launch, bool in_words) {
  using Whole = Coded<Rule, Weight, kStatesIn, true>;
  using Rest = Coded<Rule, Weight, kStatesIn, false>;
  __shared__ typename Whole::Tables tables;
  __shared__ CodedSums sums;
  if (left_out(launch.found_inf)) return;
  const NumberedChunk numbered = launch.chunks[blockIdx.x];
  const Chunk chunk = numbered.chunk;
  load_tables(launch, chunk, tables);
#pragma unroll 1
  for (int part = 0; chunk.begin + part * kPartElements < chunk.end; ++part) {
    if (is_whole(chunk, part, in_words)) {
      accumulate_part<Whole>(launch, chunk, part, tables, sums);
    } else {
      accumulate_rest<Rest>(launch, chunk, part, tables, sums);
    }
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {
    double total = 0;
    sums.of.add_to(total, segments_of(chunk));
    add_lanes<kNorms>(total, launch.partials + kPartials * numbered.number);
  }
}

template <Access kAccess, class Rule, class Weight, StatesIn kStatesIn>
void launch_coded_accumulate(const Launch& launch) {
  launch_blocks(coded_accumulate_kernel<Rule, Weight, kStatesIn>, launch.chunk_count, launch.queue, launch,
                kAccess == kInWords);
}

template <Access kAccess, class Rule, class Weight, StatesIn kStatesIn>
constexpr CodedPasses coded_passes() {
  CodedPasses passes{nullptr, launch_coded_update<kAccess, Rule, Weight, kStatesIn>};
  if constexpr (kHasNorms<Rule>)
    passes.accumulate = launch_coded_accumulate<kAccess, Rule, Weight, kStatesIn>;
  return passes;
}

}  // namespace fusedstep::cuda
