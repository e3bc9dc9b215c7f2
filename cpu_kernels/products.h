// Products of bfloat16 matrices that stay packed from product to product: what is compiled once for each
// instruction set, behind a table of functions. Raw pointers and PODs only.
//
// A matrix is padded with zeros to blocks of 32 x 32, and packed as a left or a right operand in tiles of
// 16 x 32 numbers, one kilobyte:
//
//   left    tile (r, k): rows 16 r and on, columns 32 k and on, by rows
//   right   tile (c, k): columns 16 c and on, rows 32 k and on; a pair of rows after the other, and in it the
//           two numbers of each column side by side
//
// Tiles that a sum runs over lie one behind the other. The matrices of a batch lie one behind the other.
#pragma once
#include <cstdint>

#include "src/core/low_rank_product.h"

namespace fusedstep::cpu {

using BFloat16Bits = uint16_t;

inline constexpr int64_t kTileSide = 16;  // rows of a left tile, columns of a right tile
inline constexpr int64_t kBlockSide = 32;
inline constexpr int64_t kTileNumbers = kTileSide * kBlockSide, kBlockNumbers = kBlockSide * kBlockSide;

// The most blocks along a side of a square.
inline constexpr int64_t kMostSquareBlocks = 4;

// The most blocks along the longer side of a part of a wide product, and in one that is deeper than
// kWideDepth blocks: what a part packs, and its sums, stay in the second-level cache.
inline constexpr int64_t kMostWideBlocks = 12, kMostWideSums = 48, kWideDepth = 4;

// Matrices by rows without a gap, [matrices][rows][columns]. Null if there are none.
struct PlainMatrices {
  BFloat16Bits* data = nullptr;
  int64_t rows = 0, columns = 0;
};

// Where packed matrices, or their transposes, are written. Null: not at all.
struct PackedForms {
  BFloat16Bits *left = nullptr, *right = nullptr;
  BFloat16Bits *transposed_left = nullptr, *transposed_right = nullptr;
};

// Packs matrices that have so many blocks by so many.
struct Packing {
  int64_t rows = 0, columns = 0;
  PlainMatrices from;
  PackedForms to;
};

// result = alpha left right + beta summand, rounded once, of matrices whose sides are given in blocks.
struct Product {
  int64_t rows = 0, columns = 0, depth = 0;
  const BFloat16Bits *left = nullptr, *right = nullptr;
  float alpha = 1, beta = 0;
  const BFloat16Bits* summand = nullptr;  // as a left operand; it may be where the result is written as one
  // The result is symmetric, and is written to to.left and to.right alone. Blocks above the diagonal are
  // copies of those below.
  bool is_symmetric = false;
  PackedForms to;
  // The result as a left operand, with a number added to its diagonal and rounded once more: what is added
  // has the errors of the result, so that they cancel where both are factors of one product.
  BFloat16Bits* shifted_left = nullptr;
  float shift = 0;
  PlainMatrices plain;
  bool plain_is_transposed = false;
};

// The factors 1 / sqrt(max(sum_j |A_ij|, least)) of symmetric matrices, a number for each row with its
// padding. The rows' sides are given in blocks; `columns` is 1: a part has whole rows.
struct RowFactors {
  int64_t rows = 0, columns = 1;
  const BFloat16Bits* left = nullptr;
  float* to = nullptr;
  float least = 0;
};

// A block of a square matrix, times the factors of its columns, or of its rows and columns, rounded once. It
// is read as a left operand, and may be written where it is read.
struct Scaling {
  int64_t rows = 0, columns = 0;
  const BFloat16Bits* left = nullptr;
  const float* factors = nullptr;
  bool has_rows = false;
  PackedForms to;
};

// A float32 operand of a product: a matrix that lies in memory by rows, or its transpose.
struct WideMatrix {
  const float* data = nullptr;
  int64_t stride = 0, rows = 0, columns = 0;
  bool is_transposed = false;
};

// Packs the parts in bfloat16 of an operand whose matrix in memory has so many blocks by so many: the nearest
// numbers, and behind these, if there are two parts, the nearest of what they leave.
struct WidePacking {
  int64_t rows = 0, columns = 0;
  WideMatrix from;
  bool is_left = false;  // of a product, or right
  int parts = 1;
  BFloat16Bits* to = nullptr;
};

// A product of float32 matrices by their parts in bfloat16. Of the four products of two parts, the product of
// the smaller parts is left out. The result's sides, and the depth, are given in blocks. An infinite number
// may make NaN.
struct WideProduct {
  int64_t rows = 0, columns = 0, depth = 0;
  LowRankProduct of{};
  int parts = 1;
  // The operand along the shorter side of the result, packed. The other is packed as products are taken.
  const BFloat16Bits* packed = nullptr;

  bool left_is_packed() const { return rows < columns; }
  WideMatrix left() const {
    return of.form == ProductForm::kColumnsColumns ? WideMatrix{of.a, of.a_stride, of.depth, of.rows, true}
                                                   : WideMatrix{of.a, of.a_stride, of.rows, of.depth, false};
  }
  WideMatrix right() const {
    return of.form == ProductForm::kRowsRows ? WideMatrix{of.b, of.b_stride, of.columns, of.depth, true}
                                             : WideMatrix{of.b, of.b_stride, of.depth, of.columns, false};
  }
};

// A part of a matrix of a batch, which one thread computes: `rows` by `columns` blocks from block (i, j) on.
struct Square {
  int64_t matrix, i, j, rows, columns;
};

// The kernels of an instruction set.
struct ProductKernels {
  const char* isa;
  // Three products are faster than one of float32.
  bool outruns_float;
  // Called by each thread before its first product, and after its last.
  void (*begin)();
  void (*end)();
  void (*pack)(const Packing&, const Square&);
  void (*multiply)(const Product&, const Square&);
  void (*pack_wide)(const WidePacking&, const Square&);
  void (*multiply_wide)(const WideProduct&, const Square&);
  void (*find_factors)(const RowFactors&, const Square&);
  void (*scale)(const Scaling&, const Square&);
};

namespace base {
extern const ProductKernels kProducts;
}
namespace avx512bf16 {
extern const ProductKernels kProducts;
}
namespace amx {
extern const ProductKernels kProducts;
}

}  // namespace fusedstep::cpu
