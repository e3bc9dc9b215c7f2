// The passes of a two-phase rule: moments and sums of squares, one block of threads a chunk; the ratio, one
// block a tensor; the update, one block a part of a chunk.
#pragma once
#include "cuda_kernels/elementwise.cuh"

namespace fusedstep::cuda {

// The last two of the steps of src/core/reduction.h that make a chunk's sum, by one warp: lane by lane in
// `total`, of norm thread / kLanes and lane thread % kLanes.
template <int kNorms>
__device__ __forceinline__ void add_lanes(double total, double* partials) {
  const int thread = static_cast<int>(threadIdx.x) % kWarp;
  static_assert(kNorms * kLanes <= kWarp);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    total += __shfl_down_sync(0xffffffffu, total, width, kLanes);
  }
  if (thread < kNorms * kLanes && thread % kLanes == 0) partials[thread / kLanes] = total;
}

template <int kNorms, int kSlots>
struct SegmentSums {
  double of[kNorms][kSlots][kLanes];

  // Adds those of the first segments in their order, for the norm and lane of a warp's thread.
  __device__ __forceinline__ void add_to(double& total, int slots) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarp;
    if (thread >= kNorms * kLanes) return;
#pragma unroll 8
    for (int slot = 0; slot < slots; ++slot) total += of[thread / kLanes][slot][thread % kLanes];
  }
};

// Sums kNorms squares over a chunk, in the order of src/core/reduction.h, into partials[0 ... kNorms):
// `body.load(width, place)` reads the elements from `place` on, `body.finish(width, place, read, add)` calls
// add(norm, j, x) for the j-th of them.
//
// In words: a warp goes over whole segments by itself. What its threads have found changes hands in a part of
// shared memory that is the warp's own, so that no warp waits for another.
template <int kNorms, class T>
struct Found {
  // Padded: norms in banks of their own.
  T of[kThreads / kWarp][kNorms][kSegmentElements + kLanes];
};

constexpr int kChunkSegments = kChunkElements / kSegmentElements;
__device__ __forceinline__ int segments_of(const Chunk& chunk) {
  return static_cast<int>((chunk.end - chunk.begin + kSegmentElements - 1) / kSegmentElements);
}

// The sums of a chunk's segments, each lane's in Sum; the caller waits for all warps before it adds them up.
template <class Sum, int kNorms, class T, class Body>
__device__ __forceinline__ void sum_words(const Chunk& chunk, Found<kNorms, T>& found,
                                          SegmentSums<kNorms, kChunkSegments>& sums, const Body& body) {
  constexpr int kWidth = kWordBytes / sizeof(T), kWarps = kThreads / kWarp;
  using At = Offsets<Body::kOperands>;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, thread = static_cast<int>(threadIdx.x) % kWarp;
  const int count = static_cast<int>(chunk.end - chunk.begin);
  for (int segment = warp; segment * kSegmentElements < count; segment += kWarps) {
    __syncwarp();
#pragma unroll
    for (int element = thread * kWidth; element < kSegmentElements; element += kWarp * kWidth) {
      const int i = segment * kSegmentElements + element;
      T x[kNorms][kWidth] = {};
      if (i + kWidth <= count) {
        const auto at = At::flat(chunk.begin + i);
        body.finish(Width<kWidth>(), at, body.load(Width<kWidth>(), at),
                    [&](int norm, int j, T value) { x[norm][j] = value; });
      } else {
#pragma unroll 1
        for (int j = 0; i + j < count; ++j) {
          const auto at = At::flat(chunk.begin + i + j);
          body.finish(Width<1>(), at, body.load(Width<1>(), at),
                      [&](int norm, int, T value) { found.of[warp][norm][element + j] = value; });
        }
      }
#pragma unroll
      for (int norm = 0; norm < kNorms; ++norm) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if (i + kWidth <= count || i + j >= count) found.of[warp][norm][element + j] = x[norm][j];
        }
      }
    }
    __syncwarp();
    if (thread < kNorms * kLanes) {
      const T* const of_lane = found.of[warp][thread / kLanes] + thread % kLanes;
      sums.of[thread / kLanes][segment][thread % kLanes] =
          sum_squares<Sum>(of_lane, kSegmentElements / kLanes);
    }
  }
}

// In tiles: `body.work(place, read, add)` for each element, after it has been read.
template <class Sum, int kNorms, class Body>
__device__ __forceinline__ void sum_tiles(const Launch& launch, const Chunk& chunk, double* partials,
                                          const Body& body_of_tensor) {
  // Long rows have segments of their own: those of a square one each, a tile's few whole ones less.
  constexpr int kSlots = kSquareSide;
  static_assert(kSquareSide <= kSegmentElements && kTileElements / kSegmentElements <= kSquareSide);
  using T = typename Body::T;
  __shared__ typename Tiles<Body>::Memory memory;
  __shared__ SegmentSums<kNorms, kSlots> sums;
  __shared__ T found[kNorms][kTileElements + kLanes];  // padded: norms in banks of their own
  Tiles<Body> tiles(launch, chunk, memory);
  double total = 0;
  for (int tile = 0; tiles.has(tile); ++tile) {
    tiles.enter(tile);
    Body body = body_of_tensor;
    body.start_at(tiles.data());
    const auto go_over_batch = [&](const auto& batch) {
      typename Body::template Read<1> read[kTileBatch];
      read_tile(body, tiles, batch, read);
      batch.each([&](int b, int element) {
        body.work(batch.place(b, element), read[b], [&](int norm, int, T x) { found[norm][element] = x; });
      });
      write_tile(body, tiles, batch, read);
    };
    if (tiles.is_regular()) {
      go_over_batch(RegularBatch(tiles));
    } else {
      go_over_batch(AnyBatch(tiles));
    }
    const int span = launch.tensors[chunk.tensor].layout.long_rows ? tiles.columns() : tiles.elements();
    const int per_span = (span + kSegmentElements - 1) / static_cast<int>(kSegmentElements);
    const int slots = tiles.elements() / span * per_span;
    for (int k = static_cast<int>(threadIdx.x); k < kNorms * slots * kLanes; k += kThreads) {
      const int lane = k % kLanes, norm = k / kLanes % kNorms, slot = k / kLanes / kNorms;
      const int of_span = slot / per_span * span, first = slot % per_span * kSegmentElements + lane;
      const int left = span - slot % per_span * static_cast<int>(kSegmentElements);
      const int count = left < kSegmentElements ? left : static_cast<int>(kSegmentElements);
      sums.of[norm][slot][lane] = sum_squares<Sum>(found[norm] + of_span + first, lane_elements(count, lane));
    }
    __syncthreads();
    if (threadIdx.x < kWarp) sums.add_to(total, slots);
  }
  if (threadIdx.x < kWarp) add_lanes<kNorms>(total, partials);
}

// Teams of threads that share a sum: a warp, or a block.
struct WarpTeam {
  static constexpr int kSize = kWarp;
  static __device__ void wait() { __syncwarp(); }
  static __device__ int thread() { return static_cast<int>(threadIdx.x) % kWarp; }
};
struct BlockTeam {
  static constexpr int kSize = kThreads;
  static __device__ void wait() { __syncthreads(); }
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }
};

template <int kNorms>
struct Sums {
  double of[kNorms];
};

// The sums over i in [0, count) of partials[i][norm], in groups: in thread 0 of the team.
template <int kNorms, class Team>
__device__ __forceinline__ Sums<kNorms> sum_partials(const double* partials, int64_t count) {
  __shared__ double group_sums[Team::kSize][kNorms];
  const int thread = Team::thread();
  const int64_t groups = (count + kPartialsGroup - 1) / kPartialsGroup;
  Sums<kNorms> total{};
  for (int64_t round = 0; round < groups; round += Team::kSize) {
    const int64_t first = (round + thread) * kPartialsGroup;
    double found[kPartialsGroup][kNorms];
#pragma unroll
    for (int i = 0; i < kPartialsGroup; ++i) {
#pragma unroll
      for (int norm = 0; norm < kNorms; ++norm) {
        found[i][norm] = first + i < count ? __ldcg(partials + kPartials * (first + i) + norm) : 0;
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
    Team::wait();
    if (thread == 0) {
      const int64_t left = groups - round;
      const int here = left < Team::kSize ? static_cast<int>(left) : Team::kSize;
#pragma unroll 16
      for (int i = 0; i < here; ++i) {
#pragma unroll
        for (int norm = 0; norm < kNorms; ++norm) total.of[norm] += group_sums[i][norm];
      }
    }
    Team::wait();
  }
  return total;
}

// The first phase. `held` is where the chunk's updates stay in shared memory; null: they go to the gradient
// if that stores them, or the second phase does the maths again, and the first leaves nothing but the norms.
template <class Operands>
struct Accumulate : Operands {
  using At = typename Operands::At;
  using T = typename Operands::T;
  template <int N>
  using Read = typename Operands::template Read<N>;

  const bool stores;
  T* const held;
  const int64_t begin;

  __device__ Accumulate(const Launch& launch, const Chunk& chunk, T* held_ = nullptr)
      : Operands(launch, chunk), stores(launch.stores), held(held_), begin(chunk.begin) {}

  template <int N>
  __device__ __forceinline__ Read<N> load(Width<N>, const At& at) const {
    return this->template load_all<kOnce, N, kAgain>(at);
  }
  template <int N, class Add>
  __device__ __forceinline__ void finish(Width<N>, const At& at, Read<N> read, const Add& add) const {
    if (this->scales) this->scale_grad(at, read.grad);
    find_update(read, add);
    if (held != nullptr) {
      this->template store_states<kOnce>(at, read);
      store<kAgain>(held + (at.offset[kGrad] - begin), read.grad);
    } else if (stores) {
      this->template store_states<kOnce>(at, read);
      store<kAgain>(this->grad + at.offset[kGrad], read.grad);
    }
  }

  template <class Place>
  __device__ __forceinline__ void load_rest(const Place& at, Read<1>& read) const {
    cuda::load<kAgain>(this->weight + at.offset[kWeight], read.weight);
    this->template load_states<kOnce>(at, read);
  }
  template <class Place>
  __device__ __forceinline__ void load_grad(const Place& at, Read<1>& read) const {
    cuda::load<kOnce>(this->grad + at.offset[kGrad], read.grad);
  }
  template <class Place, class Add>
  __device__ __forceinline__ void work(const Place& at, Read<1>& read, const Add& add) const {
    find_update(read, add);
    if (stores) this->template store_states<kOnce>(at, read);
  }
  template <class Place>
  __device__ __forceinline__ void store_grad(const Place& at, const Read<1>& read) const {
    store<kAgain>(this->grad + at.offset[kGrad], read.grad);
  }

 private:
  // In the place of the gradient.
  template <int N, class Add>
  __device__ __forceinline__ void find_update(Elements<Operands::kStates, T, N>& read, const Add& add) const {
    using Rule = typename Operands::Rule;
    this->with_packs(read, [&](int first, auto p, auto g, auto& s) {
      const auto u = Rule::direction(this->scalars, p, g, s);
      const auto weight = Rule::decayed(this->scalars, p);
      u.each([&](int j) {
        add(0, first + j, weight.of[j]);
        add(1, first + j, u.of[j]);
      });
      u.copy_to(read.grad + first);
    });
  }
};

// Sums over a chunk of a launch, kNorms of elements of type T.
template <Access kAccess, class Sum, int kNorms, class T, class Body>
__device__ __forceinline__ void sum_chunk(const Launch& launch, const NumberedChunk& numbered,
                                          const Body& body) {
  double* const partials = launch.partials + kPartials * numbered.number;
  const Chunk& chunk = numbered.chunk;
  if constexpr (kAccess == kInWords) {
    __shared__ Found<kNorms, T> found;
    __shared__ SegmentSums<kNorms, kChunkSegments> sums;
    sum_words<Sum>(chunk, found, sums, body);
    __syncthreads();
    if (threadIdx.x < kWarp) {
      double total = 0;
      sums.add_to(total, segments_of(chunk));
      add_lanes<kNorms>(total, partials);
    }
  } else {
    sum_tiles<Sum, kNorms>(launch, chunk, partials, body);
  }
}

template <class Rule, class Weight, class State>
__global__ void __launch_bounds__(kThreads, kTileResident<Operands<Rule, Weight, State>>)
    accumulate_kernel(const __grid_constant__ Launch launch) {
  if (left_out(launch.found_inf)) return;
  using Body = Accumulate<Operands<Rule, Weight, State>>;
  const NumberedChunk numbered = launch.chunks[blockIdx.x];
  const Body body(launch, numbered.chunk);
  using T = typename Body::T;
  sum_chunk<kByElement, T, 2, T>(launch, numbered, body);
}

// Updates of the first phase, as the second finds them.
enum class Updates { kHeld, kStored, kRecomputed };

template <class Operands, Updates kUpdates>
struct Apply : Operands {
  using At = typename Operands::At;
  using T = typename Operands::T;
  static constexpr int kReads = kUpdates == Updates::kHeld     ? 1 + Operands::kHasMaster
                                : kUpdates == Updates::kStored ? kFirstState + Operands::kHasMaster
                                                               : Operands::kOperands;
  static constexpr bool scales = false;  // the gradient has been
  template <int N>
  using Read = typename Operands::template Read<N>;

  T factor;
  const T* held;  // those of the elements from `begin` on
  int64_t begin;

  __device__ Apply(const Launch& launch, const Chunk& chunk, double ratio, const T* held_ = nullptr)
      : Operands(launch, chunk),
        factor(Operands::Rule::factor(this->scalars, ratio)),
        held(held_),
        begin(chunk.begin) {}
  __device__ Apply(const Launch& launch, const Chunk& chunk)
      : Apply(launch, chunk, launch.ratios[chunk.tensor]) {}

  template <int N>
  __device__ __forceinline__ Read<N> load(Width<N>, const At& at) const {
    if constexpr (kUpdates == Updates::kRecomputed) {
      return this->template load_all<kOnce, N>(at);
    } else {
      Read<N> read;
      this->template load_weight<kOnce>(at, read);
      if constexpr (kUpdates == Updates::kStored) {
        cuda::load<kOnce>(this->grad + at.offset[kGrad], read.grad);
      } else {
        cuda::load<kAgain>(held + (at.offset[kGrad] - begin), read.grad);
      }
      return read;
    }
  }
  template <int N>
  __device__ __forceinline__ void finish(Width<N>, const At& at, Read<N> read) const {
    work(at, read);
    if (this->clears) this->template clear_grad<N>(at);
  }

  template <class Place>
  __device__ __forceinline__ void load_rest(const Place& at, Read<1>& read) const {
    if constexpr (kUpdates == Updates::kRecomputed) {
      cuda::load<kOnce>(this->weight + at.offset[kWeight], read.weight);
      this->template load_states<kOnce>(at, read);
    } else {
      this->template load_weight<kOnce>(at, read);
    }
  }
  template <class Place>
  __device__ __forceinline__ void load_grad(const Place& at, Read<1>& read) const {
    cuda::load<kOnce>(this->grad + at.offset[kGrad], read.grad);
  }
  template <class Place, int N>
  __device__ __forceinline__ void work(const Place& at, Elements<Operands::kStates, T, N>& read) const {
    if constexpr (kUpdates == Updates::kRecomputed) {
      this->with_packs(read, [&](int, auto& p, auto g, auto& s) {
        const auto u = Operands::Rule::direction(this->scalars, p, g, s);
        Operands::Rule::apply(this->scalars, factor, p, u);
      });
      this->template store_states<kOnce>(at, read);
    } else {
      Pack<T, N> p = this->template weight_of<N>(read, 0);
      Operands::Rule::apply(this->scalars, factor, p, Pack<T, N>(read.grad));
      this->put_weight(p, read, 0);
    }
    this->template store_weight<kOnce>(at, read);
  }
};

template <template <unsigned> class Rule>
__global__ void __launch_bounds__(kThreads) ratio_kernel(const __grid_constant__ RatioLaunch launch) {
  const TensorTask& task = launch.tensors[blockIdx.x];
  const double* partials = launch.partials + kPartials * task.first_chunk;
  const int64_t chunks = task.last_chunk - task.first_chunk;
  Sums<2> norms2 = sum_partials<2, BlockTeam>(partials, chunks);
  if (threadIdx.x != 0) return;
  for (int norm = 0; norm < 2; ++norm) {
    const int64_t at = 2 * static_cast<int64_t>(blockIdx.x) + norm;
    if (launch.asked != nullptr) launch.asked[at] = norms2.of[norm];
    if (launch.given != nullptr) norms2.of[norm] = launch.given[at];
  }
  if (launch.asked != nullptr) return;
  typename Rule<0>::Hyper hyper;
  memcpy(&hyper, &launch.hyper, sizeof hyper);
  launch.ratios[blockIdx.x] = Rule<0>::trust_ratio(hyper, norms2.of[0], norms2.of[1]);
}

template <class Rule, class Weight, class State>
void launch_accumulate(const Launch& launch) {
  launch_blocks(accumulate_kernel<Rule, Weight, State>, launch.chunk_count, launch.queue, launch);
}

template <Updates kUpdates, class Rule, class Weight, class State>
void launch_apply(const Launch& launch) {
  launch_last_pass<kByElement, Apply<Operands<Rule, Weight, State>, kUpdates>>(launch);
}

template <template <unsigned> class Rule>
void launch_ratio(const RatioLaunch& launch) {
  launch_blocks(ratio_kernel<Rule>, launch.tensor_count, Queue{launch.stream}, launch);
}

}  // namespace fusedstep::cuda
