// A step of weights whose second moments are kept as those of rows and columns (Adafactor), on the CPU.
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

// For the gradient g of a matrix, with v a second moment and mean(v) that over the rows of the matrix:
//
//     row = (1 - rate) * row + rate * (mean over columns of g^2 + added)         column: alike
//     update = g * min(1 / sqrt(row / max(mean(row), least_mean) * column), most)
//     length = step * (scaled ? max(rms(weight), least_scale) : 1)
//     move = length / max(1, rms(update) / threshold) * update,  averaged by beta if there is a moment
//     weight = (1 - decay * (decays_by_length ? length : 1)) * weight - move
//
// rms() is that over the whole tensor.
struct FactoredOptions {
  double rate, added, least_mean, most, step, scaled, least_scale, threshold, decay, decays_by_length, beta,
      grad_factor;
};

// Steps all tensors on up to `threads` threads. The bits depend neither on their number nor on the layouts.
// Throws std::bad_alloc before anything has changed.
void factored_step(std::span<const FactoredTensor> tensors, const FactoredOptions& options, int threads);

}  // namespace fusedstep
