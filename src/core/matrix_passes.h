// The passes around the matrix products of a step: each reads and writes an element once.
#pragma once
#include <cstdint>

namespace fusedstep {

// The dtypes of averages, gradients and weights, and of what products take and return.
#define FUSEDSTEP_PASS_FORMATS(X) \
  X(Float, float, float)          \
  X(Double, double, double)       \
  X(BFloat16, bf16, bf16)         \
  X(Half, f16, f16)               \
  X(FloatBFloat16, float, bf16)   \
  X(FloatHalf, float, f16)        \
  X(BFloat16Half, bf16, f16)

enum class PassFormat : uint8_t {
#define FUSEDSTEP_ID(name, Stored, Product) k##name,
  FUSEDSTEP_PASS_FORMATS(FUSEDSTEP_ID)
#undef FUSEDSTEP_ID
      kCount
};

// A tensor in a pass. The elements of all operands lie in one order, without a gap.
struct PassTensor {
  void* stored;      // an average, or a weight
  const void* grad;  // null in a move
  void* product;     // where the update goes, or the direction of a move
  int64_t count;
  double factor;  // of the direction
};

// A tensor in the last pass of a CPU, which takes the gradient into the average and moves the weight. The
// elements of all operands lie in one order, without a gap.
struct AdvanceTensor {
  void *average, *weight;
  const void *grad, *direction;
  int64_t count;
  double factor;  // of the direction
};

struct AdvanceOptions {
  double share;  // of the gradient in the average
  double keep;   // what decay leaves of the weight
};

// average += share (grad - average), as torch's lerp. The update that is written is the average, or with
// `leads` grad + lead (average - grad).
struct AverageOptions {
  double share, lead;
  bool leads;
};

// The dtypes of matrices before and after they are divided by their norms.
#define FUSEDSTEP_NORM_FORMATS(X) \
  X(FloatHalf, float, f16)        \
  X(BFloat16, bf16, bf16)         \
  X(BFloat16Half, bf16, f16)      \
  X(Half, f16, f16)

enum class NormFormat : uint8_t {
#define FUSEDSTEP_ID(name, From, To) k##name,
  FUSEDSTEP_NORM_FORMATS(FUSEDSTEP_ID)
#undef FUSEDSTEP_ID
      kCount
};

// Matrices of one size that lie one behind another. `to` may be `from` if numbers have as many bytes.
struct NormTensor {
  const void* from;
  void* to;
  int64_t matrices, size;  // elements of a matrix
};

// Each matrix is divided by max(norm, eps), or by norm + eps.
struct NormOptions {
  double eps;
  bool adds_eps;
};

}  // namespace fusedstep
