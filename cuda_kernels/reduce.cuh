// The passes of a two-phase rule: moments and sums of squares, one block of threads a chunk; the ratio, one
// block a tensor; the update, one block a part of a chunk.
#pragma once
#include "cuda_kernels/elementwise.cuh"

namespace fusedstep::cuda {

// The last two of the steps of src/reduction.h that make a chunk's sum, by threads of a warp: lane by lane in
// `total`, of norm thread / kLanes and lane thread % kLanes.
template <int kNorms>
__device__ __forceinline__ void add_lanes(double total, double* partials) {
  const int thread = static_cast<int>(threadIdx.x);
  static_assert(kNorms * kLanes <= 32);
  if (thread >= 32) return;
  for (int width = kLanes / 2; width > 0; width /= 2) {
    total += __shfl_down_sync(0xffffffffu, total, width, kLanes);
  }
  if (thread < kNorms * kLanes && thread % kLanes == 0) partials[thread / kLanes] = total;
}

template <int kNorms, int kSlots>
struct SegmentSums {
  double of[kNorms][kSlots][kLanes];

  // Adds those of the first segments in their order, for the thread's norm and lane.
  __device__ __forceinline__ void add_to(double& total, int slots) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= kNorms * kLanes) return;
#pragma unroll 8
    for (int slot = 0; slot < slots; ++slot) total += of[thread / kLanes][slot][thread % kLanes];
  }
};

// Sums kNorms squares over a chunk, in the order of src/reduction.h, into partials[0 ... kNorms):
// `squares(width, place, add)` calls add(norm, j, x) for the j-th of the elements from `place` on.
//
// Element by element: kLanes threads go over a segment.
template <int kNorms, class Segments, class Squares>
__device__ __forceinline__ void sum_segments(const Segments& segments, double* partials,
                                             const Squares& squares) {
  constexpr int kSlots = kChunkElements / kSegmentElements;
  __shared__ SegmentSums<kNorms, kSlots> sums;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  double total = 0;
  for (int64_t round = 0; round < segments.count(); round += kSlots) {
    for (int slot = thread / kLanes; slot < kSlots; slot += kThreads / kLanes) {
      double sum[kNorms] = {};
      if (round + slot < segments.count()) {
        const auto segment = segments[round + slot];
        for (int64_t i = segment.first + lane; i < segment.last; i += kLanes) {
          squares(Width<1>(), segment.place(i), [&](int norm, int, double x) { sum[norm] += x * x; });
        }
      }
#pragma unroll
      for (int norm = 0; norm < kNorms; ++norm) sums.of[norm][slot][lane] = sum[norm];
    }
    __syncthreads();
    const int64_t left = segments.count() - round;
    sums.add_to(total, left < kSlots ? static_cast<int>(left) : kSlots);
    __syncthreads();
  }
  add_lanes<kNorms>(total, partials);
}

// In words: all threads go over the chunk side by side, and hand what they have found to those that sum it.
template <int kNorms, class T, class Squares>
__device__ __forceinline__ void sum_words(const Chunk& chunk, double* partials, const Squares& squares) {
  constexpr int kWidth = kWordBytes / sizeof(T), kTile = kThreads * kWidth, kSlots = kTile / kSegmentElements;
  using At = Place<Squares::kOperands>;
  __shared__ SegmentSums<kNorms, kSlots> sums;
  __shared__ T found[kNorms][kTile + kSlots * kLanes];  // padded: segments in banks of their own
  const auto position = [](int element) { return element + element / kSegmentElements * kLanes; };
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t count = chunk.end - chunk.begin;
  double total = 0;
  for (int64_t first = 0; first < count; first += kTile) {
    const int64_t i = first + thread * kWidth;
    T x[kNorms][kWidth] = {};
    if (i + kWidth <= count) {
      squares(Width<kWidth>(), At::flat(chunk.begin + i),
              [&](int norm, int j, T value) { x[norm][j] = value; });
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (i + j >= count) continue;
        squares(Width<1>(), At::flat(chunk.begin + i + j),
                [&](int norm, int, T value) { x[norm][j] = value; });
      }
    }
#pragma unroll
    for (int norm = 0; norm < kNorms; ++norm) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) found[norm][position(thread * kWidth) + j] = x[norm][j];
    }
    __syncthreads();
    for (int k = thread; k < kNorms * kSlots * kLanes; k += kThreads) {
      const int lane = k % kLanes, slot = k / kLanes % kSlots, norm = k / kLanes / kSlots;
      const T* const of_lane = found[norm] + position(slot * kSegmentElements) + lane;
      double sum = 0;
#pragma unroll
      for (int e = 0; e < kSegmentElements; e += kLanes) {
        const double value = of_lane[e];
        sum += value * value;
      }
      sums.of[norm][slot][lane] = sum;
    }
    __syncthreads();
    sums.add_to(total, kSlots);  // while the other threads are at the next tile
  }
  add_lanes<kNorms>(total, partials);
}

template <int kNorms>
struct Sums {
  double of[kNorms];
};

// The sums over i in [0, count) of partials[i][norm], in groups: in thread 0.
template <int kNorms>
__device__ __forceinline__ Sums<kNorms> sum_partials(const double* partials, int64_t count) {
  __shared__ double group_sums[kThreads][kNorms];
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t groups = (count + kPartialsGroup - 1) / kPartialsGroup;
  Sums<kNorms> total{};
  for (int64_t round = 0; round < groups; round += kThreads) {
    const int64_t first = (round + thread) * kPartialsGroup;
    double found[kPartialsGroup][kNorms];
#pragma unroll
    for (int i = 0; i < kPartialsGroup; ++i) {
#pragma unroll
      for (int norm = 0; norm < kNorms; ++norm) {
        found[i][norm] = first + i < count ? partials[kPartials * (first + i) + norm] : 0;
      }
    }
    Sums<kNorms> group{};
#pragma unroll
    for (int i = 0; i < kPartialsGroup; ++i) {
#pragma unroll
      for (int norm = 0; norm < kNorms; ++norm) group.of[norm] += found[i][norm];
    }
#pragma unroll
    for (int norm = 0; norm < kNorms; ++norm) group_sums[thread][norm] = group.of[norm];
    __syncthreads();
    if (thread == 0) {
      const int64_t left = groups - round;
      const int here = left < kThreads ? static_cast<int>(left) : kThreads;
#pragma unroll 16
      for (int i = 0; i < here; ++i) {
#pragma unroll
        for (int norm = 0; norm < kNorms; ++norm) total.of[norm] += group_sums[i][norm];
      }
    }
    __syncthreads();
  }
  return total;
}

template <class Operands>
struct Accumulate : Operands {
  using At = typename Operands::At;
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
      add_square(0, j, p);
      add_square(1, j, u);
    }
  };

  // Without storing the update, the first phase leaves nothing but the norms: the second does its maths
  // again.
  template <int N, class Add>
  __device__ __forceinline__ void operator()(Width<N>, const At& at, const Add& add) const {
    auto read = this->template load_all<kAgain, N>(at);
    if (this->scales) this->scale_grad(at, read.grad);
    T update[N];
    this->for_each(read, [&](T p, T g, auto& s, int j) {
      const Norms<Add> norms{add, j};
      update[j] = Operands::Rule::accumulate(this->scalars, p, g, s, norms);
    });
    if (stores) {
      this->template store_states<kAgain>(at, read);
      store<kAgain>(this->grad + at.offset[kGrad], update);
    }
  }
};

// Sums over a chunk of a launch, kNorms of type T.
template <Access kAccess, int kNorms, class T, class Squares>
__device__ __forceinline__ void sum_chunk(const Launch& launch, const NumberedChunk& numbered,
                                          const Squares& squares) {
  double* const partials = launch.partials + kPartials * numbered.number;
  if constexpr (kAccess == kInWords) {
    sum_words<kNorms, T>(numbered.chunk, partials, squares);
  } else {
    const BlockLayout& layout = launch.tensors[numbered.chunk.tensor].layout;
    sum_segments<kNorms>(Segments<Squares::kOperands>(layout, numbered.chunk), partials, squares);
  }
}

template <Access kAccess, class Rule, class Weight, class State>
__global__ void __launch_bounds__(kThreads,
                                  kAccess == kInWords ? (sizeof(ComputeOf<Weight>) == 4 ? 5 : 3) : 2)
    accumulate_kernel(const __grid_constant__ Launch launch) {
  if (left_out(launch.found_inf)) return;
  using Body = Accumulate<Operands<Rule, Weight, State>>;
  const NumberedChunk numbered = launch.chunks[blockIdx.x];
  const Body body(launch, numbered.chunk);
  sum_chunk<kAccess, 2, typename Body::T>(launch, numbered, body);
}

template <class Operands, bool kStored>
struct Apply : Operands {
  using At = typename Operands::At;
  using T = typename Operands::T;
  static constexpr int kReads = kStored ? kFirstState : Operands::kOperands;
  template <int N>
  using Read = typename Operands::template Read<N>;

  T ratio;

  __device__ Apply(const Launch& launch, const Chunk& chunk)
      : Operands(launch, chunk), ratio(static_cast<T>(launch.ratios[chunk.tensor])) {}

  template <int N>
  __device__ __forceinline__ Read<N> load(Width<N>, const At& at) const {
    if constexpr (!kStored) {
      return this->template load_all<kOnce, N>(at);
    } else {
      Read<N> read;
      cuda::load<kAgain>(this->weight + at.offset[kWeight], read.weight);
      cuda::load<kAgain>(this->grad + at.offset[kGrad], read.grad);
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
      this->template store_states<kOnce>(at, read);
    }
    this->template store_weight<kStored ? kAgain : kOnce>(at, read);
    if (this->clears) this->template clear_grad<N>(at);
  }

 private:
  struct NoNorms {
    __device__ __forceinline__ void add(T, T) const {}
  };
};

template <template <unsigned> class Rule>
__global__ void __launch_bounds__(kThreads) ratio_kernel(const __grid_constant__ RatioLaunch launch) {
  const TensorTask& task = launch.tensors[blockIdx.x];
  const double* partials = launch.partials + kPartials * task.first_chunk;
  const int64_t chunks = task.last_chunk - task.first_chunk;
  const Sums<2> norms2 = sum_partials<2>(partials, chunks);
  if (threadIdx.x != 0) return;
  typename Rule<0>::Hyper hyper;
  memcpy(&hyper, &launch.hyper, sizeof hyper);
  launch.ratios[blockIdx.x] = Rule<0>::trust_ratio(hyper, norms2.of[0], norms2.of[1]);
}

template <Access kAccess, class Rule, class Weight, class State>
void launch_accumulate(const Launch& launch) {
  launch_blocks(accumulate_kernel<kAccess, Rule, Weight, State>, launch.chunk_count, launch.stream, launch);
}

template <Access kAccess, bool kStored, class Rule, class Weight, class State>
void launch_apply(const Launch& launch) {
  launch_last_pass<kAccess, Apply<Operands<Rule, Weight, State>, kStored>>(launch);
}

template <template <unsigned> class Rule>
void launch_ratio(const RatioLaunch& launch) {
  launch_blocks(ratio_kernel<Rule>, launch.tensor_count, launch.stream, launch);
}

}  // namespace fusedstep::cuda
