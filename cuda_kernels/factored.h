// The border between the kernels of factored second moments, compiled by nvcc, and the host code that
// launches them.
#pragma once
#include <cstdint>

#include "cuda_kernels/kernel_table.h"
#include "src/core/factored.h"
#include "src/core/reduction.h"

namespace fusedstep::cuda {

// An operand's matrices: strides in elements, `outer` those of the dimensions in front of the last two.
struct FactoredArray {
  void* data;  // null: there is none
  int64_t row, column;
  const int64_t* outer;
};

// The sizes of a tensor of which this may be a part.
struct FactoredWhole {
  int64_t rows, columns, elements;
};

// One tensor as a kernel sees it. Sums are those of src/core/factored.h.
struct FactoredTask {
  FactoredArray weight, grad, moment;
  const int64_t* outer_sizes;
  int outer_dims;
  uint32_t options;              // the number of the tensor's options
  bool as_double;                // the maths
  int64_t count, rows, columns;  // of matrices, and of what each has
  int64_t row_tiles, column_tiles;
  FactoredWhole whole;
  void *row_moments, *column_moments;  // the former may be null
  double* row_sums;                    // [count][column_tiles][rows]
  void* column_sums;                   // [count][row_tiles][columns]
  double* mean_sums;                   // [count][parts(rows, kMeanRows)][kPartials]
  double* means;                       // [count]
  double* norms;                       // [tiles][kPartials]
  FactoredLengths* lengths;
  double *share_of_rows, *share_of_columns, *share_of_means, *share_of_norms;  // see FactoredShare
};

// A part of a tensor: a tile, a matrix, or some of the moments.
struct FactoredUnit {
  uint32_t tensor, index;
};

// Moments of rows, or of columns, that a block of threads takes forward: fewer if each is the sum of many.
FUSEDSTEP_FN int64_t moments_of_unit(int64_t tiles) { return tiles > kPartialsGroup ? 32 : 256; }
FUSEDSTEP_FN int64_t moment_units(int64_t moments, int64_t tiles) {
  const int64_t each = moments_of_unit(tiles);
  return (moments + each - 1) / each;
}

struct FactoredLaunch {
  const FactoredTask* tasks;
  const FactoredUnit* units;
  int64_t unit_count;  // or that of the tasks
  const FactoredOptions* options;
  const double* more_factor;  // multiplies gradients once more; null: by nothing
  const float* found_inf;     // not zero: the step is skipped; null: it is not
  FactoredPart part;
  Queue queue;
};

// The phases of a step in their order. In a part of a step those of moments, means and lengths take the sums
// over all processes, or leave theirs there. Units are tiles of weights of one format; first those of rows
// and then those of columns; and matrices that have moments of rows.
struct FactoredPasses {
  void (*sums)(const FactoredLaunch&);
  void (*norms)(const FactoredLaunch&);
  void (*apply)(const FactoredLaunch&);
};
const FactoredPasses& factored_passes(FactoredFormat format);
void launch_moments(const FactoredLaunch& launch);
void launch_means(const FactoredLaunch& launch);
void launch_lengths(const FactoredLaunch& launch);

}  // namespace fusedstep::cuda
