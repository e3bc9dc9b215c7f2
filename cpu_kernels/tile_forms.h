// Blocks of 32 x 32 numbers in bfloat16: how they are rounded, packed and unpacked.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "cpu_kernels/products.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// A block by rows: two tiles of a left operand.
struct alignas(64) Block {
  BFloat16Bits at[kBlockSide][kBlockSide];
};

// The part of a matrix that a block has.
struct Extent {
  int64_t rows, columns;
};

inline Extent extent_of(const PlainMatrices& matrices, int64_t i, int64_t j) {
  return {std::clamp(matrices.rows - i * kBlockSide, int64_t{0}, kBlockSide),
          std::clamp(matrices.columns - j * kBlockSide, int64_t{0}, kBlockSide)};
}

inline BFloat16Bits* block_of(const PlainMatrices& matrices, int64_t matrix, int64_t i, int64_t j) {
  return matrices.data + (matrix * matrices.rows + i * kBlockSide) * matrices.columns + j * kBlockSide;
}

// A block is fetched from memory so many blocks before it is packed.
inline constexpr int64_t kBlocksAhead = 4;

// Fetches a block of a matrix by rows into the second-level cache: the hardware's prefetchers do not follow
// so many short rows. GCC removes calls of a function that does nothing else, so that it is inlined first.
template <class T>
__attribute__((always_inline)) inline void prefetch_block(const T* from, int64_t stride, int64_t rows) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t r = 0; r < rows; ++r, from += stride) {
    for (int64_t at = 0; at < kBlockSide; at += kLine) __builtin_prefetch(from + at, 0, 2);
  }
}

// Calls fetch(i, j) and, some blocks later, pack(i, j) for each block of a square. As prefetch_block, `fetch`
// has to be inlined first.
template <class Fetch, class Pack>
inline void pack_ahead(const Square& square, Fetch fetch, Pack pack) {
  const int64_t count = square.rows * square.columns;
  for (int64_t block = -kBlocksAhead; block < count; ++block) {
    const int64_t ahead = block + kBlocksAhead;
    if (ahead < count) fetch(square.i + ahead / square.columns, square.j + ahead % square.columns);
    if (block >= 0) pack(square.i + block / square.columns, square.j + block % square.columns);
  }
}

inline float widened(BFloat16Bits x) { return std::bit_cast<float>(uint32_t{x} << 16); }

#if defined(__AVX512BF16__)

// The instruction rounds to nearest even in every mode, and takes numbers below 2^-126 for zero, as that of
// the products does.
inline BFloat16Bits rounded(float x) {
  const __m128bh pair = _mm_cvtneps_pbh(_mm_set_ss(x));
  return static_cast<BFloat16Bits>(_mm_cvtsi128_si32(reinterpret_cast<__m128i>(pair)));
}

inline void load_block(const PlainMatrices& from, int64_t matrix, int64_t i, int64_t j, Block& to) {
  const Extent has = extent_of(from, i, j);
  const BFloat16Bits* row = block_of(from, matrix, i, j);
  const auto columns = static_cast<__mmask32>((uint64_t{1} << has.columns) - 1);
  for (int64_t r = 0; r < kBlockSide; ++r, row += from.columns) {
    const __mmask32 some = r < has.rows ? columns : 0;
    _mm512_store_si512(to.at[r], _mm512_maskz_loadu_epi16(some, row));
  }
}

// Takes numbers of a matrix by rows apart: the nearest of bfloat16, and the nearest of what these leave.
inline void load_parts(const float* from, int64_t stride, Extent has, Block& large, Block& small) {
  const auto columns = static_cast<uint32_t>((uint64_t{1} << has.columns) - 1);
  for (int64_t r = 0; r < kBlockSide; ++r, from += stride) {
    const uint32_t some = r < has.rows ? columns : 0;
    const __m512 first = _mm512_maskz_loadu_ps(static_cast<__mmask16>(some), from);
    const __m512 second = _mm512_maskz_loadu_ps(static_cast<__mmask16>(some >> 16), from + kTileSide);
    const auto nearest = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
    _mm512_store_si512(large.at[r], nearest);
    const auto left = [&](const __m512& x, __m256i half) {
      return _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)));
    };
    const __m512 of_first = left(first, _mm512_castsi512_si256(nearest));
    const __m512 of_second = left(second, _mm512_extracti64x4_epi64(nearest, 1));
    _mm512_store_si512(small.at[r], reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(of_second, of_first)));
  }
}

inline void store_block(const Block& from, const PlainMatrices& to, int64_t matrix, int64_t i, int64_t j) {
  const Extent has = extent_of(to, i, j);
  BFloat16Bits* row = block_of(to, matrix, i, j);
  const auto columns = static_cast<__mmask32>((uint64_t{1} << has.columns) - 1);
  for (int64_t r = 0; r < has.rows; ++r, row += to.columns) {
    _mm512_mask_storeu_epi16(row, columns, _mm512_load_si512(from.at[r]));
  }
}

// alpha sums + beta summand, whose rows are the block's.
inline void finish_block(const float* sums, float alpha, float beta, const BFloat16Bits* summand, Block& to) {
  const __m512 alphas = _mm512_set1_ps(alpha), betas = _mm512_set1_ps(beta);
  for (int64_t r = 0; r < kBlockSide; ++r) {
    __m512 halves[2];
    for (int64_t half = 0; half < 2; ++half) {
      __m512 sum = _mm512_load_ps(sums + r * kBlockSide + half * kTileSide);
      sum = _mm512_mul_ps(alphas, sum);
      if (summand != nullptr) {
        const __m256i narrow =
            _mm256_load_si256(reinterpret_cast<const __m256i*>(summand + r * kBlockSide + half * kTileSide));
        const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
        sum = _mm512_fmadd_ps(betas, _mm512_castsi512_ps(wide), sum);
      }
      halves[half] = sum;
    }
    const __m512bh row = _mm512_cvtne2ps_pbh(halves[1], halves[0]);
    _mm512_store_si512(to.at[r], reinterpret_cast<__m512i>(row));
  }
}

inline void copy_tile(const BFloat16Bits* from, BFloat16Bits* to) {
  for (int64_t r = 0; r < kTileSide; ++r) {
    _mm512_store_si512(to + r * kBlockSide, _mm512_load_si512(from + r * kBlockSide));
  }
}

// The right tile of half of a block's columns.
inline void pair_rows(const Block& from, int64_t half, BFloat16Bits* to) {
  alignas(64) static constexpr uint16_t kFirst[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                      37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                      11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i half_of = _mm512_set1_epi16(static_cast<int16_t>(half * kTileSide));
  const __m512i places = _mm512_add_epi16(_mm512_load_si512(kFirst), half_of);
  for (int64_t p = 0; p < kTileSide; ++p) {
    const __m512i even = _mm512_load_si512(from.at[2 * p]), odd = _mm512_load_si512(from.at[2 * p + 1]);
    _mm512_store_si512(to + p * kBlockSide, _mm512_permutex2var_epi16(even, places, odd));
  }
}

// Transposes a tile as 16 x 16 pairs: a left tile of a matrix becomes a right tile of its transpose, and the
// reverse.
inline void transpose_pairs(const BFloat16Bits* from, BFloat16Bits* to) {
  for (int64_t q = 0; q < 4; ++q) {
    // Lane l of rows[r]: pairs 4 q to 4 q + 3 of row r + 4 l.
    __m512i rows[4];
    for (int64_t r = 0; r < 4; ++r) {
      const auto part = [&](int64_t l) {
        return _mm_load_si128(reinterpret_cast<const __m128i*>(from + (r + 4 * l) * kBlockSide + q * 8));
      };
      __m512i row = _mm512_castsi128_si512(part(0));
      row = _mm512_inserti32x4(row, part(1), 1);
      row = _mm512_inserti32x4(row, part(2), 2);
      rows[r] = _mm512_inserti32x4(row, part(3), 3);
    }
    const __m512i low01 = _mm512_unpacklo_epi32(rows[0], rows[1]);
    const __m512i high01 = _mm512_unpackhi_epi32(rows[0], rows[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(rows[2], rows[3]);
    const __m512i high23 = _mm512_unpackhi_epi32(rows[2], rows[3]);
    BFloat16Bits* row = to + q * 4 * kBlockSide;
    _mm512_store_si512(row, _mm512_unpacklo_epi64(low01, low23));
    _mm512_store_si512(row + kBlockSide, _mm512_unpackhi_epi64(low01, low23));
    _mm512_store_si512(row + 2 * kBlockSide, _mm512_unpacklo_epi64(high01, high23));
    _mm512_store_si512(row + 3 * kBlockSide, _mm512_unpackhi_epi64(high01, high23));
  }
}

#else

// To nearest even; NaN to NaN.
inline BFloat16Bits rounded(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (x != x) return static_cast<BFloat16Bits>(bits >> 16 | 0x40);
  return static_cast<BFloat16Bits>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void load_block(const PlainMatrices& from, int64_t matrix, int64_t i, int64_t j, Block& to) {
  const Extent has = extent_of(from, i, j);
  const BFloat16Bits* row = block_of(from, matrix, i, j);
  std::memset(&to, 0, sizeof to);
  for (int64_t r = 0; r < has.rows; ++r) std::copy_n(row + r * from.columns, has.columns, to.at[r]);
}

inline void load_parts(const float* from, int64_t stride, Extent has, Block& large, Block& small) {
  std::memset(&large, 0, sizeof large);
  std::memset(&small, 0, sizeof small);
  for (int64_t r = 0; r < has.rows; ++r) {
    for (int64_t c = 0; c < has.columns; ++c) {
      const float x = from[r * stride + c];
      large.at[r][c] = rounded(x);
      small.at[r][c] = rounded(x - widened(large.at[r][c]));
    }
  }
}

inline void store_block(const Block& from, const PlainMatrices& to, int64_t matrix, int64_t i, int64_t j) {
  const Extent has = extent_of(to, i, j);
  BFloat16Bits* row = block_of(to, matrix, i, j);
  for (int64_t r = 0; r < has.rows; ++r) std::copy_n(from.at[r], has.columns, row + r * to.columns);
}

inline void finish_block(const float* sums, float alpha, float beta, const BFloat16Bits* summand, Block& to) {
  for (int64_t r = 0; r < kBlockSide; ++r) {
    for (int64_t c = 0; c < kBlockSide; ++c) {
      float sum = alpha * sums[r * kBlockSide + c];
      if (summand != nullptr) sum = __builtin_fmaf(beta, widened(summand[r * kBlockSide + c]), sum);
      to.at[r][c] = rounded(sum);
    }
  }
}

inline void copy_tile(const BFloat16Bits* from, BFloat16Bits* to) { std::copy_n(from, kTileNumbers, to); }

inline void pair_rows(const Block& from, int64_t half, BFloat16Bits* to) {
  for (int64_t r = 0; r < kBlockSide; ++r) {
    for (int64_t c = 0; c < kTileSide; ++c) {
      to[r / 2 * kBlockSide + 2 * c + r % 2] = from.at[r][half * kTileSide + c];
    }
  }
}

inline void transpose_pairs(const BFloat16Bits* from, BFloat16Bits* to) {
  for (int64_t r = 0; r < kTileSide; ++r) {
    for (int64_t p = 0; p < kTileSide; ++p)
      std::copy_n(from + r * kBlockSide + 2 * p, 2, to + p * kBlockSide + 2 * r);
  }
}

#endif

// The tile at (index, k) of packed matrices that have `depth` tiles in a row.
inline BFloat16Bits* tile_at(BFloat16Bits* packed, int64_t depth, int64_t index, int64_t k) {
  return packed + (index * depth + k) * kTileNumbers;
}

// Writes the block (i, j) of the matrices, which have so many blocks by so many, in all forms.
inline void write_forms(const Block& block, const PackedForms& to, int64_t rows, int64_t columns,
                        int64_t matrix, int64_t i, int64_t j) {
  const int64_t before = matrix * rows * columns * kBlockNumbers;
  for (int64_t half = 0; half < 2; ++half) {
    const BFloat16Bits* left = block.at[half * kTileSide];
    const int64_t row = 2 * i + half, column = 2 * j + half;
    if (to.left != nullptr) copy_tile(left, tile_at(to.left + before, columns, row, j));
    if (to.transposed_right != nullptr) {
      transpose_pairs(left, tile_at(to.transposed_right + before, columns, row, j));
    }
    if (to.right == nullptr && to.transposed_left == nullptr) continue;
    alignas(64) BFloat16Bits right[kTileNumbers];
    pair_rows(block, half, right);
    if (to.right != nullptr) copy_tile(right, tile_at(to.right + before, rows, column, i));
    if (to.transposed_left != nullptr) {
      transpose_pairs(right, tile_at(to.transposed_left + before, rows, column, i));
    }
  }
}

// The block's transpose.
inline void transpose(const Block& from, Block& to) {
  for (int64_t half = 0; half < 2; ++half) {
    alignas(64) BFloat16Bits right[kTileNumbers];
    pair_rows(from, half, right);
    transpose_pairs(right, to.at[half * kTileSide]);
  }
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
