// Codes of 8 and 4 bits to numbers on a tile, and back (src/core/code_map.h).
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu_kernels/pack.h"
#include "src/core/code_map.h"
#include "src/core/task.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// The code of element i: a byte of its own, or half of one, of which the upper half comes first.
template <Storage kStorage>
FUSEDSTEP_FN int32_t code_at(const uint8_t* codes, int64_t i) {
  if constexpr (kStorage != Storage::kInt4) return codes[i];
  return i % 2 == 0 ? codes[i / 2] >> 4 : codes[i / 2] & 15;
}
// Elements are put in order.
template <Storage kStorage>
FUSEDSTEP_FN void put_code(uint8_t* codes, int64_t i, int32_t code) {
  if constexpr (kStorage != Storage::kInt4) {
    codes[i] = static_cast<uint8_t>(code);
  } else {
    codes[i / 2] = static_cast<uint8_t>(i % 2 == 0 ? code << 4 : codes[i / 2] | code);
  }
}

#if defined(__AVX512F__)

struct CodeRegister {
  static constexpr int kSize = 16, kGroup = 4;
  using Bits = __m512i;

  // Tables that are looked up for a register: numbers by the lowest four bits of an index.
  template <Storage kStorage, bool kSigned>
  struct Tables {
    __m512 value_slope, value_start, slope, start, end;
    __m512i octave[2];
    __m512i zero, zero_bytes, count, floor;
    __m512 rounding, least, least_below;

    explicit Tables(const CodeMap& map)
        : zero(_mm512_set1_epi32(map.zero)),
          zero_bytes(_mm512_set1_epi8(static_cast<char>(map.zero))),
          count(_mm512_set1_epi32(map.count)),
          floor(_mm512_set1_epi32(map.floor)),
          rounding(_mm512_set1_ps(map.rounding)) {
      if constexpr (kStorage == Storage::kFloat8) return;
      slope = eight(map.slope);
      start = eight(map.start);
      const __m256i last = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(map.last));
      end = _mm512_zextps256_ps512(_mm256_add_ps(_mm256_cvtepi32_ps(last), _mm256_set1_ps(0.5f)));
      // The value of a level is a share that has it, whatever the step rounds by.
      const auto share_of = [&](int32_t level) {
        return _mm512_set1_ps(level == 0 ? CodeMap::kLeastShare : value_of<kStorage>(map, map.zero + level));
      };
      least = share_of(map.floor);
      least_below = share_of(map.least);
      for (int half = 0; half < 2; ++half) octave[half] = octave_words(map, half * kSize);
      if constexpr (kStorage == Storage::kInt4) {
        value_start = _mm512_loadu_ps(map.value);
      } else {
        // Level zero has no exponent if signed. Unsigned it counts as one, whose exponent no other level has.
        value_slope = kSigned ? twice(map.value_slope) : eight(map.value_slope);
        value_start = kSigned ? twice(map.value_start) : eight(map.value_start);
      }
    }

   private:
    FUSEDSTEP_FN static __m512 eight(const float (&of)[CodeMap::kSegments]) {
      return _mm512_zextps256_ps512(_mm256_loadu_ps(of));
    }
    FUSEDSTEP_FN static __m512 twice(const float (&of)[CodeMap::kSegments]) {
      const __m256 once = _mm256_loadu_ps(of);
      return _mm512_insertf32x8(_mm512_castps256_ps512(once), once, 1);
    }
    // What is added to the bits of a share puts its segment in the exponent's place. Where an exponent has a
    // threshold, mantissas beyond the threshold carry into the next segment.
    FUSEDSTEP_FN static __m512i octave_words(const CodeMap& map, int first) {
      const __m512i one = _mm512_set1_epi32(1), next = _mm512_loadu_si512(map.octave_threshold + first);
      const __m512i threshold = _mm512_castps_si512(_mm512_permutexvar_ps(next, eight(map.threshold)));
      const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const __m512i exponent = _mm512_add_epi32(lanes, _mm512_set1_epi32(CodeMap::kFirstExponent + first));
      const __m512i of_threshold = _mm512_srli_epi32(threshold, kMantissa);
      const __mmask16 some = _mm512_cmpeq_epi32_mask(of_threshold, exponent);
      const __mmask16 above = _mm512_cmpge_epi32_mask(of_threshold, exponent);
      const __m512i segment = _mm512_mask_sub_epi32(next, above, next, one);
      const __m512i moved = _mm512_slli_epi32(_mm512_sub_epi32(segment, exponent), kMantissa);
      return _mm512_mask_add_epi32(moved, some, moved,
                                   _mm512_andnot_si512(threshold, _mm512_set1_epi32(kMantissaBits)));
    }
  };

  template <Storage kStorage, bool kSigned>
  FUSEDSTEP_FN static __m512 decode(const Tables<kStorage, kSigned>& tables, const uint8_t* codes) {
    if constexpr (kStorage == Storage::kInt4) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
      const __m512i twice = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
      const __m512i code = _mm512_srlv_epi32(twice, _mm512_set1_epi64(4));  // of 16, four bits count
      return _mm512_permutexvar_ps(code, tables.value_start);
    }
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    if constexpr (kStorage == Storage::kFloat8) {
      constexpr int kShift = kMantissa - kFloat8Mantissa;
      const __m512i lift = _mm512_set1_epi32((kBias - kFloat8Bias) << kMantissa);
      const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi32(127));
      __m512 value = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(magnitude, kShift), lift));
      const __mmask16 small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(1 << kFloat8Mantissa));
      const __m512 above = _mm512_sub_ps(value, _mm512_castsi512_ps(lift));
      value = _mm512_mask_add_ps(value, small, above, above);
      const __mmask16 nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(127));
      value = _mm512_mask_mov_ps(value, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
      const __m512i sign = _mm512_slli_epi32(_mm512_andnot_si512(_mm512_set1_epi32(127), code), 24);
      return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), sign));
    } else {
      const __m512i above =
          kSigned ? _mm512_sub_epi32(code, tables.zero) : _mm512_add_epi32(code, tables.count);
      const __m512 counted = _mm512_cvtepi32_ps(above);
      const __m512i bits = _mm512_castps_si512(counted), one = _mm512_set1_epi32(kOneBits);
      constexpr int kAndOr = 0xea;  // (a & b) | c
      const __m512i mantissa = _mm512_ternarylogic_epi32(bits, _mm512_set1_epi32(kMantissaBits), one, kAndOr);
      const __m512i segment = _mm512_srli_epi32(bits, kMantissa);
      const __m512 slope = _mm512_permutexvar_ps(segment, tables.value_slope);
      const __m512 start = _mm512_permutexvar_ps(segment, tables.value_start);
      // The product of the slope and the mantissa less one, which is rounded once.
      const __m512 product = _mm512_fmsub_ps(_mm512_castsi512_ps(mantissa), slope, slope);
      const __m512 value = _mm512_add_ps(product, start);
      // The smaller magnitude, with the sign of `counted`: that is zero, or at least as large as the value.
      constexpr int kSmallerMagnitude = 0b0010;
      return kSigned ? _mm512_range_ps(counted, value, kSmallerMagnitude) : value;
    }
  }

  // Codes in 32 bits. For a signed map of int8 or int4: the distance of each code below the code `zero`.
  template <Storage kStorage, bool kSigned>
  FUSEDSTEP_FN static __m512i code(const Tables<kStorage, kSigned>& tables, __m512 number, __m512 share) {
    const __m512i bits = _mm512_castps_si512(number);
    const auto is_positive = [&] { return _mm512_cmpgt_epi32_mask(bits, _mm512_setzero_si512()); };
    const auto is_negative = [&] {
      return _mm512_cmpgt_epu32_mask(bits, _mm512_set1_epi32(~kMagnitudeBits));
    };
    if constexpr (kStorage == Storage::kFloat8) {
      const __m512i magnitude = magnitudes(share), least = _mm512_set1_epi32(kBias - kFloat8Bias + 1);
      const __m512i e = _mm512_max_epi32(_mm512_srli_epi32(magnitude, kMantissa), least);
      const __m512i slope =
          _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(2 * kBias + kFloat8Mantissa), e), kMantissa);
      const __m512i before = _mm512_slli_epi32(_mm512_sub_epi32(e, least), kFloat8Mantissa);
      const __m512 start = _mm512_add_ps(_mm512_cvtepi32_ps(before), tables.rounding);
      const __m512 product = _mm512_mul_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(slope));
      const __m512i level = _mm512_cvttps_epi32(_mm512_add_ps(product, start));
      if constexpr (kSigned) {
        return _mm512_mask_add_epi32(level, is_negative(), level, _mm512_set1_epi32(1 << 7));
      }
      return _mm512_maskz_max_epi32(is_positive(), level, tables.floor);
    }
    constexpr int kLargerMagnitude = 0b1011;  // without its sign
    __m512 size = _mm512_range_ps(share, tables.least, kLargerMagnitude);
    if constexpr (kSigned && kStorage == Storage::kInt8) {
      size = _mm512_mask_max_ps(size, is_negative(), size, tables.least_below);
    }
    const __m512i octave = _mm512_srli_epi32(_mm512_castps_si512(size), kMantissa);
    const __m512i moved = _mm512_permutex2var_epi32(tables.octave[0], octave, tables.octave[1]);
    const __m512i segment = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(size), moved), kMantissa);
    const __m512 slope = _mm512_permutexvar_ps(segment, tables.slope);
    const __m512 start = _mm512_permutexvar_ps(segment, tables.start);
    const __m512 end = _mm512_permutexvar_ps(segment, tables.end);
    const __m512 level = _mm512_min_ps(_mm512_add_ps(_mm512_mul_ps(size, slope), start), end);
    if constexpr (kSigned) {
      constexpr int kOrAndNot = 0xf2;  // a | (c & ~b)
      return _mm512_cvttps_epi32(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(
          _mm512_castps_si512(level), bits, _mm512_set1_epi32(~kMagnitudeBits), kOrAndNot)));
    }
    if constexpr (kStorage == Storage::kInt8) return _mm512_maskz_cvttps_epi32(is_positive(), level);
    return _mm512_cvttps_epi32(level);
  }
  template <Storage kStorage, bool kSigned>
  FUSEDSTEP_FN static void store_codes(const Tables<kStorage, kSigned>& tables, __m512i code,
                                       uint8_t* codes) {
    if constexpr (kSigned && kStorage != Storage::kFloat8) {
      code = _mm512_max_epi32(_mm512_sub_epi32(tables.zero, code), _mm512_setzero_si512());
    }
    if constexpr (kStorage == Storage::kInt4) {
      const __m512i pair = _mm512_or_si512(_mm512_slli_epi64(code, 4), _mm512_srli_epi64(code, 32));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi64_epi8(pair));
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(code));
    }
  }
  template <Storage kStorage, bool kSigned>
  FUSEDSTEP_FN static void store_codes(const Tables<kStorage, kSigned>& tables, const __m512i (&code)[kGroup],
                                       uint8_t* codes) {
    // Within quarters of a register; then quarters are put in order.
    constexpr bool kBelowZero = kSigned && kStorage != Storage::kFloat8;
    const __m512i low = _mm512_packs_epi32(code[0], code[1]), high = _mm512_packs_epi32(code[2], code[3]);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i packed = kBelowZero ? _mm512_packs_epi16(low, high) : _mm512_packus_epi16(low, high);
    __m512i bytes = _mm512_permutexvar_epi32(order, packed);
    // The absolute maximum below zero has no code, and gets that next to it.
    if constexpr (kBelowZero) {
      const __m512i zero = tables.zero_bytes;
      bytes = _mm512_sub_epi8(zero, kStorage == Storage::kInt4 ? _mm512_min_epi8(bytes, zero) : bytes);
    }
    if constexpr (kStorage == Storage::kInt4) {
      const __m512i pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x0110));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtepi16_epi8(pairs));
    } else {
      _mm512_storeu_si512(codes, bytes);
    }
  }
  FUSEDSTEP_FN static __m512 load(const float* x) { return _mm512_loadu_ps(x); }
  FUSEDSTEP_FN static void store(float* x, __m512 v) { _mm512_storeu_ps(x, v); }
  FUSEDSTEP_FN static __m512 times(__m512 a, float b) { return _mm512_mul_ps(a, _mm512_set1_ps(b)); }
  FUSEDSTEP_FN static __m512i magnitudes(__m512 x) {
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(kMagnitudeBits));
  }
  // The largest magnitudes so far, as bits. Of a state that is never negative the bits as they are: a number
  // with a sign, which only a NaN or a zero may have, becomes the largest.
  template <bool kSigned>
  FUSEDSTEP_FN static __m512i larger(__m512i most, __m512 x) {
    if constexpr (kSigned) return _mm512_max_epi32(most, magnitudes(x));
    return _mm512_max_epu32(most, _mm512_castps_si512(x));
  }
  template <bool kSigned>
  FUSEDSTEP_FN static int32_t largest_of(__m512i most) {
    if constexpr (kSigned) return _mm512_reduce_max_epi32(most);
    return static_cast<int32_t>(_mm512_reduce_max_epu32(most));
  }
};

#elif defined(__AVX2__)

struct CodeRegister {
  static constexpr int kSize = 8, kGroup = 4;
  using Bits = __m256i;

  template <Storage kStorage, bool kSigned>
  struct Tables : CodeMap {  // a copy, which no store can change
    explicit Tables(const CodeMap& map) : CodeMap(map) {}
  };

  FUSEDSTEP_FN static __m256 lookup(const float (&of)[CodeMap::kSegments], __m256i segment) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(of), segment);
  }
  FUSEDSTEP_FN static __m256i as_bits(__m256 x) { return _mm256_castps_si256(x); }
  FUSEDSTEP_FN static __m256 as_floats(__m256i x) { return _mm256_castsi256_ps(x); }
  FUSEDSTEP_FN static __m256i repeated(int32_t x) { return _mm256_set1_epi32(x); }
  // y where the sign bit of `mask` is set, else x.
  FUSEDSTEP_FN static __m256 select(__m256 x, __m256 y, __m256i mask) {
    return _mm256_blendv_ps(x, y, as_floats(mask));
  }

  template <Storage kStorage, bool kSigned>
  FUSEDSTEP_FN static __m256 decode(const Tables<kStorage, kSigned>& map, const uint8_t* codes) {
    if constexpr (kStorage == Storage::kInt4) {
      int32_t four = 0;
      std::memcpy(&four, codes, sizeof four);
      const __m128i bytes = _mm_cvtsi32_si128(four);
      const __m256i two = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
      const __m256i code = _mm256_srlv_epi32(two, _mm256_set1_epi64x(4));  // of 8, three bits count
      const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(map.value), code);
      const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(map.value + 8), code);
      return select(low, high, _mm256_slli_epi32(code, 28));
    }
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    if constexpr (kStorage == Storage::kFloat8) {
      constexpr int kShift = kMantissa - kFloat8Mantissa;
      const __m256i lift = repeated((kBias - kFloat8Bias) << kMantissa);
      const __m256i magnitude = _mm256_and_si256(code, repeated(127));
      __m256 value = as_floats(_mm256_add_epi32(_mm256_slli_epi32(magnitude, kShift), lift));
      const __m256 above = _mm256_sub_ps(value, as_floats(lift));
      const __m256i small = _mm256_cmpgt_epi32(repeated(1 << kFloat8Mantissa), magnitude);
      value = select(value, _mm256_add_ps(above, above), small);
      value = select(value, as_floats(repeated(0x7fc00000)), _mm256_cmpeq_epi32(magnitude, repeated(127)));
      const __m256i sign = _mm256_slli_epi32(_mm256_andnot_si256(repeated(127), code), 24);
      return as_floats(_mm256_or_si256(as_bits(value), sign));
    } else {
      const __m256i above = _mm256_sub_epi32(code, repeated(map.zero));
      const __m256i level = _mm256_abs_epi32(above);
      const __m256i bits = as_bits(_mm256_cvtepi32_ps(_mm256_add_epi32(level, repeated(map.count))));
      const __m256i one = repeated(kOneBits);
      const __m256i mantissa = _mm256_or_si256(_mm256_and_si256(bits, repeated(kMantissaBits)), one);
      const __m256 m = _mm256_sub_ps(as_floats(mantissa), as_floats(one));
      const __m256i segment = _mm256_srli_epi32(bits, kMantissa);
      const __m256 value =
          _mm256_add_ps(_mm256_mul_ps(m, lookup(map.value_slope, segment)), lookup(map.value_start, segment));
      const __m256i some = _mm256_cmpgt_epi32(level, _mm256_setzero_si256());
      const __m256i sign = _mm256_and_si256(above, repeated(~kMagnitudeBits));
      return as_floats(_mm256_or_si256(_mm256_and_si256(as_bits(value), some), sign));
    }
  }
  template <Storage kStorage, bool kSigned>
  FUSEDSTEP_FN static __m256i code(const Tables<kStorage, kSigned>& map, __m256 number, __m256 share) {
    const __m256i bits = as_bits(number), magnitude = magnitudes(share);
    const __m256 size = as_floats(magnitude);
    __m256i level;
    if constexpr (kStorage == Storage::kFloat8) {
      const __m256i least = repeated(kBias - kFloat8Bias + 1);
      const __m256i e = _mm256_max_epi32(_mm256_srli_epi32(magnitude, kMantissa), least);
      const __m256i slope =
          _mm256_slli_epi32(_mm256_sub_epi32(repeated(2 * kBias + kFloat8Mantissa), e), kMantissa);
      const __m256i before = _mm256_slli_epi32(_mm256_sub_epi32(e, least), kFloat8Mantissa);
      const __m256 start = _mm256_add_ps(_mm256_cvtepi32_ps(before), _mm256_set1_ps(map.rounding));
      level = _mm256_cvttps_epi32(_mm256_add_ps(_mm256_mul_ps(size, as_floats(slope)), start));
    } else {
      __m256i segment = repeated(-1);
#pragma GCC unroll 8
      for (const float threshold : map.threshold) {  // true is -1
        segment = _mm256_sub_epi32(segment, _mm256_cmpgt_epi32(magnitude, repeated(bits_of(threshold))));
      }
      const __m256 found =
          _mm256_add_ps(_mm256_mul_ps(size, lookup(map.slope, segment)), lookup(map.start, segment));
      const __m256i lasts = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(map.last));
      level = _mm256_min_epi32(_mm256_cvttps_epi32(found), _mm256_permutevar8x32_epi32(lasts, segment));
      level = _mm256_andnot_si256(_mm256_srai_epi32(segment, 31), level);
    }
    if constexpr (!kSigned && kStorage == Storage::kInt4) return level;
    if constexpr (!kSigned) {
      const __m256i positive = _mm256_cmpgt_epi32(bits, _mm256_setzero_si256());
      return _mm256_and_si256(_mm256_max_epi32(level, repeated(map.floor)), positive);
    }
    // The sign bit decides; that of zero counts for nothing.
    const __m256i is_minus_zero = _mm256_cmpeq_epi32(bits, repeated(~kMagnitudeBits));
    const __m256i sign = _mm256_andnot_si256(is_minus_zero, _mm256_srai_epi32(bits, 31));
    if constexpr (kStorage == Storage::kFloat8) {
      return _mm256_add_epi32(level, _mm256_and_si256(sign, repeated(1 << 7)));
    }
    if constexpr (kStorage == Storage::kInt8) level = _mm256_max_epi32(level, _mm256_srli_epi32(sign, 31));
    const __m256i above = _mm256_sub_epi32(_mm256_xor_si256(level, sign), sign);
    return _mm256_add_epi32(repeated(map.zero), above);
  }
  template <Storage kStorage, bool kSigned>
  FUSEDSTEP_FN static void store_codes(const Tables<kStorage, kSigned>&, __m256i code, uint8_t* codes) {
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    const __m128i bytes = _mm_packus_epi16(words, words);
    if constexpr (kStorage == Storage::kInt4) {
      const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x0110));
      const int32_t four = _mm_cvtsi128_si32(_mm_packus_epi16(pairs, pairs));
      std::memcpy(codes, &four, sizeof four);
    } else {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), bytes);
    }
  }
  template <Storage kStorage, bool kSigned>
  FUSEDSTEP_FN static void store_codes(const Tables<kStorage, kSigned>&, const __m256i (&code)[kGroup],
                                       uint8_t* codes) {
    // Within halves of a register; then quarters of them are put in order.
    const __m256i low = _mm256_packus_epi32(code[0], code[1]), high = _mm256_packus_epi32(code[2], code[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
    if constexpr (kStorage == Storage::kInt4) {
      const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x0110));
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0b1000);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm256_castsi256_si128(packed));
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
    }
  }
  FUSEDSTEP_FN static __m256 load(const float* x) { return _mm256_loadu_ps(x); }
  FUSEDSTEP_FN static void store(float* x, __m256 v) { _mm256_storeu_ps(x, v); }
  FUSEDSTEP_FN static __m256 times(__m256 a, float b) { return _mm256_mul_ps(a, _mm256_set1_ps(b)); }
  FUSEDSTEP_FN static __m256i magnitudes(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), repeated(kMagnitudeBits));
  }
  template <bool kSigned>
  FUSEDSTEP_FN static __m256i larger(__m256i most, __m256 x) {
    return _mm256_max_epi32(most, magnitudes(x));
  }
  template <bool kSigned>
  FUSEDSTEP_FN static int32_t largest_of(__m256i a) {
    alignas(32) int32_t lanes[kSize];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), a);
    return *std::max_element(lanes, lanes + kSize);
  }
};

#else

// One element: a table is looked up by scalar loads anyway.
struct CodeRegister {
  static constexpr int kSize = 0;
  template <Storage kStorage, bool kSigned>
  struct Tables {
    explicit Tables(const CodeMap&) {}
  };
};

#endif

template <Storage kStorage, bool kSigned>
using CodeTables = typename CodeRegister::template Tables<kStorage, kSigned>;

template <Storage kStorage, bool kSigned, class Register = CodeRegister>
void decode_block(const CodeMap& map, const CodeTables<kStorage, kSigned>& tables, const uint8_t* codes,
                  float absmax, int64_t count, float* to) {
  const float scale = absmax / map.top;
  int64_t i = 0;
  if constexpr (Register::kSize != 0) {
    for (; i + Register::kSize <= count; i += Register::kSize) {
      const uint8_t* const at = codes + (kStorage == Storage::kInt4 ? i / 2 : i);
      Register::store(to + i, Register::times(Register::decode(tables, at), scale));
    }
  }
  for (; i < count; ++i) to[i] = value_of<kStorage>(map, code_at<kStorage>(codes, i)) * scale;
}

// The largest magnitude, as bits.
template <class Register = CodeRegister>
int32_t largest_magnitude(const float* x, int64_t count) {
  int32_t largest = 0;
  int64_t i = 0;
  if constexpr (Register::kSize != 0) {
    typename Register::Bits most{};
    for (; i + Register::kSize <= count; i += Register::kSize) {
      most = Register::template larger</*kSigned=*/true>(most, Register::load(x + i));
    }
    largest = Register::template largest_of</*kSigned=*/true>(most);
  }
  for (; i < count; ++i) largest = std::max(largest, bits_of(x[i]) & kMagnitudeBits);
  return largest;
}

// Numbers of a block that registers encode together, from the i-th on.
template <Storage kStorage, bool kSigned, class Register = CodeRegister>
FUSEDSTEP_FN void encode_group(const CodeTables<kStorage, kSigned>& tables, const float* from, int64_t i,
                               float inverse, uint8_t* codes) {
  typename Register::Bits group[Register::kGroup];
#pragma GCC unroll 4
  for (int k = 0; k < Register::kGroup; ++k) {
    const auto number = Register::load(from + i + k * Register::kSize);
    group[k] = Register::code(tables, number, Register::times(number, inverse));
  }
  Register::store_codes(tables, group, codes + (kStorage == Storage::kInt4 ? i / 2 : i));
}

// The numbers of a block.
template <Storage kStorage, bool kSigned, class Register = CodeRegister>
void encode_shares(const CodeMap& map, const CodeTables<kStorage, kSigned>& tables, const float* from,
                   int64_t count, float inverse, uint8_t* codes) {
  if (inverse == 0) {
    std::memset(codes, zero_byte(map), map.bytes_of(count));
    return;
  }
  int64_t i = 0;
  if constexpr (Register::kSize != 0) {
    constexpr int kTogether = Register::kGroup * Register::kSize;
    for (; i + kTogether <= count; i += kTogether) {
      encode_group<kStorage, kSigned, Register>(tables, from, i, inverse, codes);
    }
    for (; i + Register::kSize <= count; i += Register::kSize) {
      const auto number = Register::load(from + i);
      Register::store_codes(tables, Register::code(tables, number, Register::times(number, inverse)),
                            codes + (kStorage == Storage::kInt4 ? i / 2 : i));
    }
  }
  for (; i < count; ++i) put_code<kStorage>(codes, i, code_of<kStorage>(map, from[i], from[i] * inverse));
}

template <Storage kStorage, bool kSigned>
void encode_block(const CodeMap& map, const CodeTables<kStorage, kSigned>& tables, const float* from,
                  int64_t count, int32_t largest, uint8_t* codes, float& absmax) {
  const BlockScale scale = scale_of(largest, map.top);
  absmax = scale.absmax;
  encode_shares<kStorage, kSigned>(map, tables, from, count, scale.inverse, codes);
}

// Calls run(storage, is_signed) with constants.
template <class Run>
FUSEDSTEP_FN void by_map(const CodeMap& map, Run run) {
  by_storage(map.storage, [&]<Storage kStorage>(StorageIs<kStorage> storage) {
    if (map.is_signed()) {
      run(storage, std::true_type());
    } else {
      run(storage, std::false_type());
    }
  });
}

// Elements [begin, begin + count) of a state, which begin with a block, to numbers; and from numbers, in a
// step that rounds by this (src/core/code_map.h).
inline void decode(const CodedState& state, const void* codes, int64_t begin, int64_t count, float* to) {
  const CodeMap map = *state.map;  // a copy, which no store can change
  const auto* const bytes = static_cast<const uint8_t*>(codes);
  by_map(map, [&]<Storage kStorage, bool kSigned>(StorageIs<kStorage>, std::bool_constant<kSigned>) {
    const CodeTables<kStorage, kSigned> tables(map);
    for (int64_t i = 0; i < count; i += map.block) {
      decode_block<kStorage, kSigned>(map, tables, bytes + map.bytes_of(begin + i),
                                      state.absmax[(begin + i) / map.block],
                                      std::min<int64_t>(map.block, count - i), to + i);
    }
  });
}
inline void encode(const CodedState& state, float rounding, const float* from, int64_t begin, int64_t count,
                   void* codes) {
  const CodeMap map = rounding_by(*state.map, rounding);
  auto* const bytes = static_cast<uint8_t*>(codes);
  by_map(map, [&]<Storage kStorage, bool kSigned>(StorageIs<kStorage>, std::bool_constant<kSigned>) {
    const CodeTables<kStorage, kSigned> tables(map);
    for (int64_t i = 0; i < count; i += map.block) {
      const int64_t length = std::min<int64_t>(map.block, count - i);
      encode_block<kStorage, kSigned>(map, tables, from + i, length, largest_magnitude(from + i, length),
                                      bytes + map.bytes_of(begin + i), state.absmax[(begin + i) / map.block]);
    }
  });
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
