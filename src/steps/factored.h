// A step of weights whose second moments are kept as those of rows and columns (Adafactor).
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "src/core/factored.h"
#include "src/plan/layout.h"
#include "src/steps/step.h"

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
  // The second moments, [count][rows] and [count][columns], contiguous. `row_moments` is null for vectors.
  // Then `rows` is 1, and `column_moments` has one second moment for each element.
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

// The hyper-parameters of Adafactor. FactoredOptions follow from these and from the step count.
struct AdafactorHyper {
  double lr = 1e-2, beta2_decay = -0.8;
  double eps1 = -1;  // below 0: the epsilon of the weight's dtype
  double eps2 = 1e-3, d = 1, weight_decay = 0, beta1 = 0;
  double averages = 0;  // updates are averaged, by beta1
  double scale_parameter = 1, relative_step = 1, warmup_init = 0;
  double max_relative_step = 1e-2;  // instead of lr, where the variant is not torch's
  double is_torchs = 1;             // the variant: torch's, or transformers'

  static constexpr const char* kNames[] = {"lr",
                                           "beta2_decay",
                                           "eps1",
                                           "eps2",
                                           "d",
                                           "weight_decay",
                                           "beta1",
                                           "averages",
                                           "scale_parameter",
                                           "relative_step",
                                           "warmup_init",
                                           "max_relative_step",
                                           "is_torchs"};
};

// The options of tensors. Most tensors have the same options, which are stored once.
struct OptionsOfTensors {
  std::vector<FactoredOptions> options;
  std::vector<uint32_t> of_tensor;  // the number of the options of each; empty if all tensors have the first

  uint32_t number_of(size_t tensor) const { return of_tensor.empty() ? 0 : of_tensor[tensor]; }
  const FactoredOptions& operator[](size_t tensor) const { return options[number_of(tensor)]; }
};

// The states of the rule: second moments of rows and of columns and, if it averages, a first moment.
inline constexpr std::array kAdafactorRoles = {Role::kRow, Role::kColumn, Role::kElement};

// The rule over factored second moments. A step changes neither gradients nor weights without elements.
// prepare_step() throws std::runtime_error for a gradient that is its own weight; the error names the tensor.
BoundRule bind_adafactor(const AdafactorHyper& hyper);

// Takes a part of a step of tensors on the CPU, on up to `threads` threads. The bits depend neither on their
// number nor on the layouts; those of the parts one after another are those of a whole step. Throws
// std::bad_alloc before anything has changed.
void factored_step(std::span<const FactoredTensor> tensors, const FactoredOptions& options, FactoredPart part,
                   int threads);

}  // namespace fusedstep
