// The border between the kernel of matrix_products.cu and the host code that launches it.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda_kernels/kernel_table.h"
#include "src/core/product_form.h"

namespace fusedstep::cuda {

// Rows and columns of a tile of a result.
constexpr int kTileRows = 128, kTileColumns = 256;
// Tensor maps describe boxes of so many rows and columns, swizzled by 128 bytes.
constexpr int kProductBox = 64;

// C = alpha A B + beta D for a batch of matrices. C may be D, and neither A nor B.
struct MatrixProduct {
  CUtensorMap a, b, c, d;
  CUtensorMap shifted;  // C, rounded, with `shift` added to its diagonal
  ProductForm form;
  // A B is symmetric: one triangle of tiles is computed, and written twice.
  bool is_symmetric;
  int rows, columns, depth;
  bool is_shifted;
  float alpha, beta, shift;                  // without a D beta is 0, and no map of D is read
  uint32_t tiles, tile_columns, first_tile;  // tiles of a matrix, and of a row of a matrix
};

// The tiles of a matrix of a product. Of a symmetric one: those that have an element of the lower triangle.
inline uint32_t product_tiles(const MatrixProduct& product) {
  const auto rows = static_cast<uint32_t>((product.rows + kTileRows - 1) / kTileRows);
  if (!product.is_symmetric) return rows * product.tile_columns;
  // Two rows of tiles begin with as many tiles as there are pairs of rows so far.
  static_assert(kTileColumns == 2 * kTileRows);
  const uint32_t pairs = rows / 2;
  return pairs * (pairs + 1) + rows % 2 * (pairs + 1);
}

// Batches whose products are one launch: as many as its arguments have room for.
struct ProductLaunch {
  static constexpr int kMostProducts = 10;
  MatrixProduct products[kMostProducts];
  int count;
  uint32_t tiles;  // of all products
  Queue queue;
};
static_assert(sizeof(ProductLaunch) <= 32000);

// Returns whether a GPU has the instructions that these kernels use: its compute capability is 9.0 then.
bool has_matrix_products(int device);
// Products of bfloat16 or float16 numbers; sums are float32.
void launch_products(const ProductLaunch& launch, bool is_bfloat16, int device);

}  // namespace fusedstep::cuda
