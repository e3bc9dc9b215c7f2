// Products of float32 matrices by their parts in bfloat16. A part of a product takes its operands apart and
// packs them as it goes. To pack numbers costs as much as to multiply them, so that parts are large.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu_kernels/tile_forms.h"
#include "cpu_kernels/tile_products.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// The two parts of an operand's numbers.
struct alignas(64) WideParts {
  BFloat16Bits of[2][kMostWideBlocks * kWideDepth * kBlockNumbers];
};

// A matrix in memory by rows.
struct WideMatrix {
  const float* data;
  int64_t stride, rows, columns;
};

// Packs `rows` by `columns` blocks from block (i, j) on in one form: the first parts, or both.
inline void pack_parts(const WideMatrix& from, const Square& blocks, int parts,
                       BFloat16Bits* PackedForms::*form, WideParts& to) {
  for (int64_t r = 0; r < blocks.rows; ++r) {
    for (int64_t c = 0; c < blocks.columns; ++c) {
      const int64_t row = (blocks.i + r) * kBlockSide, column = (blocks.j + c) * kBlockSide;
      const Extent has{std::min(from.rows - row, kBlockSide), std::min(from.columns - column, kBlockSide)};
      Block found[2];
      load_parts(from.data + row * from.stride + column, from.stride, has, found[0], found[1]);
      for (int part = 0; part < parts; ++part) {
        PackedForms forms;
        forms.*form = to.of[part];
        write_forms(found[part], forms, blocks.rows, blocks.columns, 0, r, c);
      }
    }
  }
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
  const LowRankProduct& of = product.of;
  WideParts left, right;
  // Of a product that is not deep, sums are finished one after another.
  alignas(64) float sums[kMostWideSums][kBlockNumbers];
  const bool is_deep = product.depth > kWideDepth;
  for (int64_t k = 0; k < product.depth; k += kWideDepth) {
    const int64_t some = std::min(kWideDepth, product.depth - k);
    if (of.form == ProductForm::kColumnsColumns) {
      pack_parts({of.a, of.a_stride, of.depth, of.rows}, {0, k, square.i, some, square.rows}, product.parts,
                 &PackedForms::transposed_left, left);
    } else {
      pack_parts({of.a, of.a_stride, of.rows, of.depth}, {0, square.i, k, square.rows, some}, product.parts,
                 &PackedForms::left, left);
    }
    if (of.form == ProductForm::kRowsRows) {
      pack_parts({of.b, of.b_stride, of.columns, of.depth}, {0, square.j, k, square.columns, some},
                 product.parts, &PackedForms::transposed_right, right);
    } else {
      pack_parts({of.b, of.b_stride, of.depth, of.columns}, {0, k, square.j, some, square.columns},
                 product.parts, &PackedForms::right, right);
    }
    const auto panel = [&](const BFloat16Bits* packed, int64_t block) {
      return Panel{packed + block * 2 * some * kTileNumbers, some * kTileNumbers};
    };
    for (int64_t r = 0; r < square.rows; ++r) {
      for (int64_t c = 0; c < square.columns; ++c) {
        float* const sum = sums[is_deep ? r * square.columns + c : 0];
        add_products(panel(left.of[0], r), panel(right.of[0], c), some, k == 0, sum);
        if (product.parts == 2) {
          add_products(panel(left.of[0], r), panel(right.of[1], c), some, false, sum);
          add_products(panel(left.of[1], r), panel(right.of[0], c), some, false, sum);
        }
        if (k + some == product.depth) finish_wide(of, sum, square.i + r, square.j + c);
      }
    }
  }
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
