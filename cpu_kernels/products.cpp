// Compiled once for each instruction set of products: squares of packed matrices, and of their products.
#include "cpu_kernels/products.h"

#include <algorithm>
#include <cmath>

#include "cpu_kernels/tile_forms.h"
#include "cpu_kernels/tile_products.h"
#include "cpu_kernels/wide_products.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {
namespace {

void pack(const Packing& packing, const Square& square) {
  const PlainMatrices& from = packing.from;
  const auto fetch = [&](int64_t i, int64_t j) __attribute__((always_inline)) {
    prefetch_block(block_of(from, square.matrix, i, j), from.columns, extent_of(from, i, j).rows);
  };
  pack_ahead(square, fetch, [&](int64_t i, int64_t j) {
    Block block;
    load_block(from, square.matrix, i, j, block);
    write_forms(block, packing.to, packing.rows, packing.columns, square.matrix, i, j);
  });
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

// Each row is summed in one order.
void find_factors(const RowFactors& factors, const Square& square) {
  const int64_t depth = factors.rows, first = (square.matrix * depth + square.i) * kBlockSide;
  for (int64_t row = first; row < first + square.rows * kBlockSide; ++row) {
    const BFloat16Bits* tile =
        factors.left + (row / kTileSide * depth) * kTileNumbers + row % kTileSide * kBlockSide;
    float sums[kBlockSide] = {};
    for (int64_t k = 0; k < depth; ++k, tile += kTileNumbers) {
      for (int64_t c = 0; c < kBlockSide; ++c) sums[c] += std::fabs(widened(tile[c]));
    }
    float sum = 0;
    for (const float each : sums) sum += each;
    // A comparison that is false for NaN: a sum that is NaN stays.
    factors.to[row] = 1 / std::sqrt(sum < factors.least ? factors.least : sum);
  }
}

void scale(const Scaling& scaling, const Square& square) {
  const int64_t rows = scaling.rows, columns = scaling.columns;
  const BFloat16Bits* const left = scaling.left + square.matrix * rows * columns * kBlockNumbers;
  const float* const factors = scaling.factors + square.matrix * columns * kBlockSide;
  for (int64_t i = square.i; i < square.i + square.rows; ++i) {
    for (int64_t j = square.j; j < square.j + square.columns; ++j) {
      Block block;
      for (int64_t half = 0; half < 2; ++half) {
        copy_tile(left + ((2 * i + half) * columns + j) * kTileNumbers, block.at[half * kTileSide]);
      }
      for (int64_t r = 0; r < kBlockSide; ++r) {
        // One product of two factors: a symmetric matrix stays one.
        const float own = scaling.has_rows ? factors[i * kBlockSide + r] : 1;
        for (int64_t c = 0; c < kBlockSide; ++c) {
          block.at[r][c] = rounded(widened(block.at[r][c]) * (own * factors[j * kBlockSide + c]));
        }
      }
      write_forms(block, scaling.to, rows, columns, square.matrix, i, j);
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
                                  multiply_wide,
                                  find_factors,
                                  scale};

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
