// The border between the kernels of matrix_scalings.cu and the host code that launches them.
#pragma once
#include <cstdint>

#include "cuda_kernels/kernel_table.h"

namespace fusedstep::cuda {

// Rows that a block of threads has, of all matrices of a batch.
constexpr int kScalingRows = 8;

// Square matrices of 16-bit numbers. Their rows are `stride` numbers apart, a multiple of 8, and begin at
// multiples of 16 bytes. Each matrix has memory for `stride` factors, one factor for
// each row; the rest of the memory is padding.
struct SquareMatrices {
  void* data;
  float* factors;
  int64_t rows;  // of all matrices
  int side, stride;
  uint32_t first_block;
};

// Batches that are one launch: as many as its arguments have room for.
struct ScalingLaunch {
  static constexpr int kMostBatches = 64;
  SquareMatrices batches[kMostBatches];
  int count;
  uint32_t blocks;  // of all batches
  bool has_rows;    // launch_scaling() scales rows too, and columns in either case
  Queue queue;
};
static_assert(sizeof(ScalingLaunch) <= 4096);

// Writes the factors 1 / sqrt(max(sum_j |A_ij|, kLeastRowSum)) of rows.
void launch_factors(const ScalingLaunch& launch, bool is_bfloat16);
// Multiplies numbers by the factors of their columns, or of their rows and columns, and rounds once.
void launch_scaling(const ScalingLaunch& launch, bool is_bfloat16);

}  // namespace fusedstep::cuda
