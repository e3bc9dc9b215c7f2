// A block of a matrix whose second moments are kept as those of its rows and of its columns.
#pragma once
#include <cstdint>

namespace fusedstep {

// The most rows and columns of a block. A sum of floats over a block's column has no more terms than rows.
constexpr int64_t kBlockRows = 256, kBlockColumns = 2048;

// The elements of a block in memory. Strides are in elements.
struct BlockArray {
  void* first;
  int64_t row, column;
};

// Factors and column sums have the type of the maths, as the moment has: double beside a double weight, else
// float.
struct FactoredBlock {
  BlockArray weight, grad, moment;  // moment.first may be null: the update is then not averaged
  int64_t rows, columns;
  double grad_factor;  // multiplies the gradient as it is read

  // kSums writes sums of squares of the gradient.
  double* row_sums;
  void* column_sums;

  // The update is the gradient times the product of both factors, but for products above `most`. Null: the
  // factors of rows are 1.
  const void *row_factors, *column_factors;
  double most;

  double* norms;  // kNorms adds the sums of squares of weight and update

  // kApply: w = keep * w - step * update, or m = beta * m + (1 - beta) * step * update, w = keep * w - m.
  double keep, step, beta;
};

enum FactoredPhase : int { kSums, kNorms, kApply, kFactoredPhases };

struct FactoredKernels {
  void (*phase[kFactoredPhases])(const FactoredBlock&);
};

// The dtypes of weight and gradient. A float weight with a gradient of 16 bits is a master copy.
#define FUSEDSTEP_FACTORED_FORMATS(X) \
  X(Float, float, float)              \
  X(Double, double, double)           \
  X(BFloat16, bf16, bf16)             \
  X(Half, f16, f16)                   \
  X(BFloat16Master, float, bf16)      \
  X(HalfMaster, float, f16)

enum class FactoredFormat : uint8_t {
#define FUSEDSTEP_ID(name, weight, grad) k##name,
  FUSEDSTEP_FACTORED_FORMATS(FUSEDSTEP_ID)
#undef FUSEDSTEP_ID
      kCount
};

}  // namespace fusedstep
