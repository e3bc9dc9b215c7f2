// Kernels before and after the matrix products of a step. Before: update the momentum, write the input of the
// products, and divide matrices by their norms. After: move the weights along the result. Each value is
// rounded as torch's separate operations would round it; a multiplication and its addition are one fused
// operation.
#include "cuda_kernels/matrix_passes.h"

#include "cuda_kernels/codecs.cuh"
#include "cuda_kernels/launch.cuh"
#include "cuda_kernels/sides.cuh"

namespace fusedstep::cuda {
namespace {

// Elements of one access, and accesses of a thread that are under way together.
constexpr int kWidth = 4, kAccesses = kPassElements / (kWidth * kThreads);

template <class T>
__device__ __forceinline__ T interpolated(T from, T to, T share) {
  const T way = to - from;
  return rules::absolute(share) < T(0.5) ? rules::mul_add(share, way, from)
                                         : rules::mul_add(-way, T(1) - share, to);
}

template <class Stored_, class Product_>
struct Average {
  using Stored = Stored_;
  using Product = Product_;
  using T = ComputeOf<Stored>;
  static constexpr bool kReadsGrad = true;
  T share, lead;
  bool leads;

  __device__ __forceinline__ void operator()(T& average, T grad, T& update, T /*factor*/) const {
    average = rounded<Stored>(interpolated(average, grad, share));
    update = leads ? rounded<Stored>(interpolated(grad, average, lead)) : average;
  }
};

template <class Stored_, class Product_>
struct Move {
  using Stored = Stored_;
  using Product = Product_;
  using T = ComputeOf<Stored>;
  static constexpr bool kReadsGrad = false;
  T keep;

  __device__ __forceinline__ void operator()(T& weight, T /*grad*/, T& direction, T factor) const {
    weight = rules::mul_add(factor, direction, rounded<Stored>(weight * keep));
  }
};

// Elements that lie side by side in every operand.
template <int N, class Body>
struct Side {
  using T = typename Body::T;
  T stored[N], grad[N] = {}, product[N] = {};

  __device__ __forceinline__ void load(const PassTensor& tensor, int64_t at) {
    using Stored = typename Body::Stored;
    cuda::load<kOnce>(static_cast<const Stored*>(tensor.stored) + at, stored);
    if constexpr (Body::kReadsGrad) {
      cuda::load<kOnce>(static_cast<const Stored*>(tensor.grad) + at, grad);
    } else {
      cuda::load<kOnce>(static_cast<const typename Body::Product*>(tensor.product) + at, product);
    }
  }
  __device__ __forceinline__ void finish(const Body& body, const PassTensor& tensor, T factor, int64_t at) {
#pragma unroll
    for (int j = 0; j < N; ++j) body(stored[j], grad[j], product[j], factor);
    cuda::store<kOnce>(static_cast<typename Body::Stored*>(tensor.stored) + at, stored);
    if constexpr (Body::kReadsGrad) {
      cuda::store(static_cast<typename Body::Product*>(tensor.product) + at, product);
    }
  }
};

template <class Body>
__device__ __forceinline__ bool is_in_words(const PassTensor& tensor) {
  const auto fits = [](const void* data, int size) {
    const int bytes = kWidth * size < kWordBytes ? kWidth * size : kWordBytes;
    return reinterpret_cast<uintptr_t>(data) % bytes == 0;
  };
  return fits(tensor.stored, sizeof(typename Body::Stored)) &&
         fits(tensor.grad, sizeof(typename Body::Stored)) &&
         fits(tensor.product, sizeof(typename Body::Product));
}

template <class Body>
__global__ void __launch_bounds__(kThreads)
    pass_kernel(const __grid_constant__ PassLaunch launch, const __grid_constant__ Body body) {
  const int index = tensor_of(launch, blockIdx.x);
  const PassTensor& tensor = launch.tensors[index];
  const int64_t begin = static_cast<int64_t>(blockIdx.x - launch.first_block[index]) * kPassElements;
  const int64_t left = tensor.count - begin, count = left < kPassElements ? left : kPassElements;
  const auto factor = static_cast<typename Body::T>(tensor.factor);
  int64_t whole = 0;
  if (is_in_words<Body>(tensor)) {
    whole = count - count % kWidth;
    Side<kWidth, Body> side[kAccesses];
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      const int64_t at = (k * kThreads + static_cast<int64_t>(threadIdx.x)) * kWidth;
      if (at < whole) side[k].load(tensor, begin + at);
    }
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      const int64_t at = (k * kThreads + static_cast<int64_t>(threadIdx.x)) * kWidth;
      if (at < whole) side[k].finish(body, tensor, factor, begin + at);
    }
  }
  for (int64_t at = whole + threadIdx.x; at < count; at += kThreads) {
    Side<1, Body> side;
    side.load(tensor, begin + at);
    side.finish(body, tensor, factor, begin + at);
  }
}

// The matrices of a block: its batch, the first block of its matrix, and the blocks that a matrix has.
struct NormBlock {
  const NormTensor* tensor;
  uint32_t first, per_matrix;
  int64_t begin, end;  // elements of the batch
};

__device__ __forceinline__ NormBlock norm_block(const NormLaunch& launch) {
  const int index = tensor_of(launch, blockIdx.x);
  const NormTensor& tensor = launch.tensors[index];
  const auto per_matrix = static_cast<uint32_t>((tensor.size + kNormElements - 1) / kNormElements);
  const uint32_t in_batch = blockIdx.x - launch.first_block[index], matrix = in_batch / per_matrix;
  const int64_t first = matrix * tensor.size, begin = first + in_batch % per_matrix * kNormElements;
  const int64_t end = first + tensor.size;
  return {&tensor, blockIdx.x - in_batch % per_matrix, per_matrix, begin,
          begin + kNormElements < end ? begin + kNormElements : end};
}

// The sum over a block's threads, in one order, for all of them.
template <class T>
__device__ __forceinline__ T block_sum(T own) {
  __shared__ T of[kThreads];
  of[threadIdx.x] = own;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) of[threadIdx.x] += of[threadIdx.x + half];
    __syncthreads();
  }
  return of[0];
}

// Calls run(index, words) for words of elements from `begin` to `end`, and for single elements if these are
// not aligned to words.
template <int kWidthOfWord, class Run>
__device__ __forceinline__ void for_words(int64_t begin, int64_t end, bool in_words, Run run) {
  const int64_t whole = in_words ? (end - begin) / kWidthOfWord * kWidthOfWord : 0;
#pragma unroll 4
  for (int64_t at = begin + threadIdx.x * kWidthOfWord; at < begin + whole; at += kThreads * kWidthOfWord) {
    run(at, std::integral_constant<int, kWidthOfWord>());
  }
  for (int64_t at = begin + whole + threadIdx.x; at < end; at += kThreads) {
    run(at, std::integral_constant<int, 1>());
  }
}

constexpr int kNormWidth = 8;

template <class From>
__device__ __forceinline__ bool begins_in_words(const void* data, int64_t at) {
  return (reinterpret_cast<uintptr_t>(data) + at * sizeof(From)) % kWordBytes == 0;
}

template <class From>
__global__ void __launch_bounds__(kThreads) squares_kernel(const __grid_constant__ NormLaunch launch) {
  const NormBlock block = norm_block(launch);
  const auto* const from = static_cast<const From*>(block.tensor->from);
  float sum = 0;
  for_words<kNormWidth>(block.begin, block.end, begins_in_words<From>(from, block.begin),
                        [&](int64_t at, auto width) {
                          ComputeOf<From> x[decltype(width)::value];
                          cuda::load(from + at, x);
#pragma unroll
                          for (const float each : x) sum = fmaf(each, each, sum);
                        });
  sum = block_sum(sum);
  if (threadIdx.x == 0) launch.sums[blockIdx.x] = sum;
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    quotients_kernel(const __grid_constant__ NormLaunch launch, const __grid_constant__ NormOptions options) {
  const NormBlock block = norm_block(launch);
  float sum = 0;
  for (uint32_t i = threadIdx.x; i < block.per_matrix; i += kThreads) sum += launch.sums[block.first + i];
  const float norm = sqrtf(block_sum(sum)), eps = static_cast<float>(options.eps);
  // A comparison that is false for NaN: a norm that is NaN stays.
  const float divisor = options.adds_eps ? norm + eps : (norm < eps ? eps : norm);
  const auto* const from = static_cast<const From*>(block.tensor->from);
  auto* const to = static_cast<To*>(block.tensor->to);
  const bool in_words = begins_in_words<From>(from, block.begin) && begins_in_words<To>(to, block.begin);
  for_words<kNormWidth>(block.begin, block.end, in_words, [&](int64_t at, auto width) {
    float x[decltype(width)::value];
    cuda::load(from + at, x);
#pragma unroll
    for (float& each : x) each = each / divisor;
    cuda::store(to + at, x);
  });
}

template <class From, class To>
void normalize(const NormLaunch& launch, const NormOptions& options) {
  launch_blocks(squares_kernel<From>, launch.first_block[launch.count], launch.queue, launch);
  launch_blocks(quotients_kernel<From, To>, launch.first_block[launch.count], launch.queue, launch, options);
}

template <class Stored, class Product>
void average(const PassLaunch& launch, const AverageOptions& options) {
  using Body = Average<Stored, Product>;
  using T = typename Body::T;
  const Body body{static_cast<T>(options.share), static_cast<T>(options.lead), options.leads};
  launch_blocks(pass_kernel<Body>, launch.first_block[launch.count], launch.queue, launch, body);
}

template <class Stored, class Product>
void move(const PassLaunch& launch, double keep) {
  using Body = Move<Stored, Product>;
  const Body body{static_cast<typename Body::T>(keep)};
  launch_blocks(pass_kernel<Body>, launch.first_block[launch.count], launch.queue, launch, body);
}

static_assert(kColumnsTogether == kSide * kWarp && kThreads == kSquaresRows * kWarp &&
              kThreads == kFoldChannels);

template <class T>
__device__ __forceinline__ double with_squares(double sum, const T (&x)[kSide]) {
#pragma unroll
  for (const T each : x) sum = rules::mul_add(double{each}, double{each}, sum);
  return sum;
}

// A warp has a segment of a row.
template <class Stored>
__device__ __forceinline__ void sum_rows(const SquaresTensor& tensor, uint32_t block) {
  const auto segments = static_cast<uint32_t>(pieces_of(tensor.columns, kRowSegment));
  const int64_t segment = block % segments;
  const int64_t row = block / segments * kSquaresRows + threadIdx.x / kWarp;
  if (row >= tensor.rows) return;
  const int64_t end =
      segment * kRowSegment + kRowSegment < tensor.columns ? (segment + 1) * kRowSegment : tensor.columns;
  const auto* const from = static_cast<const Stored*>(tensor.data) + row * tensor.row_stride;
  const bool in_sides = is_in_sides<Stored>(tensor.data, tensor.row_stride, tensor.column_stride);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  double sum = 0;
#pragma unroll 4
  for (int64_t at = segment * kRowSegment + lane * kSide; at < end; at += kWarp * kSide) {
    ComputeOf<Stored> x[kSide];
    load_side(from, at, end, tensor.column_stride, in_sides, x);
    sum = with_squares(sum, x);
  }
#pragma unroll
  for (int width = kWarp / 2; width > 0; width /= 2) sum += __shfl_down_sync(0xffffffffu, sum, width, kWarp);
  if (lane == 0) tensor.partials[segment * tensor.rows + row] = sum;
}

// A thread has some columns, in one of kSquaresRows rows.
template <class Stored>
__device__ __forceinline__ void sum_columns(const SquaresTensor& tensor, uint32_t block) {
  __shared__ double sums[kSquaresRows][kColumnsTogether];
  const auto across = static_cast<uint32_t>(pieces_of(tensor.columns, kColumnsTogether));
  const int64_t segment = block / across, first = block % across * kColumnsTogether;
  const int lane = static_cast<int>(threadIdx.x % kWarp), part = static_cast<int>(threadIdx.x / kWarp);
  const int64_t column = first + lane * kSide;
  const int64_t end =
      segment * kColumnSegment + kColumnSegment < tensor.rows ? (segment + 1) * kColumnSegment : tensor.rows;
  const auto* const from = static_cast<const Stored*>(tensor.data);
  const bool in_sides = is_in_sides<Stored>(tensor.data, tensor.row_stride, tensor.column_stride);
  double own[kSide] = {};
#pragma unroll 4
  for (int64_t row = segment * kColumnSegment + part; row < end; row += kSquaresRows) {
    ComputeOf<Stored> x[kSide];
    load_side(from + row * tensor.row_stride, column, tensor.columns, tensor.column_stride, in_sides, x);
#pragma unroll
    for (int j = 0; j < kSide; ++j) own[j] = rules::mul_add(double{x[j]}, double{x[j]}, own[j]);
  }
#pragma unroll
  for (int j = 0; j < kSide; ++j) sums[part][lane * kSide + j] = own[j];
  __syncthreads();
  const int64_t mine = first + threadIdx.x;
  if (threadIdx.x >= kColumnsTogether || mine >= tensor.columns) return;
  double sum = 0;
#pragma unroll
  for (const auto& each : sums) sum += each[threadIdx.x];
  tensor.partials[segment * tensor.columns + mine] = sum;
}

template <class Stored>
__global__ void __launch_bounds__(kThreads)
    channel_squares_kernel(const __grid_constant__ SquaresLaunch launch) {
  const int index = tensor_of(launch, blockIdx.x);
  const SquaresTensor& tensor = launch.tensors[index];
  const uint32_t block = blockIdx.x - launch.first_block[index];
  if (tensor.channels == Channels::kColumns) {
    sum_columns<Stored>(tensor, block);
  } else {
    sum_rows<Stored>(tensor, block);
  }
}

__global__ void __launch_bounds__(kThreads) fold_kernel(const __grid_constant__ SquaresLaunch launch) {
  const int index = tensor_of(launch, blockIdx.x);
  const SquaresTensor& tensor = launch.tensors[index];
  const int64_t channels = channels_of(tensor), partials = partials_of(tensor);
  const bool is_whole = tensor.channels == Channels::kWhole;
  int64_t at = threadIdx.x;
  if (!is_whole) at += static_cast<int64_t>(blockIdx.x - launch.first_block[index]) * kThreads;
  double sum = 0;
  if (is_whole || at < channels) {
    const int64_t step = is_whole ? kThreads : channels;
    for (int64_t i = at; i < partials; i += step) sum += tensor.partials[i];
  }
  if (is_whole) {
    sum = block_sum(sum);
    if (threadIdx.x == 0) tensor.sums[0] = sum;
  } else if (at < channels) {
    tensor.sums[at] = sum;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ ScaleLaunch launch, const __grid_constant__ ScaleOptions options) {
  const ScaleTensor& tensor = launch.tensors[blockIdx.x];
  auto* const factors = static_cast<T*>(tensor.factors);
  double norm2 = 0;
  for (int64_t c = threadIdx.x; c < tensor.channels; c += kThreads) {
    const double scale = scale_of(tensor, c, options);
    factors[c] = static_cast<T>(scale);
    norm2 = rules::mul_add(scale * scale, tensor.grad[c], norm2);
  }
  norm2 = block_sum(norm2);
  if (threadIdx.x == 0) *tensor.norm2 = norm2;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    limit_kernel(const __grid_constant__ ScaleLaunch launch, const __grid_constant__ LimitOptions options) {
  const ScaleTensor& tensor = launch.tensors[blockIdx.x];
  auto *const factors = static_cast<T*>(tensor.factors), *const last = static_cast<T*>(tensor.last);
  double norm = *last;
  const double times = limited(*tensor.norm2, tensor.length, options, norm);
  __syncthreads();  // all threads have read the last norm
  if (threadIdx.x == 0) *last = static_cast<T>(norm);
  for (int64_t c = threadIdx.x; c < tensor.channels; c += kThreads) {
    factors[c] = static_cast<T>(factors[c] * times);
  }
}

template <class Stored, class Grad>
__global__ void __launch_bounds__(kThreads)
    move_kernel(const __grid_constant__ MoveLaunch launch, const __grid_constant__ ComputeOf<Stored> keep) {
  using T = ComputeOf<Stored>;
  constexpr int kRows = kMoveRows / kSquaresRows;  // of a thread
  const int index = tensor_of(launch, blockIdx.x);
  const MoveTensor& tensor = launch.tensors[index];
  const uint32_t block = blockIdx.x - launch.first_block[index];
  const auto across = static_cast<uint32_t>(pieces_of(tensor.columns, kColumnsTogether));
  const int64_t first = block / across * kMoveRows + threadIdx.x / kWarp;
  const int64_t column = block % across * kColumnsTogether + threadIdx.x % kWarp * kSide;
  if (column >= tensor.columns) return;
  auto* const weight = static_cast<Stored*>(tensor.weight);
  const auto* const grad = static_cast<const Grad*>(tensor.grad);
  const auto* const factors = static_cast<const T*>(tensor.factors);
  const bool weight_in_sides = is_in_sides<Stored>(weight, tensor.row_stride, tensor.column_stride);
  const bool grad_in_sides = is_in_sides<Grad>(grad, tensor.grad_row_stride, tensor.grad_column_stride);
  T of_columns[kSide], x[kRows][kSide], g[kRows][kSide];
  const bool by_columns = tensor.channels == Channels::kColumns;
  if (by_columns) load_side(factors, column, tensor.columns, 1, false, of_columns);
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t row = first + k * kSquaresRows;
    if (row >= tensor.rows) break;
    load_side(weight + row * tensor.row_stride, column, tensor.columns, tensor.column_stride, weight_in_sides,
              x[k]);
    load_side(grad + row * tensor.grad_row_stride, column, tensor.columns, tensor.grad_column_stride,
              grad_in_sides, g[k]);
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t row = first + k * kSquaresRows;
    if (row >= tensor.rows) break;
    const T of_row = by_columns ? T(0) : factors[tensor.channels == Channels::kRows ? row : 0];
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      x[k][j] = rules::mul_add(by_columns ? of_columns[j] : of_row, g[k][j], x[k][j] * keep);
    }
    store_side(weight + row * tensor.row_stride, column, tensor.columns, tensor.column_stride,
               weight_in_sides, x[k]);
  }
}

template <class Stored>
void sum_squares(const SquaresLaunch& launch) {
  launch_blocks(channel_squares_kernel<Stored>, launch.first_block[launch.count], launch.queue, launch);
}

void fold(const SquaresLaunch& launch) {
  launch_blocks(fold_kernel, launch.first_block[launch.count], launch.queue, launch);
}

template <class Stored, class Grad>
void move_channels(const MoveLaunch& launch, double keep) {
  launch_blocks(move_kernel<Stored, Grad>, launch.first_block[launch.count], launch.queue, launch,
                static_cast<ComputeOf<Stored>>(keep));
}

}  // namespace

const SquaresPasses& squares_passes(SquaresFormat format) {
#define FUSEDSTEP_KERNELS(name, Stored) {sum_squares<Stored>, fold},
  static constexpr SquaresPasses table[] = {FUSEDSTEP_SQUARES_FORMATS(FUSEDSTEP_KERNELS)};
#undef FUSEDSTEP_KERNELS
  return table[static_cast<int>(format)];
}

void scale_weights(bool is_double, const ScaleLaunch& launch, const ScaleOptions& options) {
  const auto kernel = is_double ? scale_kernel<double> : scale_kernel<float>;
  launch_blocks(kernel, launch.first_block[launch.count], launch.queue, launch, options);
}

void limit_weights(bool is_double, const ScaleLaunch& launch, const LimitOptions& options) {
  const auto kernel = is_double ? limit_kernel<double> : limit_kernel<float>;
  launch_blocks(kernel, launch.first_block[launch.count], launch.queue, launch, options);
}

Normalize normalize_kernel(NormFormat format) {
#define FUSEDSTEP_KERNELS(name, From, To) normalize<From, To>,
  static constexpr Normalize table[] = {FUSEDSTEP_NORM_FORMATS(FUSEDSTEP_KERNELS)};
#undef FUSEDSTEP_KERNELS
  return table[static_cast<int>(format)];
}

const MatrixPasses& matrix_passes(PassFormat format) {
#define FUSEDSTEP_KERNELS(name, Stored, Product) \
  {average<Stored, Product>, move<Stored, Product>, move_channels<Stored, Product>},
  static constexpr MatrixPasses table[] = {FUSEDSTEP_PASS_FORMATS(FUSEDSTEP_KERNELS)};
#undef FUSEDSTEP_KERNELS
  return table[static_cast<int>(format)];
}

}  // namespace fusedstep::cuda
