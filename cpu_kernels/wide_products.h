// Products of float32 matrices by their parts in bfloat16. A square takes its operands apart and packs them
// as it goes: they are long in one direction alone, so that few squares read the same numbers.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu_kernels/tile_forms.h"
#include "cpu_kernels/tile_products.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// Blocks that the sums of a square go deep at a time: what is packed of them stays in the second-level cache.
inline constexpr int64_t kWideDepth = 4;

// The two parts of an operand of a square.
struct alignas(64) WideParts {
  BFloat16Bits of[2][kMostSquareBlocks * kWideDepth * kBlockNumbers];
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
  for (int64_t r = 0; r < rows; ++r) {
    float* const to = product.c + (row + r) * product.c_stride + column;
    const float* const sum = sums + r * kBlockSide;
    if (product.beta == 0) {
      for (int64_t c = 0; c < columns; ++c) to[c] = product.alpha * sum[c];
    } else {
      for (int64_t c = 0; c < columns; ++c) {
        to[c] = __builtin_fmaf(product.beta, to[c], product.alpha * sum[c]);
      }
    }
  }
}

inline void multiply_wide(const WideProduct& product, const Square& square) {
  const LowRankProduct& of = product.of;
  WideParts left, right;
  alignas(64) float sums[kMostSquareBlocks][kMostSquareBlocks][kBlockNumbers];
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
        add_products(panel(left.of[0], r), panel(right.of[0], c), some, k == 0, sums[r][c]);
        if (product.parts == 1) continue;
        add_products(panel(left.of[0], r), panel(right.of[1], c), some, false, sums[r][c]);
        add_products(panel(left.of[1], r), panel(right.of[0], c), some, false, sums[r][c]);
      }
    }
  }
  for (int64_t r = 0; r < square.rows; ++r) {
    for (int64_t c = 0; c < square.columns; ++c) finish_wide(of, sums[r][c], square.i + r, square.j + c);
  }
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
