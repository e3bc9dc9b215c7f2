// The passes around the matrix products of a step: what is compiled once for each instruction set, behind a
// table of functions. Each value is rounded as torch's separate operations on a CPU round it.
#pragma once
#include <cstdint>

#include "src/core/channels.h"
#include "src/core/chosen_channels.h"
#include "src/core/matrix_passes.h"

namespace fusedstep::cpu {

// Rows [row, row_end) and columns [column, column_end) of a matrix.
struct Tile {
  int64_t row, row_end, column, column_end;
};

// Kernels over elements [begin, end) of a tensor. `update` writes updates alone. `advance` writes averages
// and weights, after the products: products may lack memory, and leave averages and weights unchanged then.
struct PassKernels {
  void (*update)(const PassTensor&, const AverageOptions&, int64_t begin, int64_t end);
  void (*advance)(const AdvanceTensor&, const AdvanceOptions&, int64_t begin, int64_t end);
  // Moves the weights of a tile by channels.
  void (*move)(const MoveTensor&, double keep, const Tile& tile);
};

// The most columns of a tile whose columns have sums: their rows are long pieces of memory, and the sums stay
// in the first-level cache.
constexpr int64_t kTileColumns = 1024;

// Kernels that write the sum of squares of each row of a tile, or of each of its columns. The order of a sum
// is the same on every instruction set.
struct SquaresKernels {
  void (*of_rows)(const SquaresTensor&, const Tile& tile, double* sums);
  void (*of_columns)(const SquaresTensor&, const Tile& tile, double* sums);
};

// Kernels of chosen channels, over a tile of a matrix. The order of a sum is the same on every instruction
// set.
struct ChosenKernels {
  // Write the L1 norm of each row, or column, of the averages with their gradients.
  void (*norms_of_rows)(const ChosenTensor&, int64_t matrix, bool maximizes, const Tile& tile, double* norms);
  void (*norms_of_columns)(const ChosenTensor&, int64_t matrix, bool maximizes, const Tile& tile,
                           double* norms);
  // Writes the updates of a tile of what is chosen.
  void (*take)(const ChosenTensor&, int64_t matrix, bool maximizes, const Tile& tile, const ChoiceMemory&);
  // Writes averages and weights, after the products.
  void (*advance)(const ChosenTensor&, void* weight, int64_t matrix, const ChosenMove&, const Tile& tile,
                  const ChoiceMemory&);
};

// Kernels over elements [begin, end) of matrices. The order of a sum is the same on every instruction set.
struct NormKernels {
  float (*sum_squares)(const NormTensor&, int64_t begin, int64_t end);
  void (*divide)(const NormTensor&, float divisor, int64_t begin, int64_t end);
};

// The kernels of an instruction set.
struct PassTable {
  PassKernels passes[static_cast<int>(PassFormat::kCount)];
  NormKernels norms[static_cast<int>(NormFormat::kCount)];
  SquaresKernels squares[static_cast<int>(SquaresFormat::kCount)];
  ChosenKernels chosen[static_cast<int>(PassFormat::kCount)];
};

namespace base {
extern const PassTable kPasses;
}
namespace avx2 {
extern const PassTable kPasses;
}
namespace avx512 {
extern const PassTable kPasses;
}

}  // namespace fusedstep::cpu
