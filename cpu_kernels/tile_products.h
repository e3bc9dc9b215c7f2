// The product of 32 rows of packed tiles and 32 columns of them, summed in float32: by AMX, by AVX-512's dot
// products of pairs, or by plain code.
#pragma once
#include <cstdint>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "cpu_kernels/tile_forms.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// Two rows of tiles of an operand: from the first to the second are `stride` numbers.
struct Panel {
  const BFloat16Bits* tiles;
  int64_t stride;
};

// Two operands whose products are added up.
struct Factors {
  Panel left, right;
};

// A block adds up the products of so many tiles before the next block of the square begins. The two blocks
// share a panel, which is still in the first-level cache then, even where two threads share a core.
#if defined(__AMX_BF16__)
inline constexpr int64_t kDepthAtOnce = 4;
inline constexpr bool kOutrunsFloat = true;
#else
inline constexpr int64_t kDepthAtOnce = 8;
inline constexpr bool kOutrunsFloat = false;
#endif

#if defined(__AMX_BF16__)

// All eight registers are tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);
inline constexpr TileConfig kTileConfig;

inline void begin_products() { _tile_loadconfig(&kTileConfig); }
inline void end_products() { _tile_release(); }

// Adds the products of `depth` tiles of all factors, one after another, to `sums`, or sets them to these if
// they are the `first`. Four tiles of sums stay in registers: each tile of an operand is loaded once for two
// products.
template <int64_t kCount>
inline void add_products(const Factors (&factors)[kCount], int64_t depth, bool first, float* sums) {
  constexpr int64_t kRowBytes = kBlockSide * static_cast<int64_t>(sizeof(float));
  constexpr int64_t kTileBytes = kBlockSide * static_cast<int64_t>(sizeof(BFloat16Bits));
  float *top = sums, *bottom = sums + kTileSide * kBlockSide;
  asm volatile("" ::: "memory");  // the intrinsics do not tell the compiler what they read
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, top, kRowBytes);
    _tile_loadd(1, top + kTileSide, kRowBytes);
    _tile_loadd(2, bottom, kRowBytes);
    _tile_loadd(3, bottom + kTileSide, kRowBytes);
  }
  for (const auto& [left, right] : factors) {
    const BFloat16Bits *left_end = left.tiles + depth * kTileNumbers, *a = left.tiles, *b = right.tiles;
    for (; a != left_end; a += kTileNumbers, b += kTileNumbers) {
      _tile_loadd(4, a, kTileBytes);
      _tile_loadd(6, b, kTileBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + right.stride, kTileBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + left.stride, kTileBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, top, kRowBytes);
  _tile_stored(1, top + kTileSide, kRowBytes);
  _tile_stored(2, bottom, kRowBytes);
  _tile_stored(3, bottom + kTileSide, kRowBytes);
}

#elif defined(__AVX512BF16__)

inline void begin_products() {}
inline void end_products() {}

// Sums of so many rows stay in registers.
inline constexpr int64_t kRowsAtOnce = 8;

template <int64_t kCount>
inline void add_products(const Factors (&factors)[kCount], int64_t depth, bool first, float* sums) {
  for (int64_t row = 0; row < kBlockSide; row += kRowsAtOnce) {
    float* of_rows = sums + row * kBlockSide;
    __m512 sum[kRowsAtOnce][2];
    for (int64_t r = 0; r < kRowsAtOnce; ++r) {
      for (int64_t half = 0; half < 2; ++half) {
        sum[r][half] =
            first ? _mm512_setzero_ps() : _mm512_load_ps(of_rows + r * kBlockSide + half * kTileSide);
      }
    }
    for (const auto& [left, right] : factors) {
      const BFloat16Bits* a = left.tiles + row / kTileSide * left.stride + row % kTileSide * kBlockSide;
      const BFloat16Bits *b = right.tiles, *end = a + depth * kTileNumbers;
      for (; a != end; a += kTileNumbers, b += kTileNumbers) {
        for (int64_t p = 0; p < kTileSide; ++p) {
          const BFloat16Bits* pairs = b + p * kBlockSide;
          const auto first_half = reinterpret_cast<__m512bh>(_mm512_load_si512(pairs));
          const auto second_half = reinterpret_cast<__m512bh>(_mm512_load_si512(pairs + right.stride));
#pragma GCC unroll 8
          for (int64_t r = 0; r < kRowsAtOnce; ++r) {
            int32_t pair;
            __builtin_memcpy(&pair, a + r * kBlockSide + 2 * p, sizeof pair);
            const auto factor = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], factor, first_half);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], factor, second_half);
          }
        }
      }
    }
    for (int64_t r = 0; r < kRowsAtOnce; ++r) {
      for (int64_t half = 0; half < 2; ++half) {
        _mm512_store_ps(of_rows + r * kBlockSide + half * kTileSide, sum[r][half]);
      }
    }
  }
}

#else

inline void begin_products() {}
inline void end_products() {}

template <int64_t kCount>
inline void add_products(const Factors (&factors)[kCount], int64_t depth, bool first, float* sums) {
  if (first) std::fill_n(sums, kBlockNumbers, 0.0f);
  for (const auto& [left, right] : factors) {
    for (int64_t row = 0; row < kBlockSide; ++row) {
      const BFloat16Bits* a = left.tiles + row / kTileSide * left.stride + row % kTileSide * kBlockSide;
      float* of_row = sums + row * kBlockSide;
      for (int64_t k = 0; k < depth * kBlockSide; ++k) {
        const float factor = widened(a[k / kBlockSide * kTileNumbers + k % kBlockSide]);
        const int64_t pair = k / kBlockSide * kTileNumbers + k % kBlockSide / 2 * kBlockSide + k % 2;
        for (int64_t c = 0; c < kBlockSide; ++c) {
          const float other = widened(right.tiles[pair + c / kTileSide * right.stride + c % kTileSide * 2]);
          of_row[c] += factor * other;  // the product is exact
        }
      }
    }
  }
}

#endif

inline void add_products(Panel left, Panel right, int64_t depth, bool first, float* sums) {
  add_products({{left, right}}, depth, first, sums);
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
