// Copies blocks of strided arrays to tiles, in which their rows lie one behind another, and back.
#pragma once
#include <ATen/cpu/vec/vec.h>

#include <cstdint>

#include "fusedstep/vocabulary.h"
#include "src/core/walk.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

using Tile = char[kTileElements * sizeof(double)];

// Prefetch distance, in blocks, of operands that lie in columns: into the second-level cache.
constexpr int64_t kBlocksAhead = 2;

// Prefetch distance, in words, of a copy that takes every second word.
constexpr int64_t kWordsAhead = 1024;

// Transposes 16 by 16 words: ATen's shuffles, which move bits and compute nothing. Flattened, so that its
// checks of constant arguments fold away with the reference to torch that they would bring.
__attribute__((flatten)) inline void transpose_16x16(const uint32_t* from, int64_t from_stride, uint32_t* to,
                                                     int64_t to_stride) {
  at::vec::transpose_mxn<float, 16, 16>(reinterpret_cast<const float*>(from), from_stride,
                                        reinterpret_cast<float*>(to), to_stride);
}

// The same for 32 halves of each of 16 columns, to rows: two by two, as words, which are then taken apart.
// `from_stride` is even.
#if defined(__AVX512F__)
inline void transpose_32x16(const uint16_t* from, int64_t from_stride, uint16_t* to, int64_t to_stride) {
  alignas(64) uint32_t pairs[16][16];
  transpose_16x16(reinterpret_cast<const uint32_t*>(from), from_stride / 2, pairs[0], 16);
  for (const auto& of_rows : pairs) {
    const __m512i both = _mm512_load_si512(of_rows);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(both));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + to_stride),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
    to += 2 * to_stride;
  }
}
constexpr bool kTransposesHalves = true;
#else
constexpr bool kTransposesHalves = false;
#endif

// `count` words that lie side by side.
template <class Word>
FUSEDSTEP_FN void copy_words(const Word* from, Word* to, int64_t count) {
  int64_t i = 0;
#if defined(__AVX512F__)
  constexpr int64_t kWords = 64 / sizeof(Word);
  for (; i + kWords <= count; i += kWords) _mm512_storeu_si512(to + i, _mm512_loadu_si512(from + i));
  if (const int64_t left = count - i; left > 0) {
    const uint64_t mask = (uint64_t{1} << left) - 1;
    if constexpr (sizeof(Word) == 2) {
      const auto words = static_cast<__mmask32>(mask);
      _mm512_mask_storeu_epi16(to + i, words, _mm512_maskz_loadu_epi16(words, from + i));
    } else if constexpr (sizeof(Word) == 4) {
      const auto words = static_cast<__mmask16>(mask);
      _mm512_mask_storeu_epi32(to + i, words, _mm512_maskz_loadu_epi32(words, from + i));
    } else {
      const auto words = static_cast<__mmask8>(mask);
      _mm512_mask_storeu_epi64(to + i, words, _mm512_maskz_loadu_epi64(words, from + i));
    }
  }
#else
  for (; i < count; ++i) to[i] = from[i];
#endif
}

// Every second word of `array` to or from a tile: as many of `count` as fill registers; returns how many.
// Words in between may be read, not written, and none beyond the last.
template <bool kGather>
FUSEDSTEP_FN int64_t copy_every_second([[maybe_unused]] uint32_t* array, [[maybe_unused]] uint32_t* tile,
                                       [[maybe_unused]] int64_t count) {
  int64_t i = 0;
#if defined(__AVX512F__)
  // Takes 16 words: eight even ones of a register, then eight odd ones of a register that starts at word 15.
  if constexpr (kGather) {
    const __m512i words = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29, 31);
    for (; i + 16 <= count; i += 16) {
      __builtin_prefetch(array + 2 * i + kWordsAhead);
      __builtin_prefetch(array + 2 * i + kWordsAhead + 16);
      const __m512i low = _mm512_loadu_si512(array + 2 * i), high = _mm512_loadu_si512(array + 2 * i + 15);
      _mm512_storeu_si512(tile + i, _mm512_permutex2var_epi32(low, words, high));
    }
  } else {
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i high = _mm512_setr_epi32(8, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15);
    for (; i + 16 <= count; i += 16) {
      const __m512i words = _mm512_loadu_si512(tile + i);
      _mm512_mask_storeu_epi32(array + 2 * i, 0x5555, _mm512_permutexvar_epi32(low, words));
      _mm512_mask_storeu_epi32(array + 2 * i + 15, 0xaaaa, _mm512_permutexvar_epi32(high, words));
    }
  }
#elif defined(__AVX2__)
  if constexpr (kGather) {
    const auto load = [](const uint32_t* from) {
      return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
    };
    for (; i + 8 <= count; i += 8) {
      __builtin_prefetch(array + 2 * i + kWordsAhead);
      // Words 0 2 | 4 6 of the one, 1 3 | 5 7 of the other, which begins with word 7.
      const __m256 low = load(array + 2 * i), high = load(array + 2 * i + 7);
      const __m256 mixed = _mm256_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 2, 0));
      const __m256d ordered = _mm256_permute4x64_pd(_mm256_castps_pd(mixed), _MM_SHUFFLE(3, 1, 2, 0));
      _mm256_storeu_ps(reinterpret_cast<float*>(tile + i), _mm256_castpd_ps(ordered));
    }
  }
#endif
  return i;
}

// `count` words that are `stride` apart, to a tile or from it.
template <bool kGather, class Word>
FUSEDSTEP_FN void copy_line(Word* array, int64_t stride, Word* tile, int64_t count) {
  int64_t i = 0;
  if (stride == 1) return kGather ? copy_words(array, tile, count) : copy_words(tile, array, count);
  if constexpr (sizeof(Word) == 4) {
    if (stride == 2) i = copy_every_second<kGather>(array, tile, count);
  }
  for (; i < count; ++i) {
    if constexpr (kGather) {
      tile[i] = array[i * stride];
    } else {
      array[i * stride] = tile[i];
    }
  }
}

// Copies a block between a strided array and a tile. The inner loop runs along the side that is contiguous in
// the array.
template <class Word, bool kGather>
void copy_block(Word* array, Word* tile, int64_t rows, int64_t columns, int64_t row_stride,
                int64_t column_stride) {
  if (row_stride != 1 || column_stride == 1) {
    for (int64_t r = 0; r < rows; ++r) {
      copy_line<kGather>(array + r * row_stride, column_stride, tile + r * columns, columns);
    }
    return;
  }
  // Copies 16 columns and 64 bytes of each at a time, then the rest word by word.
  constexpr int64_t kRows = 64 / sizeof(Word);
  constexpr bool kHalves = sizeof(Word) == 2 && kGather && kTransposesHalves;
  const bool whole = rows >= kRows && (sizeof(Word) == 4 || (kHalves && column_stride % 2 == 0));
  const int64_t whole_rows = whole ? rows - rows % kRows : 0;
  const int64_t whole_columns = whole ? columns - columns % 16 : 0;
  const auto copy_words_of = [&](int64_t column, int64_t first_row) {
    for (int64_t r = first_row; r < rows; ++r) {
      Word &outside = array[column * column_stride + r], &inside = tile[r * columns + column];
      (kGather ? inside : outside) = kGather ? outside : inside;
    }
  };
  for (int64_t c = 0; c < whole_columns; c += 16) {
    if constexpr (kGather) {
      // Hardware prefetch stops at a page.
      for (int64_t next = 0; next < 16; ++next) {
        const Word* const column = array + (kBlocksAhead * columns + c + next) * column_stride;
        for (int64_t r = 0; r < whole_rows; r += kRows) __builtin_prefetch(column + r, 0, 2);
      }
    }
    for (int64_t r = 0; r < whole_rows; r += kRows) {
      [[maybe_unused]] Word *outside = array + c * column_stride + r, *inside = tile + r * columns + c;
      if constexpr (kHalves) {
        transpose_32x16(outside, column_stride, inside, columns);
      } else if constexpr (sizeof(Word) == 4 && kGather) {
        transpose_16x16(outside, column_stride, inside, columns);
      } else if constexpr (sizeof(Word) == 4) {
        transpose_16x16(inside, columns, outside, column_stride);
      }
    }
    for (int64_t column = c; whole_rows < rows && column < c + 16; ++column) {
      copy_words_of(column, whole_rows);
    }
  }
  for (int64_t c = whole_columns; c < columns; ++c) copy_words_of(c, 0);
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
