// Scalings of symmetric matrices by factors of their rows, for chains of products: a warp has a row.
#include "cuda_kernels/matrix_scalings.h"

#include "cuda_kernels/codecs.cuh"
#include "cuda_kernels/launch.cuh"
#include "src/core/matrix_chain.h"

namespace fusedstep::cuda {
namespace {

static_assert(kThreads == kScalingRows * kWarp);

constexpr int kWidth = 8;  // numbers of a thread side by side

// The row of a warp.
struct Row {
  const SquareMatrices* batch;
  int64_t number, matrix;

  __device__ __forceinline__ explicit Row(const ScalingLaunch& launch) {
    int low = 0, high = launch.count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (launch.batches[middle].first_block <= blockIdx.x ? low : high) = middle;
    }
    batch = &launch.batches[low];
    number = static_cast<int64_t>(blockIdx.x - batch->first_block) * kScalingRows + threadIdx.x / kWarp;
    matrix = number / batch->side;
  }
  __device__ __forceinline__ bool is_there() const { return number < batch->rows; }
  // The factors of the row's matrix, and the place of the row among them.
  __device__ __forceinline__ float* factors() const { return batch->factors + matrix * batch->stride; }
  __device__ __forceinline__ int64_t place() const { return number - matrix * batch->side; }
};

// Calls run(at, numbers, count) for each group of adjacent numbers of a row that a thread takes. The first
// `count` numbers of a group belong to the matrix, the rest is padding.
template <class T, class Run>
__device__ __forceinline__ void for_row(const Row& row, Run run) {
  auto* const data = static_cast<T*>(row.batch->data) + row.number * row.batch->stride;
  const int side = row.batch->side;
#pragma unroll 4
  for (int at = static_cast<int>(threadIdx.x % kWarp) * kWidth; at < side; at += kWarp * kWidth) {
    float x[kWidth];
    cuda::load(data + at, x);
    run(data + at, at, x, side - at < kWidth ? side - at : kWidth);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) factors_kernel(const __grid_constant__ ScalingLaunch launch) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const Row row(launch);
  if (!row.is_there()) return;
  float sum = 0;
  for_row<T>(row, [&](T* /*from*/, int /*at*/, const float(&x)[kWidth], int count) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += j < count ? fabsf(x[j]) : 0;
  });
#pragma unroll
  for (int width = kWarp / 2; width > 0; width /= 2) sum += __shfl_down_sync(0xffffffffu, sum, width, kWarp);
  // A comparison that is false for NaN: a sum that is NaN stays.
  if (threadIdx.x % kWarp == 0) {
    row.factors()[row.place()] = 1 / sqrtf(sum < kLeastRowSum ? kLeastRowSum : sum);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) scaling_kernel(const __grid_constant__ ScalingLaunch launch) {
  let_next_kernel_begin();
  wait_for_kernel_before();
  const Row row(launch);
  if (!row.is_there()) return;
  const float* const factors = row.factors();
  const float own = launch.has_rows ? factors[row.place()] : 1;
  for_row<T>(row, [&](T* to, int at, float(&x)[kWidth], int count) {
  // One product of two factors: a symmetric matrix stays one. What lies behind a row stays there, too.
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x[j] *= j < count ? own * factors[at + j] : 1;
    cuda::store(to, x);
  });
}

}  // namespace

void launch_factors(const ScalingLaunch& launch, bool is_bfloat16) {
  launch_blocks(is_bfloat16 ? factors_kernel<bf16> : factors_kernel<f16>, launch.blocks, launch.queue,
                launch);
}

void launch_scaling(const ScalingLaunch& launch, bool is_bfloat16) {
  launch_blocks(is_bfloat16 ? scaling_kernel<bf16> : scaling_kernel<f16>, launch.blocks, launch.queue,
                launch);
}

}  // namespace fusedstep::cuda
