// Conversion between the dtype in memory and the dtype of the maths (float for bf16, fp16 and fp32; double
// for fp64).
//
// Decoding is exact. Encoding rounds to nearest even whatever the thread's rounding mode, keeps denormals
// whatever its flush-to-zero mode, and gives the same bits on every instruction set, of a NaN too.
#pragma once
#include <bit>
#include <cstdint>

#include "cpu_kernels/pack.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class Stored>
struct Codec;

// --- float and double: as they are ---

template <class T>
struct PlainCodec {
  using Compute = T;
  FUSEDSTEP_FN static T decode(T x) { return x; }
  FUSEDSTEP_FN static T encode(T x) { return x; }
  FUSEDSTEP_FN static Pack<T> load(const T* x) { return Pack<T>::load(x); }
  FUSEDSTEP_FN static void store(T* to, const Pack<T>& x) { x.store(to); }
};

template <>
struct Codec<float> : PlainCodec<float> {};
template <>
struct Codec<double> : PlainCodec<double> {};

// --- 16-bit types: one element ---

struct ScalarBf16 {
  using Compute = float;
  FUSEDSTEP_FN static float decode(bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
  FUSEDSTEP_FN static bf16 encode(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {static_cast<uint16_t>(nan ? 0x7fc0u : rounded)};
  }
};

struct ScalarF16 {
  using Compute = float;
  FUSEDSTEP_FN static float decode(f16 x) {
    const uint32_t sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 0x1fu,
                   mantissa = x.bits & 0x3ffu;
    if (exponent == 0x1f) {  // infinity, or NaN made quiet
      return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
    }
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
    if (mantissa == 0) return std::bit_cast<float>(sign);
    const int shift = std::countl_zero(mantissa) - 21;  // bring the leading one to bit 10
    return std::bit_cast<float>(sign | ((113u - shift) << 23) | (((mantissa << shift) & 0x3ffu) << 13));
  }
  FUSEDSTEP_FN static f16 encode(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000u,
                   magnitude = bits & 0x7fffffffu;
    uint32_t half = 0;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);  // NaN made quiet
    } else if (magnitude >= 0x477ff000u) {
      half = 0x7c00u;  // rounds to infinity
    } else if (magnitude >= 0x38800000u) {
      half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    } else if (magnitude > 0x33000000u) {  // denormal: the mantissa with its leading one, shifted and rounded
      const uint32_t shift = 126u - (magnitude >> 23), mantissa = (magnitude & 0x7fffffu) | 0x800000u;
      const uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1u),
                     tie = 1u << (shift - 1u);
      half = kept + (rest > tie || (rest == tie && (kept & 1u)) ? 1u : 0u);
    }
    return {static_cast<uint16_t>(sign | half)};
  }
};

// --- 16-bit types: a register ---

#if defined(__AVX512F__)

template <>
struct Codec<bf16> : ScalarBf16 {
  FUSEDSTEP_FN static Pack<float> load(const bf16* x) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return Pack<float>(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)));
  }
  FUSEDSTEP_FN static void store(bf16* to, const Pack<float>& x) {
    const __m512i bits = _mm512_castps_si512(x.v);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __m512i half = _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fff), odd, _mm512_set1_epi32(0x8000));
    const __mmask16 number = _mm512_cmp_ps_mask(x.v, x.v, _CMP_ORD_Q);
    const __m512i rounded = _mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), number, bits, half);
    // The upper words, side by side.
    const __m512i upper = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0x1f001d, 0x1b0019, 0x170015, 0x130011,
                                           0xf000d, 0xb0009, 0x70005, 0x30001);
    const __m512i words = _mm512_permutexvar_epi16(upper, rounded);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(words));
  }

  // Elements 0, 2, 4, ... and 1, 3, 5, ...: nothing has to cross a register, which one unit alone can do.
  FUSEDSTEP_FN static void load_beside(const bf16* x, Pack<float>& even, Pack<float>& odd) {
    const __m512i words = _mm512_loadu_si512(x);
    even = Pack<float>(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)));
    odd = Pack<float>(_mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-0x10000))));
  }
  // The upper words, plus one where (the lower word + 0x7fff + the lowest bit of the upper one) exceeds a
  // word: their average has that bit.
  FUSEDSTEP_FN static void store_beside(bf16* to, Pack<float> even, Pack<float> odd) {
    if (__builtin_expect(_mm512_cmp_ps_mask(even.v, odd.v, _CMP_UNORD_Q) != 0, 0)) {
      even = with_canonical_nan(even);
      odd = with_canonical_nan(odd);
    }
    constexpr __mmask32 kOdd = 0xaaaaaaaa;
    const __m512i low = _mm512_castps_si512(even.v), high = _mm512_castps_si512(odd.v);
    const __m512i upper = _mm512_mask_mov_epi16(_mm512_srli_epi32(low, 16), kOdd, high);
    const __m512i lower = _mm512_mask_mov_epi16(low, kOdd, _mm512_slli_epi32(high, 16));
    constexpr int kAndOr = 0xea;  // (a & b) | c
    const __m512i half =
        _mm512_ternarylogic_epi32(upper, _mm512_set1_epi16(1), _mm512_set1_epi16(0x7ffe), kAndOr);
    const __m512i carry = _mm512_srli_epi16(_mm512_avg_epu16(lower, half), 15);
    _mm512_storeu_si512(to, _mm512_add_epi16(upper, carry));
  }

 private:
  FUSEDSTEP_FN static Pack<float> with_canonical_nan(const Pack<float>& x) {
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    return Pack<float>(_mm512_mask_mov_ps(x.v, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000))));
  }
};

template <>
struct Codec<f16> : ScalarF16 {
  FUSEDSTEP_FN static Pack<float> load(const f16* x) {
    return Pack<float>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
  }
  FUSEDSTEP_FN static void store(f16* to, const Pack<float>& x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
  }
};

#elif defined(__AVX2__)

template <>
struct Codec<bf16> : ScalarBf16 {
  FUSEDSTEP_FN static Pack<float> load(const bf16* x) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return Pack<float>(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)));
  }
  FUSEDSTEP_FN static void store(bf16* to, const Pack<float>& x) {
    const __m256i bits = _mm256_castps_si256(x.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
    const __m256i result = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
    const __m256i words = _mm256_srli_epi32(result, 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0b1000);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  }
};

template <>
struct Codec<f16> : ScalarF16 {
  FUSEDSTEP_FN static Pack<float> load(const f16* x) {
    return Pack<float>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
  }
  FUSEDSTEP_FN static void store(f16* to, const Pack<float>& x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
  }
};

#else

using Words = Vector<int32_t>;
using Floats = Vector<float>;
using Halves [[gnu::vector_size(sizeof(Words) / 2)]] = uint16_t;

FUSEDSTEP_FN Words load_halves(const void* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return __builtin_convertvector(halves, Words);
}
FUSEDSTEP_FN void store_halves(void* to, const Words& words) {
  const Halves halves = __builtin_convertvector(words, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

template <>
struct Codec<bf16> : ScalarBf16 {
  FUSEDSTEP_FN static Pack<float> load(const bf16* x) {
    return Pack<float>(reinterpret_cast<Floats>(load_halves(x) << 16));
  }
  FUSEDSTEP_FN static void store(bf16* to, const Pack<float>& x) {
    const Words bits = reinterpret_cast<Words>(x.v), odd = (bits >> 16) & 1;
    const Words rounded = (bits + 0x7fff + odd) >> 16;
    // NOLINTNEXTLINE(misc-redundant-expression): NaN is not
    store_halves(to, x.v == x.v ? rounded : 0x7fc0 + Words{});
  }
};

// Out of line: these are many instructions. Floats are used where they are exact: neither rounded nor
// denormal.
template <>
struct Codec<f16> : ScalarF16 {
  [[gnu::noinline]] static Pack<float> load(const f16* x) {
    const Words half = load_halves(x), magnitude = half & 0x7fff, shifted = magnitude << 13;
    const Words special = shifted | 0x7f800000 | ((magnitude > 0x7c00) & 0x400000);  // NaN made quiet
    const auto denormal = reinterpret_cast<Words>(__builtin_convertvector(magnitude, Floats) * 0x1p-24f);
    const Words finite = magnitude < 0x400 ? denormal : shifted + (112 << 23);
    const Words decoded = magnitude >= 0x7c00 ? special : finite;
    return Pack<float>(reinterpret_cast<Floats>(decoded | (half & 0x8000) << 16));
  }
  [[gnu::noinline]] static void store(f16* to, const Pack<float>& x) {
    const Words bits = reinterpret_cast<Words>(x.v), magnitude = bits & 0x7fffffff, shifted = magnitude >> 13;
    const Words is_small = magnitude < 0x38800000;
    const Words normal = (magnitude - 0x38000000 + 0xfff + (shifted & 1)) >> 13;
    // In units of the smallest number.
    const Floats units = reinterpret_cast<Floats>(magnitude & is_small) * 0x1p24f;
    const Words kept = __builtin_convertvector(units, Words);
    const Floats rest = units - __builtin_convertvector(kept, Floats);
    const Words rounds_up = (rest > 0.5f) | ((rest == 0.5f) & ((kept & 1) == 1));
    const Words finite = is_small ? kept - rounds_up : normal;  // true is -1
    const Words number = magnitude >= 0x477ff000 ? 0x7c00 + Words{} : finite;
    const Words encoded = magnitude > 0x7f800000 ? 0x7e00 | (shifted & 0x3ff) : number;  // NaN made quiet
    store_halves(to, encoded | ((bits >> 16) & 0x8000));
  }
};

#endif

// Element i of an array as V: a register or two of elements from i on, or the one element.
template <class V, class Stored>
FUSEDSTEP_FN V load(const Stored* array, int64_t i) {
  if constexpr (requires { V::load(array); }) {
    return V::load(array + i);
  } else if constexpr (requires { V::size(); }) {
    return Codec<Stored>::load(array + i);
  } else {
    return Codec<Stored>::decode(array[i]);
  }
}

template <class V, class Stored>
FUSEDSTEP_FN void store(Stored* array, int64_t i, const V& x) {
  if constexpr (requires { x.store(array); }) {
    x.store(array + i);
  } else if constexpr (requires { V::size(); }) {
    Codec<Stored>::store(array + i, x);
  } else {
    array[i] = Codec<Stored>::encode(x);
  }
}

// x after a round trip through Stored.
template <class Stored, class V>
FUSEDSTEP_FN V rounded(const V& x) {
  if constexpr (requires { V::size(); }) {
    Stored stored[V::size()];
    store(stored, 0, x);
    return load<V>(stored, 0);
  } else {
    return Codec<Stored>::decode(Codec<Stored>::encode(x));
  }
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
