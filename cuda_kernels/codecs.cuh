// Conversion between the dtype in memory and the dtype of the maths, and accesses of up to 16 bytes.
//
// Decoding is exact, encoding rounds to nearest even and keeps denormals: as on the CPU, whose bits they have
// but for the payload of a NaN.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "cuda_kernels/kernel_table.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;

template <class Stored>
struct Codec {
  using Compute = Stored;
  static __device__ Stored decode(Stored x) { return x; }
  static __device__ Stored encode(Stored x) { return x; }
};
template <>
struct Codec<bf16> {
  using Compute = float;
  static __device__ float decode(bf16 x) { return __bfloat162float(x); }
  static __device__ bf16 encode(float x) { return __float2bfloat16_rn(x); }
};
template <>
struct Codec<f16> {
  using Compute = float;
  static __device__ float decode(f16 x) { return __half2float(x); }
  static __device__ f16 encode(float x) { return __float2half_rn(x); }
};

template <class Stored>
using ComputeOf = typename Codec<Stored>::Compute;

template <int kBytes>
struct Word;
template <>
struct Word<2> {
  using Type = unsigned short;
};
template <>
struct Word<4> {
  using Type = unsigned;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<16> {
  using Type = uint4;
};

// Reuse of memory by a step. Memory that is used once is the first to leave the cache when room is needed.
// This gains a few percent for passes that touch all operands, and nothing, or a loss, for the others.
enum Reuse : bool { kOnce, kAgain };

// N elements that lie side by side, aligned to the accesses made for them.
template <Reuse kReuse = kAgain, int N, class Stored>
__device__ __forceinline__ void load(const Stored* from, ComputeOf<Stored> (&x)[N]) {
  constexpr int kWords = (N * sizeof(Stored) + kWordBytes - 1) / kWordBytes, kPer = N / kWords;
  using Type = typename Word<kPer * sizeof(Stored)>::Type;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const Type* at = reinterpret_cast<const Type*>(from + w * kPer);
    const Type word = kReuse == kOnce ? __ldcs(at) : *at;
    Stored stored[kPer];
    memcpy(stored, &word, sizeof word);
#pragma unroll
    for (int j = 0; j < kPer; ++j) x[w * kPer + j] = Codec<Stored>::decode(stored[j]);
  }
}

template <Reuse kReuse = kAgain, int N, class Stored>
__device__ __forceinline__ void store(Stored* to, const ComputeOf<Stored> (&x)[N]) {
  constexpr int kWords = (N * sizeof(Stored) + kWordBytes - 1) / kWordBytes, kPer = N / kWords;
  using Type = typename Word<kPer * sizeof(Stored)>::Type;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    Stored stored[kPer];
#pragma unroll
    for (int j = 0; j < kPer; ++j) stored[j] = Codec<Stored>::encode(x[w * kPer + j]);
    Type word;
    memcpy(&word, stored, sizeof word);
    Type* at = reinterpret_cast<Type*>(to + w * kPer);
    if constexpr (kReuse == kOnce) {
      __stcs(at, word);
    } else {
      *at = word;
    }
  }
}

}  // namespace fusedstep::cuda
