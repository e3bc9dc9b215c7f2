// Products of float32 matrices of many shapes in one launch, on tensor cores: a block of threads has a tile
// of a result. For float32's accuracy a number is the sum of two of TF32; of their four products, that of the
// smaller ones is left out, and sums of kDepth terms are added in float32, as the tensor cores do not round.
#include "cuda_kernels/low_rank_products.h"

#include "cuda_kernels/launch.cuh"
#include "cuda_kernels/warp_group.cuh"

namespace fusedstep::cuda {
namespace {

constexpr int kSide = kLowRankTile, kDepth = 32, kWord = 4, kStages = 3, kSteps = kDepth / 8;
// A warp has a part of the tile; a fragment of a result is 16 x 8.
constexpr int kWarpRows = 64, kWarpColumns = 32;
constexpr int kRowFragments = kWarpRows / 16, kColumnFragments = kWarpColumns / 8;

// An operand's part in shared memory: kSide rows or columns, kDepth deep. Rows there are so far apart that a
// warp's reads are from all banks.
template <bool kDepthInRow>
struct Part {
  static constexpr int kInRow = kDepthInRow ? kDepth : kSide, kStride = kDepthInRow ? kDepth + 4 : kSide + 8;
  static constexpr int kNumbers = (kDepthInRow ? kSide : kDepth) * kStride;

  static __device__ __forceinline__ void copy(float* to, const float* from, int64_t stride, int first,
                                              int count, int deep, int depth) {
    constexpr int kWordsInRow = kInRow / kWord;
#pragma unroll
    for (int i = 0; i < kSide * kDepth / kWord / kThreads; ++i) {
      const int word = static_cast<int>(threadIdx.x) + i * kThreads;
      const int r = word / kWordsInRow, c = word % kWordsInRow * kWord;
      const int row = (kDepthInRow ? first : deep) + r, column = (kDepthInRow ? deep : first) + c;
      const bool is_there = row < (kDepthInRow ? count : depth) && column < (kDepthInRow ? depth : count);
      copy_word(to + r * kStride + c, from + (is_there ? row * stride + column : 0), is_there);
    }
  }
  static __device__ __forceinline__ float at(const float* part, int i, int k) {
    return part[kDepthInRow ? i * kStride + k : k * kStride + i];
  }
};

constexpr int kMostNumbers =
    Part<true>::kNumbers > Part<false>::kNumbers ? Part<true>::kNumbers : Part<false>::kNumbers;
constexpr size_t kSharedBytes = sizeof(float) * kStages * 2 * kMostNumbers;

__device__ __forceinline__ unsigned in_tf32(float x) {
  unsigned y = 0;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// A number's parts: the nearest of TF32, and if there are two what is left.
template <int kParts>
__device__ __forceinline__ void split(float x, unsigned (&parts)[kParts]) {
  if constexpr (kParts == 1) {
    parts[0] = in_tf32(x);
  } else {
    parts[0] = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    parts[1] = __float_as_uint(x - __uint_as_float(parts[0]));
  }
}

__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

using Fragments = float[kRowFragments][kColumnFragments][4];

struct Place {
  int row, column;  // the first ones of a warp in its tile
  int quad, in_quad;
};

// Adds the product of two parts in shared memory to sums.
template <bool kADepthInRow, bool kBDepthInRow, int kParts>
__device__ __forceinline__ void add_products(const float* a, const float* b, const Place& place,
                                             Fragments& sums) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int k = step * 8 + place.in_quad;
    unsigned of_b[kColumnFragments][kParts][2];
#pragma unroll
    for (int n = 0; n < kColumnFragments; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned parts[kParts];
        split(Part<kBDepthInRow>::at(b, place.column + n * 8 + place.quad, k + i * 4), parts);
#pragma unroll
        for (int p = 0; p < kParts; ++p) of_b[n][p][i] = parts[p];
      }
    }
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
      unsigned of_a[kParts][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unsigned parts[kParts];
        split(Part<kADepthInRow>::at(a, place.row + m * 16 + place.quad + i % 2 * 8, k + i / 2 * 4), parts);
#pragma unroll
        for (int p = 0; p < kParts; ++p) of_a[p][i] = parts[p];
      }
#pragma unroll
      for (int n = 0; n < kColumnFragments; ++n) {
        if constexpr (kParts == 2) {
          multiply(sums[m][n], of_a[1], of_b[n][0]);
          multiply(sums[m][n], of_a[0], of_b[n][1]);
        }
        multiply(sums[m][n], of_a[0], of_b[n][0]);
      }
    }
  }
}

template <bool kADepthInRow, bool kBDepthInRow, int kParts>
__device__ __forceinline__ void multiply_tile(const LowRankProduct& product, int first_row, int first_column,
                                              const Place& place, float* memory, Fragments& sums) {
  const int parts = (product.depth + kDepth - 1) / kDepth;
  const auto copy = [&](int part, int stage) {
    float* const a = memory + stage * 2 * kMostNumbers;
    Part<kADepthInRow>::copy(a, product.a, product.a_stride, first_row, product.rows, part * kDepth,
                             product.depth);
    Part<kBDepthInRow>::copy(a + kMostNumbers, product.b, product.b_stride, first_column, product.columns,
                             part * kDepth, product.depth);
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < parts) copy(stage, stage);
    end_copies();
  }
  int stage = 0;
#pragma unroll 1
  for (int part = 0; part < parts; ++part) {
    wait_for_copies<kStages - 2>();
    __syncthreads();
    const int ahead = part + kStages - 1;
    if (ahead < parts) copy(ahead, stage == 0 ? kStages - 1 : stage - 1);
    end_copies();
    const float* const a = memory + stage * 2 * kMostNumbers;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if constexpr (kParts == 1) {
      add_products<kADepthInRow, kBDepthInRow, kParts>(a, a + kMostNumbers, place, sums);
    } else {
      Fragments some = {};
      add_products<kADepthInRow, kBDepthInRow, kParts>(a, a + kMostNumbers, place, some);
#pragma unroll
      for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
        for (int n = 0; n < kColumnFragments; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[m][n][i] += some[m][n][i];
        }
      }
    }
  }
}

__device__ __forceinline__ const NumberedProduct& product_of(const LowRankLaunch& launch, uint32_t tile) {
  int first = 0, last = launch.count - 1;
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (launch.products[middle].first_tile <= tile) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return launch.products[first];
}

// Brings the tile of C to the cache while products are computed.
__device__ __forceinline__ void prefetch(const LowRankProduct& product, int first_row, int first_column) {
  constexpr int kLine = 32;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kSide * kSide / kLine; i += kThreads) {
    const int row = first_row + i / (kSide / kLine), column = first_column + i % (kSide / kLine) * kLine;
    if (row < product.rows && column < product.columns) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(product.c + row * product.c_stride + column));
    }
  }
}

template <int kParts, int kResident>
__global__ void __launch_bounds__(kThreads, kResident)
    low_rank_kernel(const __grid_constant__ LowRankLaunch launch) {
  const NumberedProduct& numbered = product_of(launch, blockIdx.x);
  const LowRankProduct& product = numbered.of;
  const uint32_t tile = blockIdx.x - numbered.first_tile;
  const int first_row = static_cast<int>(tile / numbered.tile_columns) * kSide;
  const int first_column = static_cast<int>(tile % numbered.tile_columns) * kSide;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const Place place{warp / (kSide / kWarpColumns) * kWarpRows, warp % (kSide / kWarpColumns) * kWarpColumns,
                    lane / 4, lane % 4};
  if (product.beta != 0) prefetch(product, first_row, first_column);
  float* const memory = static_cast<float*>(block_memory());
  Fragments sums = {};
  switch (product.form) {
    case ProductForm::kRowsRows:
      multiply_tile<true, true, kParts>(product, first_row, first_column, place, memory, sums);
      break;
    case ProductForm::kRowsColumns:
      multiply_tile<true, false, kParts>(product, first_row, first_column, place, memory, sums);
      break;
    case ProductForm::kColumnsColumns:
      multiply_tile<false, false, kParts>(product, first_row, first_column, place, memory, sums);
      break;
  }
#pragma unroll
  for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + place.row + m * 16 + place.quad + half * 8;
      if (row >= product.rows) continue;
#pragma unroll
      for (int n = 0; n < kColumnFragments; ++n) {
        const int column = first_column + place.column + n * 8 + place.in_quad * 2;
        if (column >= product.columns) continue;
        auto* const to = reinterpret_cast<float2*>(product.c + row * product.c_stride + column);
        float2 result{product.alpha * sums[m][n][2 * half], product.alpha * sums[m][n][2 * half + 1]};
        if (product.beta != 0) {
          const float2 before = *to;
          result = {fmaf(product.beta, before.x, result.x), fmaf(product.beta, before.y, result.y)};
        }
        *to = result;
      }
    }
  }
}

template <int kParts, int kResident>
void launch_parts(const LowRankLaunch& launch) {
  constexpr auto kKernel = low_rank_kernel<kParts, kResident>;
  cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  launch_with_memory(kKernel, launch.tiles, kThreads, kSharedBytes, launch.queue, launch);
}

}  // namespace

void launch_low_rank_products(const LowRankLaunch& launch, bool in_two) {
  // With numbers in two parts a thread has more of them in registers.
  in_two ? launch_parts<2, 1>(launch) : launch_parts<1, 2>(launch);
}

}  // namespace fusedstep::cuda
