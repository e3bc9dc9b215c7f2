// The passes of a two-phase rule: moments and sums of squares, one block of threads a chunk; the ratio, one
// block a tensor; the update, one block a part of a chunk.
#pragma once
#include "cuda_kernels/elementwise.cuh"

namespace fusedstep::cuda {

// Segments whose sums a block of threads holds at a time: those of a whole chunk of one flat range.
constexpr int kSegments = kChunkElements / kSegmentElements;

template <int kNorms>
struct SegmentSums {
  double of[kNorms][kSegments][kLanes];
};

// Sums kNorms squares over a chunk, in the order of src/reduction.h, into partials[0 ... kNorms). N elements
// at a time: `squares(width, place, i, add)` calls add(norm, j, x) for element i + j of a span.
template <int N, int kNorms, class Segments, class Squares>
__device__ __forceinline__ void sum_squares(const Segments& segments, SegmentSums<kNorms>& sums,
                                            double* partials, Squares squares) {
  constexpr int kThreadsOfSegment = kLanes / N;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kThreadsOfSegment * N;
  double total = 0;  // of norm thread / kLanes and lane thread % kLanes
  for (int64_t round = 0; round < segments.count(); round += kSegments) {
    for (int slot = thread / kThreadsOfSegment; slot < kSegments; slot += kThreads / kThreadsOfSegment) {
      double sum[kNorms][N] = {};
      if (round + slot < segments.count()) {
        const auto segment = segments[round + slot];
        for (int64_t i = segment.first + lane; i < segment.last; i += kLanes) {
          const auto add = [&](int norm, int j, double x) { sum[norm][j] += x * x; };
          if (i + N <= segment.last) {
            squares(Width<N>(), segment.place(i), add);
          } else {
#pragma unroll
            for (int j = 0; j < N; ++j) {
              const auto add_one = [&](int norm, int, double x) { sum[norm][j] += x * x; };
              if (i + j < segment.last) squares(Width<1>(), segment.place(i + j), add_one);
            }
          }
        }
      }
#pragma unroll
      for (int norm = 0; norm < kNorms; ++norm) {
#pragma unroll
        for (int j = 0; j < N; ++j) sums.of[norm][slot][lane + j] = sum[norm][j];
      }
    }
    __syncthreads();
    if (thread < kNorms * kLanes) {
      const int64_t left = segments.count() - round;
      const int slots = left < kSegments ? static_cast<int>(left) : kSegments;
      for (int slot = 0; slot < slots; ++slot) total += sums.of[thread / kLanes][slot][thread % kLanes];
    }
    __syncthreads();
  }
  if (thread < 32) {
    for (int width = kLanes / 2; width > 0; width /= 2) {
      total += __shfl_down_sync(0xffffffffu, total, width, kLanes);
    }
    if (thread < kNorms * kLanes && thread % kLanes == 0) partials[thread / kLanes] = total;
  }
}

// The sum of partials[i * stride] for i in [0, count), in groups: in thread 0.
__device__ __forceinline__ double sum_partials(const double* partials, int64_t count, int stride) {
  __shared__ double group_sums[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t groups = (count + kPartialsGroup - 1) / kPartialsGroup;
  double total = 0;
  for (int64_t round = 0; round < groups; round += kThreads) {
    const int64_t first = (round + thread) * kPartialsGroup, end = first + kPartialsGroup;
    const int64_t last = end < count ? end : count;
    double group = 0;
    for (int64_t i = first; i < last; ++i) group += partials[i * stride];
    group_sums[thread] = group;
    __syncthreads();
    if (thread == 0) {
      for (int64_t i = 0; i < kThreads && round + i < groups; ++i) total += group_sums[i];
    }
    __syncthreads();
  }
  return total;
}

template <class Operands>
struct Accumulate : Operands {
  using T = typename Operands::T;

  const bool stores;

  __device__ Accumulate(const Launch& launch, const Chunk& chunk)
      : Operands(launch, chunk), stores(launch.stores) {}

  // What a rule adds its weight and update to.
  template <class Add>
  struct Norms {
    const Add& add_square;
    int j;
    __device__ __forceinline__ void add(T p, T u) const {
      add_square(0, j, static_cast<double>(p));
      add_square(1, j, static_cast<double>(u));
    }
  };

  // Without storing the update, the first phase leaves nothing but the norms: the second does its maths
  // again.
  template <int N, class Add>
  __device__ __forceinline__ void operator()(Width<N>, const typename Operands::At& at,
                                             const Add& add) const {
    auto read = this->template load_all<N>(at);
    if (this->scales) this->scale_grad(at, read.grad);
    T update[N];
    this->for_each(read, [&](T p, T g, auto& s, int j) {
      const Norms<Add> norms{add, j};
      update[j] = Operands::Rule::accumulate(this->scalars, p, g, s, norms);
    });
    if (stores) {
      this->store_states(at, read);
      store(this->grad + at.offset[kGrad], update);
    }
  }
};

// The elements that a thread takes together of a segment.
template <Access kAccess>
constexpr int kSegmentWidth = kAccess == kInWords ? 4 : 1;

template <Access kAccess, class Rule, class Weight, class State>
__global__ void __launch_bounds__(kThreads, 2) accumulate_kernel(const __grid_constant__ Launch launch) {
  if (left_out(launch.found_inf)) return;
  using Body = Accumulate<Operands<Rule, Weight, State>>;
  __shared__ SegmentSums<2> sums;
  const NumberedChunk numbered = launch.chunks[blockIdx.x];
  const Body body(launch, numbered.chunk);
  const Segments<kAccess, Body::kOperands> segments(launch.tensors[numbered.chunk.tensor].layout,
                                                    numbered.chunk);
  double* partials = launch.partials + 2 * numbered.number;
  sum_squares<kSegmentWidth<kAccess>>(segments, sums, partials, body);
}

template <class Operands, bool kStored>
struct Apply : Operands {
  using Base = Operands;
  using At = typename Operands::At;
  using T = typename Operands::T;
  template <int N>
  using Read = typename Operands::template Read<N>;

  T ratio;

  __device__ Apply(const Launch& launch, const Chunk& chunk)
      : Operands(launch, chunk), ratio(static_cast<T>(launch.ratios[chunk.tensor])) {}

  template <int N>
  __device__ __forceinline__ Read<N> load(Width<N>, const At& at) const {
    if constexpr (!kStored) {
      return this->template load_all<N>(at);
    } else {
      Read<N> read;
      cuda::load(this->weight + at.offset[kWeight], read.weight);
      cuda::load(this->grad + at.offset[kGrad], read.grad);
      return read;
    }
  }
  template <int N>
  __device__ __forceinline__ void finish(Width<N>, const At& at, Read<N> read) const {
    if constexpr (kStored) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        Operands::Rule::apply(this->scalars, ratio, read.weight[j], read.grad[j]);
      }
    } else {
      this->for_each(read, [&](T& p, T g, auto& s, int) {
        const NoNorms norms;
        const T u = Operands::Rule::accumulate(this->scalars, p, g, s, norms);
        Operands::Rule::apply(this->scalars, ratio, p, u);
      });
      this->store_states(at, read);
    }
    this->store_weight(at, read);
    if (this->clears) this->template clear_grad<N>(at);
  }

 private:
  struct NoNorms {
    __device__ __forceinline__ void add(T, T) const {}
  };
};

template <Access kAccess, bool kStored, class Rule, class Weight, class State>
__global__ void __launch_bounds__(kThreads) apply_kernel(const __grid_constant__ Launch launch) {
  run_last_pass<kAccess, Apply<Operands<Rule, Weight, State>, kStored>>(launch);
}

template <template <unsigned> class Rule>
__global__ void __launch_bounds__(kThreads) ratio_kernel(const __grid_constant__ RatioLaunch launch) {
  const TensorTask& task = launch.tensors[blockIdx.x];
  const double* partials = launch.partials + 2 * task.first_chunk;
  const int64_t chunks = task.last_chunk - task.first_chunk;
  const double weight_norm2 = sum_partials(partials, chunks, 2);
  const double update_norm2 = sum_partials(partials + 1, chunks, 2);
  if (threadIdx.x != 0) return;
  typename Rule<0>::Hyper hyper;
  memcpy(&hyper, &launch.hyper, sizeof hyper);
  launch.ratios[blockIdx.x] = Rule<0>::trust_ratio(hyper, weight_norm2, update_norm2);
}

template <Access kAccess, class Rule, class Weight, class State>
void launch_accumulate(const Launch& launch) {
  launch_blocks(accumulate_kernel<kAccess, Rule, Weight, State>, launch.chunk_count, launch.stream, launch);
}

template <Access kAccess, bool kStored, class Rule, class Weight, class State>
void launch_apply(const Launch& launch) {
  launch_blocks(apply_kernel<kAccess, kStored, Rule, Weight, State>, launch.chunk_count * kParts,
                launch.stream, launch);
}

template <template <unsigned> class Rule>
void launch_ratio(const RatioLaunch& launch) {
  launch_blocks(ratio_kernel<Rule>, launch.tensor_count, launch.stream, launch);
}

}  // namespace fusedstep::cuda
