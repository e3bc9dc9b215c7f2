// Codes of 8 and 4 bits to numbers on a tile, and back (src/core/code_map.h).
#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu_kernels/pack.h"
#include "src/core/code_map.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// The code of element i: a byte of its own, or half of one, of which the upper half comes first.
FUSEDSTEP_FN int32_t code_at(const uint8_t* codes, bool halves, int64_t i) {
  if (!halves) return codes[i];
  return i % 2 == 0 ? codes[i / 2] >> 4 : codes[i / 2] & 15;
}

#if defined(__AVX512F__)

struct CodeRegister {
  static constexpr int kSize = 16;

  template <bool kHalves>
  FUSEDSTEP_FN static __m512 decode(const CodeMap& map, const uint8_t* codes) {
    if constexpr (kHalves) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
      const __m512i twice = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
      const __m512i code = _mm512_srlv_epi32(twice, _mm512_set1_epi64(4));  // of 16, four bits count
      return _mm512_permutexvar_ps(code, _mm512_loadu_ps(map.value));
    } else {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
      return _mm512_i32gather_ps(_mm512_cvtepu8_epi32(bytes), map.value, 4);
    }
  }
  template <bool kHalves>
  FUSEDSTEP_FN static void encode(const CodeMap& map, __m512 share, uint8_t* codes) {
    const __m512i bits = _mm512_castps_si512(share);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(kMagnitudeBits));
    const __m512i at = _mm512_max_epi32(magnitude, _mm512_set1_epi32(map.lowest));
    const __m512i index = _mm512_srl_epi32(at, _mm_cvtsi32_si128(map.shift));
    const __m512i cell = _mm512_i32gather_epi32(index, map.cell - map.first_cell, 4);
    const __m512i low = _mm512_and_si512(at, _mm512_set1_epi32((1 << map.shift) - 1));
    constexpr int kThreshold = CodeMap::kThresholdBits;
    const __m512i threshold = _mm512_and_si512(cell, _mm512_set1_epi32((1 << kThreshold) - 1));
    __m512i level = _mm512_srli_epi32(cell, kThreshold);
    level = _mm512_mask_add_epi32(level, _mm512_cmpgt_epi32_mask(low, threshold), level, _mm512_set1_epi32(1));
    const __mmask16 negative = _mm512_cmpgt_epu32_mask(bits, _mm512_set1_epi32(~kMagnitudeBits));
    __m512i code = _mm512_add_epi32(level, _mm512_set1_epi32(map.zero));
    level = _mm512_min_epi32(_mm512_max_epi32(level, _mm512_set1_epi32(map.least)), _mm512_set1_epi32(map.most));
    level = _mm512_xor_si512(level, _mm512_set1_epi32(map.flip));
    code = _mm512_mask_add_epi32(code, negative, level, _mm512_set1_epi32(map.negative));
    if constexpr (kHalves) {
      const __m512i pair = _mm512_or_si512(_mm512_slli_epi64(code, 4), _mm512_srli_epi64(code, 32));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi64_epi8(pair));
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(code));
    }
  }
  FUSEDSTEP_FN static __m512 load(const float* x) { return _mm512_loadu_ps(x); }
  FUSEDSTEP_FN static void store(float* x, __m512 v) { _mm512_storeu_ps(x, v); }
  FUSEDSTEP_FN static __m512 times(__m512 a, float b) { return _mm512_mul_ps(a, _mm512_set1_ps(b)); }
  FUSEDSTEP_FN static __m512i magnitudes(__m512 x) {
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(kMagnitudeBits));
  }
  // The largest magnitude, as bits, of `count` numbers, a multiple of kSize.
  FUSEDSTEP_FN static int32_t largest(const float* x, int64_t count) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += kSize) most = _mm512_max_epi32(most, magnitudes(load(x + i)));
    return _mm512_reduce_max_epi32(most);
  }
};

#elif defined(__AVX2__)

struct CodeRegister {
  static constexpr int kSize = 8;

  template <bool kHalves>
  FUSEDSTEP_FN static __m256 decode(const CodeMap& map, const uint8_t* codes) {
    __m256i code;
    if constexpr (kHalves) {
      int32_t four = 0;
      std::memcpy(&four, codes, sizeof four);
      const __m128i bytes = _mm_cvtsi32_si128(four);
      const __m256i twice = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
      code = _mm256_and_si256(_mm256_srlv_epi32(twice, _mm256_set1_epi64x(4)), _mm256_set1_epi32(15));
    } else {
      code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    }
    return _mm256_i32gather_ps(map.value, code, 4);
  }
  template <bool kHalves>
  FUSEDSTEP_FN static void encode(const CodeMap& map, __m256 share, uint8_t* codes) {
    const __m256i bits = _mm256_castps_si256(share);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(kMagnitudeBits));
    const __m256i at = _mm256_max_epi32(magnitude, _mm256_set1_epi32(map.lowest));
    const __m256i index = _mm256_srl_epi32(at, _mm_cvtsi32_si128(map.shift));
    const auto* const cells = reinterpret_cast<const int*>(map.cell) - map.first_cell;
    const __m256i cell = _mm256_i32gather_epi32(cells, index, 4);
    const __m256i low = _mm256_and_si256(at, _mm256_set1_epi32((1 << map.shift) - 1));
    constexpr int kThreshold = CodeMap::kThresholdBits;
    const __m256i threshold = _mm256_and_si256(cell, _mm256_set1_epi32((1 << kThreshold) - 1));
    __m256i level = _mm256_srli_epi32(cell, kThreshold);
    level = _mm256_sub_epi32(level, _mm256_cmpgt_epi32(low, threshold));  // true is -1
    // The sign bit decides; that of zero counts for nothing.
    const __m256i negative = _mm256_and_si256(bits, _mm256_cmpgt_epi32(magnitude, _mm256_setzero_si256()));
    const __m256i positive_code = _mm256_add_epi32(level, _mm256_set1_epi32(map.zero));
    level = _mm256_min_epi32(_mm256_max_epi32(level, _mm256_set1_epi32(map.least)), _mm256_set1_epi32(map.most));
    level = _mm256_xor_si256(level, _mm256_set1_epi32(map.flip));
    const __m256i negative_code = _mm256_add_epi32(level, _mm256_set1_epi32(map.negative));
    const __m256i code = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(positive_code),
                                                              _mm256_castsi256_ps(negative_code),
                                                              _mm256_castsi256_ps(negative)));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    const __m128i bytes = _mm_packus_epi16(words, words);
    if constexpr (kHalves) {
      const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x0110));
      const int32_t four = _mm_cvtsi128_si32(_mm_packus_epi16(pairs, pairs));
      std::memcpy(codes, &four, sizeof four);
    } else {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), bytes);
    }
  }
  FUSEDSTEP_FN static __m256 load(const float* x) { return _mm256_loadu_ps(x); }
  FUSEDSTEP_FN static void store(float* x, __m256 v) { _mm256_storeu_ps(x, v); }
  FUSEDSTEP_FN static __m256 times(__m256 a, float b) { return _mm256_mul_ps(a, _mm256_set1_ps(b)); }
  FUSEDSTEP_FN static int32_t largest(const float* x, int64_t count) {
    __m256i most = _mm256_setzero_si256();
    const __m256i magnitude = _mm256_set1_epi32(kMagnitudeBits);
    for (int64_t i = 0; i < count; i += kSize) {
      most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(load(x + i)), magnitude));
    }
    alignas(32) int32_t lanes[kSize];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), most);
    return *std::max_element(lanes, lanes + kSize);
  }
};

#else

// One element: a table is looked up by scalar loads anyway.
struct CodeRegister {
  static constexpr int kSize = 0;
};

#endif

template <bool kHalves, class Register = CodeRegister>
void decode_block(const CodeMap& map, const uint8_t* codes, float absmax, int64_t count, float* to) {
  const float scale = absmax / map.top;
  int64_t i = 0;
  if constexpr (Register::kSize != 0) {
    constexpr int kSize = Register::kSize;
    for (; i + kSize <= count; i += kSize) {
      const uint8_t* const at = codes + (kHalves ? i / 2 : i);
      Register::store(to + i, Register::times(Register::template decode<kHalves>(map, at), scale));
    }
  }
  for (; i < count; ++i) to[i] = map.value[code_at(codes, kHalves, i)] * scale;
}

template <bool kHalves, class Register = CodeRegister>
void encode_block(const CodeMap& map, const float* from, int64_t count, uint8_t* codes, float& absmax) {
  int64_t whole = 0;
  int32_t largest = 0;
  if constexpr (Register::kSize != 0) {
    whole = count - count % Register::kSize;
    largest = Register::largest(from, whole);
  }
  for (int64_t i = whole; i < count; ++i) largest = std::max(largest, bits_of(from[i]) & kMagnitudeBits);
  const BlockScale scale = scale_of(largest, map.top);
  absmax = scale.absmax;
  if (scale.inverse == 0) {
    std::memset(codes, zero_byte(map), map.bytes_of(count));
    return;
  }
  int64_t i = 0;
  if constexpr (Register::kSize != 0) {
    for (; i < whole; i += Register::kSize) {
      const auto share = Register::times(Register::load(from + i), scale.inverse);
      Register::template encode<kHalves>(map, share, codes + (kHalves ? i / 2 : i));
    }
  }
  for (; i < count; ++i) {
    const auto code = static_cast<uint8_t>(code_of(map, from[i] * scale.inverse));
    if constexpr (kHalves) {
      uint8_t& byte = codes[i / 2];
      byte = i % 2 == 0 ? static_cast<uint8_t>(code << 4) : static_cast<uint8_t>(byte | code);
    } else {
      codes[i] = code;
    }
  }
}

// Elements [begin, begin + count) of a state, which begin with a block, to numbers; and from numbers.
inline void decode(const CodedState& state, const void* codes, int64_t begin, int64_t count, float* to) {
  const CodeMap& map = *state.map;
  const bool halves = map.storage == Storage::kInt4;
  const auto* const bytes = static_cast<const uint8_t*>(codes);
  for (int64_t i = 0; i < count; i += map.block) {
    const uint8_t* const at = bytes + map.bytes_of(begin + i);
    const float absmax = state.absmax[(begin + i) / map.block];
    const int64_t size = std::min<int64_t>(map.block, count - i);
    halves ? decode_block<true>(map, at, absmax, size, to + i) : decode_block<false>(map, at, absmax, size, to + i);
  }
}
inline void encode(const CodedState& state, const float* from, int64_t begin, int64_t count, void* codes) {
  const CodeMap& map = *state.map;
  const bool halves = map.storage == Storage::kInt4;
  auto* const bytes = static_cast<uint8_t*>(codes);
  for (int64_t i = 0; i < count; i += map.block) {
    uint8_t* const at = bytes + map.bytes_of(begin + i);
    float& absmax = state.absmax[(begin + i) / map.block];
    const int64_t size = std::min<int64_t>(map.block, count - i);
    halves ? encode_block<true>(map, from + i, size, at, absmax)
           : encode_block<false>(map, from + i, size, at, absmax);
  }
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
