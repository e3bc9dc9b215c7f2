// Kernels of a step that moves some rows or columns of each matrix alone. Before the matrix products: add the
// gradient, sum norms, choose the largest, and take what is chosen. After: move the weights. Each value is
// rounded as torch's separate operations would round it.
#include "cuda_kernels/chosen_channels.h"

#include "cuda_kernels/sides.cuh"

namespace fusedstep::cuda {
namespace {

static_assert(kColumnsTogether == kSide * kWarp && kThreads == kSquaresRows * kWarp);

// Pieces of a row, or rows, that a thread has under way together.
constexpr int kAccesses = 4;

// Adds a gradient to elements that lie side by side.
template <class Stored, bool kInSides>
struct Sum {
  using T = ComputeOf<Stored>;
  Stored stored[kSide], grad[kSide];

  __device__ __forceinline__ void load(const Stored* from, const Stored* grads, int64_t column, int64_t end) {
    load_stored<kInSides>(from, column, end, stored);
    load_stored<kInSides, kOnce>(grads, column, end, grad);
  }
  // Finds the sizes of the sums, 0 behind the end.
  __device__ __forceinline__ void finish(Stored* to, int64_t column, int64_t end, bool maximizes,
                                         double (&sizes)[kSide]) {
    T sums[kSide];
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const T a = Codec<Stored>::decode(stored[j]), b = Codec<Stored>::decode(grad[j]);
      sums[j] = rounded<Stored>(maximizes ? a - b : a + b);
      sizes[j] = rules::absolute(double{sums[j]});
    }
    store_sides<kInSides>(to, column, end, sums);
  }
};

template <class Stored>
__device__ __forceinline__ bool has_sides(const ChosenTensor& tensor) {
  return is_in_sides<Stored>(tensor.stored, tensor.columns, 1) &&
         is_in_sides<Stored>(tensor.grad, tensor.columns, 1);
}

// Writes the norm of a segment of a channel. `channel`: the number of the channel among the channels of all
// matrices of a tensor.
__device__ __forceinline__ void write_norm(const ChosenLaunch& launch, const ChosenTensor& tensor,
                                           int64_t segment, int64_t channel, double norm) {
  if (partials_of(tensor) == 0) {
    launch.memory.norms[tensor.first_channel + channel] = static_cast<float>(norm);
  } else {
    const int64_t channels = tensor.matrices * channels_of(tensor);
    launch.memory.partials[tensor.first_partial + segment * channels + channel] = norm;
  }
}

// A warp has a segment of a row.
template <bool kInSides, class Stored>
__device__ __forceinline__ void sum_rows(const ChosenLaunch& launch, const ChosenTensor& tensor,
                                         uint32_t block, bool maximizes) {
  constexpr int64_t kStep = kWarp * kSide;
  const auto segments = static_cast<uint32_t>(segments_of(tensor));
  const int64_t segment = block % segments;
  const int64_t row = static_cast<int64_t>(block / segments) * kSquaresRows + threadIdx.x / kWarp;
  if (row >= static_cast<int64_t>(tensor.matrices) * tensor.rows) return;
  const int64_t end =
      segment * kRowSegment + kRowSegment < tensor.columns ? (segment + 1) * kRowSegment : tensor.columns;
  auto* const stored = static_cast<Stored*>(tensor.stored) + row * tensor.columns;
  const auto* const grad = static_cast<const Stored*>(tensor.grad) + row * tensor.columns;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  double norm = 0;
  for (int64_t at = segment * kRowSegment + lane * kSide; at < end; at += kAccesses * kStep) {
    Sum<Stored, kInSides> sums[kAccesses];
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      if (at + k * kStep < end) sums[k].load(stored, grad, at + k * kStep, end);
    }
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      if (at + k * kStep >= end) break;
      double sizes[kSide];
      sums[k].finish(stored, at + k * kStep, end, maximizes, sizes);
#pragma unroll
      for (const double size : sizes) norm += size;
    }
  }
#pragma unroll
  for (int width = kWarp / 2; width > 0; width /= 2)
    norm += __shfl_down_sync(0xffffffffu, norm, width, kWarp);
  if (lane == 0) write_norm(launch, tensor, segment, row, norm);
}

// A thread has some columns, in one of kSquaresRows rows.
template <bool kInSides, class Stored>
__device__ __forceinline__ void sum_columns(const ChosenLaunch& launch, const ChosenTensor& tensor,
                                            uint32_t block, bool maximizes) {
  __shared__ double norms[kSquaresRows][kColumnsTogether];
  const auto across = static_cast<uint32_t>(pieces_of(tensor.columns, kColumnsTogether));
  const auto segments = static_cast<uint32_t>(segments_of(tensor));
  const int64_t matrix = block / across / segments, segment = block / across % segments;
  const int64_t first = static_cast<int64_t>(block % across) * kColumnsTogether;
  const int lane = static_cast<int>(threadIdx.x % kWarp), part = static_cast<int>(threadIdx.x / kWarp);
  const int64_t column = first + lane * kSide;
  const int64_t end =
      segment * kColumnSegment + kColumnSegment < tensor.rows ? (segment + 1) * kColumnSegment : tensor.rows;
  const int64_t begins = matrix * tensor.rows * tensor.columns;
  auto* const stored = static_cast<Stored*>(tensor.stored) + begins;
  const auto* const grad = static_cast<const Stored*>(tensor.grad) + begins;
  double own[kSide] = {};
  for (int64_t row = segment * kColumnSegment + part; row < end; row += kAccesses * kSquaresRows) {
    if (column >= tensor.columns) break;
    Sum<Stored, kInSides> sums[kAccesses];
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      const int64_t at = (row + k * kSquaresRows) * tensor.columns;
      if (row + k * kSquaresRows < end) sums[k].load(stored + at, grad + at, column, tensor.columns);
    }
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      if (row + k * kSquaresRows >= end) break;
      const int64_t at = (row + k * kSquaresRows) * tensor.columns;
      double sizes[kSide];
      sums[k].finish(stored + at, column, tensor.columns, maximizes, sizes);
#pragma unroll
      for (int j = 0; j < kSide; ++j) own[j] += sizes[j];
    }
  }
#pragma unroll
  for (int j = 0; j < kSide; ++j) norms[part][lane * kSide + j] = own[j];
  __syncthreads();
  const int64_t mine = first + threadIdx.x;
  if (threadIdx.x >= kColumnsTogether || mine >= tensor.columns) return;
  double norm = 0;
#pragma unroll
  for (const auto& each : norms) norm += each[threadIdx.x];
  write_norm(launch, tensor, segment, matrix * tensor.columns + mine, norm);
}

template <bool kInSides, class Stored>
__device__ __forceinline__ void sum_channels(const ChosenLaunch& launch, const ChosenTensor& tensor,
                                             uint32_t block, bool maximizes) {
  if (has_rows(tensor)) {
    sum_rows<kInSides, Stored>(launch, tensor, block, maximizes);
  } else {
    sum_columns<kInSides, Stored>(launch, tensor, block, maximizes);
  }
}

// Blocks of it that share a multiprocessor at least: more loads are under way then.
template <class Stored>
constexpr int kBlocksOfSum = sizeof(ComputeOf<Stored>) == sizeof(float) ? 3 : 2;

template <class Stored>
__global__ void __launch_bounds__(kThreads, kBlocksOfSum<Stored>)
    sum_kernel(const __grid_constant__ ChosenLaunch launch, const __grid_constant__ bool maximizes) {
  const int index = tensor_of(launch, blockIdx.x);
  const ChosenTensor& tensor = launch.tensors[index];
  const uint32_t block = blockIdx.x - launch.first_block[index];
  if (has_sides<Stored>(tensor)) {
    sum_channels<true, Stored>(launch, tensor, block, maximizes);
  } else {
    sum_channels<false, Stored>(launch, tensor, block, maximizes);
  }
}

__global__ void __launch_bounds__(kThreads) fold_norms_kernel(const __grid_constant__ ChosenLaunch launch) {
  const int index = tensor_of(launch, blockIdx.x);
  const ChosenTensor& tensor = launch.tensors[index];
  const int64_t channels = tensor.matrices * channels_of(tensor), partials = partials_of(tensor);
  const int64_t channel =
      static_cast<int64_t>(blockIdx.x - launch.first_block[index]) * kFoldChannels + threadIdx.x;
  if (channel >= channels) return;
  const double* const from = launch.memory.partials + tensor.first_partial;
  double norm = 0;
#pragma unroll 8
  for (int64_t i = channel; i < partials; i += channels) norm += from[i];
  launch.memory.norms[tensor.first_channel + channel] = static_cast<float>(norm);
}

// Returns the sum over the threads before this one. All threads of the block call it.
__device__ __forceinline__ uint64_t sum_before(uint64_t own) {
  __shared__ uint64_t sums[2][kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  int now = 0;
  sums[now][thread] = own;
  __syncthreads();
  for (int width = 1; width < kThreads; width *= 2, now = 1 - now) {
    sums[1 - now][thread] = sums[now][thread] + (thread >= width ? sums[now][thread - width] : 0);
    __syncthreads();
  }
  const uint64_t before = sums[now][thread] - own;
  __syncthreads();  // for the next call
  return before;
}

// The smallest key of so many largest ones, and how many of the keys that equal it are among these.
struct Least {
  uint32_t key, count;
};

// Looks at the digits of the keys, of 8 bits each, the highest digit first. Each digit leaves only the keys
// that may be the smallest chosen key.
__device__ __forceinline__ Least least_of_largest(const float* norms, int64_t count, uint32_t chosen) {
  constexpr int kBits = 8;
  static_assert(1 << kBits == kThreads);
  __shared__ unsigned counts[kThreads];
  __shared__ Least found;
  Least least{0, chosen};
  for (int shift = 32 - kBits; shift >= 0; shift -= kBits) {
    const uint32_t known = shift + kBits < 32 ? ~0u << (shift + kBits) : 0;
    counts[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
      const uint32_t key = key_of(norms[i]);
      if ((key & known) == least.key) atomicAdd(&counts[key >> shift & (kThreads - 1)], 1u);
    }
    __syncthreads();
    const uint32_t digit = kThreads - 1 - threadIdx.x;
    const uint64_t own = counts[digit], larger = sum_before(own);
    if (larger < least.count && least.count <= larger + own) {
      found = {least.key | digit << shift, least.count - static_cast<uint32_t>(larger)};
    }
    __syncthreads();
    least = found;
  }
  return least;
}

// A block has a matrix. Of equal norms the first are chosen.
__global__ void __launch_bounds__(kThreads) choose_kernel(const __grid_constant__ ChosenLaunch launch) {
  const int index = tensor_of(launch, blockIdx.x);
  const ChosenTensor& tensor = launch.tensors[index];
  const int64_t matrix = blockIdx.x - launch.first_block[index], channels = channels_of(tensor);
  const int64_t first = tensor.first_channel + matrix * channels;
  const float* const norms = launch.memory.norms + first;
  int32_t* const positions = launch.memory.positions + first;
  int32_t* const places = launch.memory.places + tensor.first_chosen + matrix * tensor.chosen;
  const Least least = least_of_largest(norms, channels, static_cast<uint32_t>(tensor.chosen));
  // A thread has channels that follow one another: so are places ascending.
  const int64_t each = pieces_of(channels, kThreads), begin = threadIdx.x * each;
  const int64_t end = begin + each < channels ? begin + each : channels;
  uint32_t larger = 0, equal = 0;
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t key = key_of(norms[i]);
    larger += key > least.key;
    equal += key == least.key;
  }
  const uint64_t before = sum_before(static_cast<uint64_t>(larger) << 32 | equal);
  larger = static_cast<uint32_t>(before >> 32), equal = static_cast<uint32_t>(before);
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t key = key_of(norms[i]);
    const bool is_chosen = key > least.key || (key == least.key && equal < least.count);
    const auto position = static_cast<int32_t>(larger + (equal < least.count ? equal : least.count));
    positions[i] = is_chosen ? position : -1;
    if (is_chosen) places[position] = static_cast<int32_t>(i);
    larger += key > least.key;
    equal += key == least.key;
  }
}

// Rows of a thread's tile.
constexpr int kRows = kMoveRows / kSquaresRows;

// The tile of a block: its matrix, and a thread's first row and column. A matrix has `height` rows.
struct ChosenTile {
  int64_t matrix, row, column;
};
__device__ __forceinline__ ChosenTile chosen_tile(uint32_t block, int64_t height, int64_t width) {
  const auto across = static_cast<uint32_t>(pieces_of(width, kColumnsTogether));
  const auto down = static_cast<uint32_t>(pieces_of(height, kMoveRows));
  return {block / across / down,
          static_cast<int64_t>(block / across % down) * kMoveRows + threadIdx.x / kWarp,
          static_cast<int64_t>(block % across) * kColumnsTogether};
}

template <bool kInSides, class Stored, class Product>
__device__ __forceinline__ void take_rows(const ChosenLaunch& launch, const ChosenTensor& tensor,
                                          uint32_t block, ComputeOf<Stored> momentum) {
  using T = ComputeOf<Stored>;
  const ChosenTile tile = chosen_tile(block, tensor.chosen, tensor.columns);
  const int64_t column = tile.column + threadIdx.x % kWarp * kSide, columns = tensor.columns;
  if (column >= columns) return;
  const int32_t* const places = launch.memory.places + tensor.first_chosen + tile.matrix * tensor.chosen;
  auto* const stored = static_cast<Stored*>(tensor.stored) + tile.matrix * tensor.rows * columns;
  auto* const update = static_cast<Product*>(tensor.product) + tile.matrix * tensor.chosen * columns;
  Stored found[kRows][kSide];
  int64_t from[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t row = tile.row + k * kSquaresRows;
    if (row >= tensor.chosen) break;
    from[k] = places[row] * columns;
    load_stored<kInSides>(stored + from[k], column, columns, found[k]);
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t row = tile.row + k * kSquaresRows;
    if (row >= tensor.chosen) break;
    T x[kSide];
#pragma unroll
    for (int j = 0; j < kSide; ++j) x[j] = Codec<Stored>::decode(found[k][j]);
    store_sides<kInSides>(update + row * columns, column, columns, x);
#pragma unroll
    for (T& each : x) each *= momentum;
    store_sides<kInSides>(stored + from[k], column, columns, x);
  }
}

// Neighbours among the threads have neighbours among the chosen columns.
template <class Stored, class Product>
__device__ __forceinline__ void take_columns(const ChosenLaunch& launch, const ChosenTensor& tensor,
                                             uint32_t block, ComputeOf<Stored> momentum) {
  using T = ComputeOf<Stored>;
  const ChosenTile tile = chosen_tile(block, tensor.rows, tensor.chosen);
  const int64_t position = tile.column + threadIdx.x % kWarp, chosen = tensor.chosen;
  const int32_t* const places = launch.memory.places + tensor.first_chosen + tile.matrix * chosen;
  auto* const stored = static_cast<Stored*>(tensor.stored) + tile.matrix * tensor.rows * tensor.columns;
  auto* const update = static_cast<Product*>(tensor.product) + tile.matrix * tensor.rows * chosen;
  int32_t columns[kSide];
#pragma unroll
  for (int j = 0; j < kSide; ++j) {
    columns[j] = position + j * kWarp < chosen ? places[position + j * kWarp] : -1;
  }
  Stored found[kRows][kSide];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t row = tile.row + k * kSquaresRows;
    if (row >= tensor.rows) break;
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      if (columns[j] >= 0) found[k][j] = stored[row * tensor.columns + columns[j]];
    }
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t row = tile.row + k * kSquaresRows;
    if (row >= tensor.rows) break;
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      if (columns[j] < 0) continue;
      const T x = Codec<Stored>::decode(found[k][j]);
      update[row * chosen + position + j * kWarp] = Codec<Product>::encode(x);
      stored[row * tensor.columns + columns[j]] = Codec<Stored>::encode(x * momentum);
    }
  }
}

template <class Stored, class Product>
__global__ void __launch_bounds__(kThreads) take_kernel(const __grid_constant__ ChosenLaunch launch,
                                                        const __grid_constant__ ComputeOf<Stored> momentum) {
  const int index = tensor_of(launch, blockIdx.x);
  const ChosenTensor& tensor = launch.tensors[index];
  const uint32_t block = blockIdx.x - launch.first_block[index];
  if (!has_rows(tensor)) {
    take_columns<Stored, Product>(launch, tensor, block, momentum);
  } else if (is_in_sides<Stored>(tensor.stored, tensor.columns, 1) &&
             is_in_sides<Product>(tensor.product, tensor.columns, 1)) {
    take_rows<true, Stored, Product>(launch, tensor, block, momentum);
  } else {
    take_rows<false, Stored, Product>(launch, tensor, block, momentum);
  }
}

// Elements that no channel of a direction has get 0 times the factor. The sum with it has the bits of the
// decayed weight, -0 too where the factor is negative; an infinite factor makes NaN of all elements.
template <bool kInSides, class Stored, class Product>
__device__ __forceinline__ void move_tile(const ChosenLaunch& launch, const ChosenTensor& tensor,
                                          uint32_t block, ComputeOf<Stored> keep) {
  using T = ComputeOf<Stored>;
  const ChosenTile tile = chosen_tile(block, tensor.rows, tensor.columns);
  const int64_t column = tile.column + threadIdx.x % kWarp * kSide, columns = tensor.columns;
  if (column >= columns) return;
  const bool by_rows = has_rows(tensor);
  const int32_t* const positions =
      launch.memory.positions + tensor.first_channel + tile.matrix * channels_of(tensor);
  const int64_t height = by_rows ? tensor.chosen : tensor.rows, width = by_rows ? columns : tensor.chosen;
  auto* const weight = static_cast<Stored*>(tensor.stored) + tile.matrix * tensor.rows * columns;
  const auto* const direction = static_cast<const Product*>(tensor.product) + tile.matrix * height * width;
  const T factor = static_cast<T>(tensor.factor);
  const bool stays = keep == T(1) && factor - factor == T(0);  // what is not chosen
  int32_t of_columns[kSide] = {};
  bool is_any = by_rows || !stays;
  if (!by_rows) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      of_columns[j] = column + j < columns ? positions[column + j] : -1;
      is_any = is_any || of_columns[j] >= 0;
    }
  }
  if (!is_any) return;
  Stored found[kRows][kSide];
  Product moves[kRows][kSide];
  bool has[kRows] = {};
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t row = tile.row + k * kSquaresRows;
    if (row >= tensor.rows) break;
    const int32_t position = by_rows ? positions[row] : 0;
    has[k] = position >= 0 || !stays;
    if (!has[k]) continue;
    load_stored<kInSides, kOnce>(weight + row * columns, column, columns, found[k]);
#pragma unroll
    for (Product& each : moves[k]) each = Codec<Product>::encode(ComputeOf<Product>(0));
    if (!by_rows) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        if (of_columns[j] >= 0) moves[k][j] = direction[row * width + of_columns[j]];
      }
    } else if (position >= 0) {
      load_stored<kInSides>(direction + position * width, column, columns, moves[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t row = tile.row + k * kSquaresRows;
    if (row >= tensor.rows) break;
    if (!has[k]) continue;
    T x[kSide];
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const T kept = rounded<Stored>(Codec<Stored>::decode(found[k][j]) * keep);
      x[j] = rules::mul_add(factor, T{Codec<Product>::decode(moves[k][j])}, kept);
    }
    store_sides<kInSides, kOnce>(weight + row * columns, column, columns, x);
  }
}

template <class Stored, class Product>
__global__ void __launch_bounds__(kThreads)
    move_chosen_kernel(const __grid_constant__ ChosenLaunch launch,
                       const __grid_constant__ ComputeOf<Stored> keep) {
  const int index = tensor_of(launch, blockIdx.x);
  const ChosenTensor& tensor = launch.tensors[index];
  const uint32_t block = blockIdx.x - launch.first_block[index];
  const bool in_sides = is_in_sides<Stored>(tensor.stored, tensor.columns, 1);
  if (in_sides && (!has_rows(tensor) || is_in_sides<Product>(tensor.product, tensor.columns, 1))) {
    move_tile<true, Stored, Product>(launch, tensor, block, keep);
  } else {
    move_tile<false, Stored, Product>(launch, tensor, block, keep);
  }
}

template <class Stored>
void sum(const ChosenLaunch& launch, bool maximizes) {
  launch_blocks(sum_kernel<Stored>, launch.first_block[launch.count], launch.queue, launch, maximizes);
}

void fold(const ChosenLaunch& launch) {
  launch_blocks(fold_norms_kernel, launch.first_block[launch.count], launch.queue, launch);
}

void choose(const ChosenLaunch& launch) {
  launch_blocks(choose_kernel, launch.first_block[launch.count], launch.queue, launch);
}

template <class Stored, class Product>
void take(const ChosenLaunch& launch, double momentum) {
  launch_blocks(take_kernel<Stored, Product>, launch.first_block[launch.count], launch.queue, launch,
                static_cast<ComputeOf<Stored>>(momentum));
}

template <class Stored, class Product>
void move(const ChosenLaunch& launch, double keep) {
  launch_blocks(move_chosen_kernel<Stored, Product>, launch.first_block[launch.count], launch.queue, launch,
                static_cast<ComputeOf<Stored>>(keep));
}

}  // namespace

const ChosenPasses& chosen_passes(PassFormat format) {
#define FUSEDSTEP_KERNELS(name, Stored, Product) \
  {sum<Stored>, fold, choose, take<Stored, Product>, move<Stored, Product>},
  static constexpr ChosenPasses table[] = {FUSEDSTEP_PASS_FORMATS(FUSEDSTEP_KERNELS)};
#undef FUSEDSTEP_KERNELS
  return table[static_cast<int>(format)];
}

}  // namespace fusedstep::cuda
