// A step of weights whose second moments are kept as those of rows and columns (Adafactor).
#pragma once
#include <cstdint>
#include <span>

#include "src/core/factored.h"
#include "src/layout.h"

namespace fusedstep {

// A tensor as matrices of its last two dimensions. Strides are in elements, `outer` those of the others.
struct Matrices {
  void* data;
  Dims outer;
  int64_t row, column;
};

struct FactoredTensor {
  Matrices weight, grad, moment;  // moment.data may be null
  Dims outer;                     // the sizes of the dimensions in front of the last two
  int64_t count, rows, columns;   // of matrices, and of what each has
  FactoredFormat format;
  // The second moments, [count][rows] and [count][columns], contiguous. Without those of rows there is one
  // row, and those of columns are those of its elements.
  void *row_moments, *column_moments;
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

// Steps tensors on the CPU, on up to `threads` threads. The bits depend neither on their number nor on the
// layouts. Throws std::bad_alloc before anything has changed.
void factored_step(std::span<const FactoredTensor> tensors, const FactoredOptions& options, int threads);

}  // namespace fusedstep
