// Compiled once for each instruction set of products: squares of packed matrices, and of their products.
#include "cpu_kernels/products.h"

#include <algorithm>

#include "cpu_kernels/tile_forms.h"
#include "cpu_kernels/tile_products.h"
#include "cpu_kernels/wide_products.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {
namespace {

void pack(const Packing& packing, const Square& square) {
  for (int64_t i = square.i; i < square.i + square.rows; ++i) {
    for (int64_t j = square.j; j < square.j + square.columns; ++j) {
      Block block;
      load_block(packing.from, square.matrix, i, j, block);
      write_forms(block, packing.to, packing.rows, packing.columns, square.matrix, i, j);
    }
  }
}

// Rounds the sums of the block (i, j), and writes it wherever it is asked for.
void finish(const Product& product, const float* sums, int64_t matrix, int64_t i, int64_t j) {
  const int64_t rows = product.rows, columns = product.columns;
  const BFloat16Bits* summand = product.summand;
  Block block, own;
  if (summand != nullptr) {
    const int64_t before = matrix * rows * columns * kBlockNumbers;
    for (int64_t half = 0; half < 2; ++half) {
      copy_tile(summand + before + ((2 * i + half) * columns + j) * kTileNumbers, own.at[half * kTileSide]);
    }
    summand = own.at[0];
  }
  finish_block(sums, product.alpha, product.beta, summand, block);
  PackedForms to = product.to;
  const bool is_mirrored = product.is_symmetric && i != j;
  if (is_mirrored) {
    to.transposed_left = to.left;
    to.transposed_right = to.right;
  }
  write_forms(block, to, rows, columns, matrix, i, j);
  if (product.plain.data != nullptr) {
    if (product.plain_is_transposed) {
      Block transposed;
      transpose(block, transposed);
      store_block(transposed, product.plain, matrix, j, i);
    } else {
      store_block(block, product.plain, matrix, i, j);
    }
  }
  if (product.shifted_left == nullptr) return;
  for (int64_t d = 0; d < kBlockSide && i == j; ++d) {
    block.at[d][d] = rounded(widened(block.at[d][d]) + product.shift);
  }
  PackedForms shifted;
  shifted.left = product.shifted_left;
  if (is_mirrored) shifted.transposed_left = product.shifted_left;
  write_forms(block, shifted, rows, columns, matrix, i, j);
}

void multiply(const Product& product, const Square& square) {
  const int64_t depth = product.depth;
  const auto panel = [&](const BFloat16Bits* packed, int64_t side, int64_t block, int64_t k) {
    return Panel{packed + ((square.matrix * side + block) * 2 * depth + k) * kTileNumbers,
                 depth * kTileNumbers};
  };
  const auto is_left_out = [&](int64_t r, int64_t c) {
    return product.is_symmetric && square.j + c > square.i + r;
  };
  alignas(64) float sums[kMostSquareBlocks][kMostSquareBlocks][kBlockNumbers];
  int64_t k = 0;
  do {
    const int64_t some = std::min(kDepthAtOnce, depth - k);
    for (int64_t r = 0; r < square.rows; ++r) {
      const Panel left = panel(product.left, product.rows, square.i + r, k);
      for (int64_t turn = 0; turn < square.columns; ++turn) {
        // To and fro, so that a block shares a panel with the one before it.
        const int64_t c = r % 2 == 0 ? turn : square.columns - 1 - turn;
        if (is_left_out(r, c)) continue;
        const Panel right = panel(product.right, product.columns, square.j + c, k);
        add_products(left, right, some, k == 0, sums[r][c]);
      }
    }
    k += kDepthAtOnce;
  } while (k < depth);
  for (int64_t r = 0; r < square.rows; ++r) {
    for (int64_t c = 0; c < square.columns; ++c) {
      if (!is_left_out(r, c)) finish(product, sums[r][c], square.matrix, square.i + r, square.j + c);
    }
  }
}

#define FUSEDSTEP_STRING_(x) #x
#define FUSEDSTEP_STRING(x) FUSEDSTEP_STRING_(x)

}  // namespace

const ProductKernels kProducts = {FUSEDSTEP_STRING(FUSEDSTEP_ISA),
                                  kOutrunsFloat,
                                  begin_products,
                                  end_products,
                                  pack,
                                  multiply,
                                  pack_wide,
                                  multiply_wide};

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
