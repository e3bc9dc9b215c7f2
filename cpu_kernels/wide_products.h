// Products of float32 matrices by their parts in bfloat16. The operand along the shorter side of a result is
// packed before. A part of a product packs what it reads of the other operand as it goes: to pack numbers
// costs as much as to multiply them, and one part alone reads them where the shorter side is not too long.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu_kernels/tile_forms.h"
#include "cpu_kernels/tile_products.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

inline void pack_wide(const WidePacking& packing, const Square& square) {
  const WideMatrix& from = packing.from;
  BFloat16Bits* PackedForms::*const plain = packing.is_left ? &PackedForms::left : &PackedForms::right;
  BFloat16Bits* PackedForms::*const transposed =
      packing.is_left ? &PackedForms::transposed_left : &PackedForms::transposed_right;
  BFloat16Bits* PackedForms::*const form = from.is_transposed ? transposed : plain;
  const auto at = [&](int64_t i, int64_t j) {
    return from.data + i * kBlockSide * from.stride + j * kBlockSide;
  };
  const auto fetch = [&](int64_t i, int64_t j) __attribute__((always_inline)) {
    prefetch_block(at(i, j), from.stride, std::min(from.rows - i * kBlockSide, kBlockSide));
  };
  pack_ahead(square, fetch, [&](int64_t i, int64_t j) {
    const Extent has{std::min(from.rows - i * kBlockSide, kBlockSide),
                     std::min(from.columns - j * kBlockSide, kBlockSide)};
    Block found[2];
    load_parts(at(i, j), from.stride, has, found[0], found[1]);
    for (int part = 0; part < packing.parts; ++part) {
      PackedForms forms;
      forms.*form = packing.to + part * packing.rows * packing.columns * kBlockNumbers;
      write_forms(found[part], forms, packing.rows, packing.columns, 0, i, j);
    }
  });
}

// A packed operand with `blocks` blocks along a side of the result, and `depth` blocks that sums run over.
// Block 0 of a part of the product is its block `first`, and its block `k` of the depth.
struct WidePanels {
  const BFloat16Bits* packed;
  int64_t blocks, depth, first, k;

  Panel of(int64_t part, int64_t block) const {
    const int64_t tile = part * blocks * depth * 2 + (first + block) * 2 * depth + k;
    return {packed + tile * kTileNumbers, depth * kTileNumbers};
  }
};

// What a part of a product packs at a time of the operand that is not packed before: 12 blocks along the rows
// of its matrix in memory, so that much of a row is read at once, and four down the columns.
struct alignas(64) WideBuffer {
  BFloat16Bits of[2 * kMostWideBlocks * kWideDepth * kBlockNumbers];
};

// Packs blocks of a matrix as if there were no others.
inline void pack_alone(WidePacking packing, const Square& blocks) {
  WideMatrix& from = packing.from;
  const int64_t row = blocks.i * kBlockSide, column = blocks.j * kBlockSide;
  from.data += row * from.stride + column;
  from.rows -= row;
  from.columns -= column;
  packing.rows = blocks.rows;
  packing.columns = blocks.columns;
  pack_wide(packing, {0, 0, 0, blocks.rows, blocks.columns});
}

// Writes the sums of the block (i, j) of a result.
inline void finish_wide(const LowRankProduct& product, const float* sums, int64_t i, int64_t j) {
  const int64_t row = i * kBlockSide, column = j * kBlockSide;
  const int64_t rows = std::min(product.rows - row, kBlockSide);
  const int64_t columns = std::min(product.columns - column, kBlockSide);
  const float alpha = product.alpha, beta = product.beta;
  for (int64_t r = 0; r < rows; ++r) {
    float* __restrict const to = product.c + (row + r) * product.c_stride + column;
    const float* __restrict const sum = sums + r * kBlockSide;
    if (beta == 0) {
      for (int64_t c = 0; c < columns; ++c) to[c] = alpha * sum[c];
    } else {
      for (int64_t c = 0; c < columns; ++c) to[c] = __builtin_fmaf(beta, to[c], alpha * sum[c]);
    }
  }
}

// The place of panels in a product: `blocks` of its square, and `tiles` of its depth from block `at` on.
struct WidePlace {
  Square blocks;
  int64_t at, tiles;
};

// Adds the products of panels to the sums of a square, and finishes sums with the last.
inline void add_panels(const WideProduct& product, const Square& square, const WidePlace& place,
                       const WidePanels& left, const WidePanels& right, float (*sums)[kBlockNumbers]) {
  const auto& [blocks, at, tiles] = place;
  // Of a product that is not deep, sums are finished one after another.
  const bool is_deep = product.depth > kWideDepth, is_last = at + tiles == product.depth;
  for (int64_t r = blocks.i; r < blocks.i + blocks.rows; ++r) {
    for (int64_t c = blocks.j; c < blocks.j + blocks.columns; ++c) {
      float* const sum = sums[is_deep ? r * square.columns + c : 0];
      const Factors large{left.of(0, r), right.of(0, c)};
      if (product.parts == 1) {
        add_products({large}, tiles, at == 0, sum);
      } else {
        const Panel small_left = left.of(1, r), small_right = right.of(1, c);
        add_products({large, {large.left, small_right}, {small_left, large.right}}, tiles, at == 0, sum);
      }
      if (is_last) finish_wide(product.of, sum, square.i + r, square.j + c);
    }
  }
}

inline void multiply_wide(const WideProduct& product, const Square& square) {
  WideBuffer buffer;
  alignas(64) float sums[kMostWideSums][kBlockNumbers];
  const bool left_is_packed = product.left_is_packed();
  WidePacking other;
  other.is_left = !left_is_packed;
  other.from = left_is_packed ? product.right() : product.left();
  other.parts = product.parts;
  other.to = buffer.of;
  const bool is_deep_by_rows = other.is_left == other.from.is_transposed;
  const int64_t deep = is_deep_by_rows ? kWideDepth : kMostWideBlocks;
  const int64_t high = is_deep_by_rows ? kMostWideBlocks : kWideDepth;
  const int64_t side = left_is_packed ? square.columns : square.rows;
  const int64_t begin = left_is_packed ? square.j : square.i;
  for (int64_t from = 0; from < product.depth; from += deep) {
    const int64_t depth = std::min(deep, product.depth - from);
    for (int64_t first = 0; first < side; first += high) {
      const int64_t some = std::min(high, side - first);
      pack_alone(other, is_deep_by_rows ? Square{0, from, begin + first, depth, some}
                                        : Square{0, begin + first, from, some, depth});
      WidePlace place{};
      place.blocks =
          left_is_packed ? Square{0, 0, first, square.rows, some} : Square{0, first, 0, some, square.columns};
      for (int64_t k = 0; k < depth; k += kWideDepth) {
        place.at = from + k;
        place.tiles = std::min(kWideDepth, depth - k);
        const WidePanels before{product.packed, left_is_packed ? product.rows : product.columns,
                                product.depth, left_is_packed ? square.i : square.j, place.at};
        const WidePanels now{buffer.of, some, depth, -first, k};
        add_panels(product, square, place, left_is_packed ? before : now, left_is_packed ? now : before,
                   sums);
      }
    }
  }
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
