// The border between the kernel of low_rank_products.cu and the host code that launches it.
#pragma once
#include <cstdint>

#include "cuda_kernels/kernel_table.h"
#include "src/core/low_rank_product.h"

namespace fusedstep::cuda {

// Rows and columns of a tile of a result.
constexpr int kLowRankTile = 128;

// A product, the number of tiles in a row of its result, and the number of its first tile in the launch.
struct NumberedProduct {
  LowRankProduct of;
  uint32_t tile_columns, first_tile;
};

// Products of one launch: as many as its arguments have room for.
struct LowRankLaunch {
  static constexpr int kMostProducts = 256;
  NumberedProduct products[kMostProducts];
  int count;
  uint32_t tiles;  // of all products
  Queue queue;
};
static_assert(sizeof(LowRankLaunch) <= 32000);

// Products in TF32, or of operands `in_two` parts of TF32: as exact as in float32. For compute
// capability 9.0.
void launch_low_rank_products(const LowRankLaunch& launch, bool in_two);

}  // namespace fusedstep::cuda
