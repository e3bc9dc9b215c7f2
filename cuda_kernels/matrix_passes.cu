// Kernels before and after the matrix products of a step. Before: update the momentum, write the input of the
// products, and divide matrices by their norms. After: move the weights along the result. Each value is
// rounded as torch's separate operations would round it; a multiplication and its addition are one fused
// operation.
#include "cuda_kernels/matrix_passes.h"

#include "cuda_kernels/codecs.cuh"
#include "cuda_kernels/launch.cuh"

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

template <class Stored>
__device__ __forceinline__ ComputeOf<Stored> rounded(ComputeOf<Stored> x) {
  return Codec<Stored>::decode(Codec<Stored>::encode(x));
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

// The last tensor that does not begin behind a block.
template <class Launch>
__device__ __forceinline__ int tensor_of(const Launch& launch, uint32_t block) {
  int low = 0, high = launch.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (launch.first_block[middle] <= block ? low : high) = middle;
  }
  return low;
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
__device__ __forceinline__ float block_sum(float own) {
  __shared__ float of[kThreads];
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

}  // namespace

Normalize normalize_kernel(NormFormat format) {
#define FUSEDSTEP_KERNELS(name, From, To) normalize<From, To>,
  static constexpr Normalize table[] = {FUSEDSTEP_NORM_FORMATS(FUSEDSTEP_KERNELS)};
#undef FUSEDSTEP_KERNELS
  return table[static_cast<int>(format)];
}

const MatrixPasses& matrix_passes(PassFormat format) {
#define FUSEDSTEP_KERNELS(name, Stored, Product) {average<Stored, Product>, move<Stored, Product>},
  static constexpr MatrixPasses table[] = {FUSEDSTEP_PASS_FORMATS(FUSEDSTEP_KERNELS)};
#undef FUSEDSTEP_KERNELS
  return table[static_cast<int>(format)];
}

}  // namespace fusedstep::cuda
