// What the passes around matrix products share: the tensor of a block, and accesses to some elements of a row
// that lie side by side.
#pragma once
#include "cuda_kernels/codecs.cuh"
#include "cuda_kernels/launch.cuh"

namespace fusedstep::cuda {

template <class Stored>
__device__ __forceinline__ ComputeOf<Stored> rounded(ComputeOf<Stored> x) {
  return Codec<Stored>::decode(Codec<Stored>::encode(x));
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

// Elements of a row that a thread has side by side.
constexpr int kSide = 4;

template <class Stored>
__device__ __forceinline__ bool is_in_sides(const void* data, int64_t row_stride, int64_t column_stride) {
  constexpr int kBytes = kSide * static_cast<int>(sizeof(Stored));
  return column_stride == 1 && row_stride % kSide == 0 &&
         reinterpret_cast<uintptr_t>(data) % (kBytes < kWordBytes ? kBytes : kWordBytes) == 0;
}

// The elements of a row from a column on, zeros behind the last column.
template <class Stored>
__device__ __forceinline__ void load_side(const Stored* row, int64_t column, int64_t columns, int64_t stride,
                                          bool in_sides, ComputeOf<Stored> (&x)[kSide]) {
  if (in_sides && column + kSide <= columns) {
    cuda::load(row + column, x);
    return;
  }
#pragma unroll
  for (int j = 0; j < kSide; ++j) {
    x[j] = column + j < columns ? Codec<Stored>::decode(row[(column + j) * stride]) : ComputeOf<Stored>(0);
  }
}

template <class Stored>
__device__ __forceinline__ void store_side(Stored* row, int64_t column, int64_t columns, int64_t stride,
                                           bool in_sides, const ComputeOf<Stored> (&x)[kSide]) {
  if (in_sides && column + kSide <= columns) {
    cuda::store(row + column, x);
    return;
  }
#pragma unroll
  for (int j = 0; j < kSide; ++j) {
    if (column + j < columns) row[(column + j) * stride] = Codec<Stored>::encode(x[j]);
  }
}

// Elements side by side as they lie in memory, for them to be decoded when all loads are under way. Without
// kInSides they are loaded one by one, and those behind the end are zeros; with it, `column` is before the
// end.
template <bool kInSides, Reuse kReuse = kAgain, class Stored>
__device__ __forceinline__ void load_stored(const Stored* row, int64_t column, int64_t end,
                                            Stored (&x)[kSide]) {
  if constexpr (kInSides) {
    constexpr int kWords = (kSide * sizeof(Stored) + kWordBytes - 1) / kWordBytes, kPer = kSide / kWords;
    using Type = typename Word<kPer * sizeof(Stored)>::Type;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const Type* at = reinterpret_cast<const Type*>(row + column + w * kPer);
      const Type word = kReuse == kOnce ? __ldcs(at) : *at;
      memcpy(x + w * kPer, &word, sizeof word);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      x[j] = column + j < end ? row[column + j] : Codec<Stored>::encode(ComputeOf<Stored>(0));
    }
  }
}

template <bool kInSides, Reuse kReuse = kAgain, class Stored>
__device__ __forceinline__ void store_sides(Stored* row, int64_t column, int64_t end,
                                            const ComputeOf<Stored> (&x)[kSide]) {
  if constexpr (kInSides) {
    cuda::store<kReuse>(row + column, x);
  } else {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      if (column + j < end) row[column + j] = Codec<Stored>::encode(x[j]);
    }
  }
}

}  // namespace fusedstep::cuda
