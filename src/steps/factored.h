// A step of weights whose second moments are kept as those of rows and columns (Adafactor).
#pragma once
#include <cstdint>
#include <span>

#include "src/core/factored.h"
#include "src/plan/layout.h"

namespace fusedstep {

// A tensor as matrices of its last two dimensions. Strides are in elements, `outer` those of the others.
struct Matrices {
  void* data;
  Dims outer;
  int64_t row, column;
};

// Sums that a process with a part of a tensor writes for the others, and then reads as the sums over all of
// them; and the sizes of the whole tensor.
struct FactoredShare {
  double* row_sums;     // [count][rows], of squares along rows
  double* column_sums;  // [count][columns], of squares along columns
  double* mean_sums;    // [count], of the moments of rows
  double* norms2;       // [2]: the squares of the norms of weight and update
  int64_t rows, columns, elements;
};

struct FactoredTensor {
  Matrices weight, grad, moment;  // moment.data may be null
  Dims outer;                     // the sizes of the dimensions in front of the last two
  int64_t count, rows, columns;   // of matrices, and of what each has
  FactoredFormat format;
  // The second moments, [count][rows] and [count][columns], contiguous. Without those of rows there is one
  // row, and those of columns are those of its elements.
  void *row_moments, *column_moments;
  FactoredShare share;  // not looked at by a step of whole tensors
};

// Bytes of an element of the type of the maths, and of a weight and a gradient in memory.
constexpr int size_of_maths(FactoredFormat format) { return format == FactoredFormat::kDouble ? 8 : 4; }
constexpr int size_of_weight(FactoredFormat format) {
  return format == FactoredFormat::kBFloat16 || format == FactoredFormat::kHalf ? 2 : size_of_maths(format);
}
constexpr int size_of_grad(FactoredFormat format) {
  return format == FactoredFormat::kFloat ? 4 : format == FactoredFormat::kDouble ? 8 : 2;
}

constexpr int64_t parts(int64_t count, int64_t each) { return (count + each - 1) / each; }

// The tiles that a tensor is cut into.
struct FactoredCut {
  int64_t row_tiles, column_tiles;

  explicit FactoredCut(const FactoredTensor& tensor)
      : row_tiles(parts(tensor.rows, kTileRows)), column_tiles(parts(tensor.columns, kTileColumns)) {}
};

// Takes a part of a step of tensors on the CPU, on up to `threads` threads. The bits depend neither on their
// number nor on the layouts; those of the parts one after another are those of a whole step. Throws
// std::bad_alloc before anything has changed.
void factored_step(std::span<const FactoredTensor> tensors, const FactoredOptions& options, FactoredPart part,
                   int threads);

}  // namespace fusedstep
