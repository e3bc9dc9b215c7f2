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
  for (int64_t i = square.i; i < square.i + square.rows; ++i) {
    for (int64_t j = square.j; j < square.j + square.columns; ++j) {
      const int64_t row = i * kBlockSide, column = j * kBlockSide;
      const Extent has{std::min(from.rows - row, kBlockSide), std::min(from.columns - column, kBlockSide)};
      Block found[2];
      load_parts(from.data + row * from.stride + column, from.stride, has, found[0], found[1]);
      for (int part = 0; part < packing.parts; ++part) {
        PackedForms forms;
        forms.*form = packing.to + part * packing.rows * packing.columns * kBlockNumbers;
        write_forms(found[part], forms, packing.rows, packing.columns, 0, i, j);
      }
    }
  }
}

// A packed operand with `blocks` blocks along a side of the result, of which a part begins with block
// `first`, and `depth` blocks that sums run over, from block `k` on.
struct WidePanels {
  const BFloat16Bits* packed;
  int64_t blocks, depth, first, k;

  Panel of(int64_t part, int64_t block) const {
    const int64_t tile = part * blocks * depth * 2 + (first + block) * 2 * depth + k;
    return {packed + tile * kTileNumbers, depth * kTileNumbers};
  }
};

// What a part of a product reads of the operand that is not packed before.
struct alignas(64) WideBuffer {
  BFloat16Bits of[2 * kMostWideBlocks * kWideDepth * kBlockNumbers];
};

// Packs `some` blocks of the depth, from block k on, of that operand's `blocks` blocks from block `first` on.
inline WidePanels pack_other(const WideProduct& product, int64_t first, int64_t blocks, int64_t k,
                             int64_t some, WideBuffer& to) {
  WidePacking packing;
  packing.is_left = !product.left_is_packed();
  packing.from = packing.is_left ? product.left() : product.right();
  packing.parts = product.parts;
  packing.to = to.of;
  WideMatrix& from = packing.from;
  const bool is_deep_by_rows = packing.is_left == from.is_transposed;
  const int64_t row = (is_deep_by_rows ? k : first) * kBlockSide;
  const int64_t column = (is_deep_by_rows ? first : k) * kBlockSide;
  from.data += row * from.stride + column;
  from.rows -= row;
  from.columns -= column;
  packing.rows = is_deep_by_rows ? some : blocks;
  packing.columns = is_deep_by_rows ? blocks : some;
  pack_wide(packing, {0, 0, 0, packing.rows, packing.columns});
  return {to.of, blocks, some, 0, 0};
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

inline void multiply_wide(const WideProduct& product, const Square& square) {
  WideBuffer buffer;
  // Of a product that is not deep, sums are finished one after another.
  alignas(64) float sums[kMostWideSums][kBlockNumbers];
  const bool is_deep = product.depth > kWideDepth, left_is_packed = product.left_is_packed();
  for (int64_t k = 0; k < product.depth; k += kWideDepth) {
    const int64_t some = std::min(kWideDepth, product.depth - k);
    const WidePanels before{product.packed, left_is_packed ? product.rows : product.columns, product.depth,
                            left_is_packed ? square.i : square.j, k};
    const WidePanels other = left_is_packed ? pack_other(product, square.j, square.columns, k, some, buffer)
                                            : pack_other(product, square.i, square.rows, k, some, buffer);
    const WidePanels &left = left_is_packed ? before : other, &right = left_is_packed ? other : before;
    for (int64_t r = 0; r < square.rows; ++r) {
      for (int64_t c = 0; c < square.columns; ++c) {
        float* const sum = sums[is_deep ? r * square.columns + c : 0];
        const Factors large{left.of(0, r), right.of(0, c)};
        if (product.parts == 1) {
          add_products({large}, some, k == 0, sum);
        } else {
          const Panel small_left = left.of(1, r), small_right = right.of(1, c);
          add_products({large, {large.left, small_right}, {small_left, large.right}}, some, k == 0, sum);
        }
        if (k + some == product.depth) finish_wide(product.of, sum, square.i + r, square.j + c);
      }
    }
  }
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
