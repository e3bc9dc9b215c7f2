// A step of weights of whose second moments each row has one (row-wise Adagrad).
#pragma once
#include <array>

#include "src/core/rowwise.h"
#include "src/plan/tensor_view.h"
#include "src/steps/step.h"

namespace fusedstep {

// The states of the rule: sums, of each row of a weight. A row is an index of its first dimension.
inline constexpr std::array kRowwiseRoles = {Role::kIndex};

// The rule over rows. The bits of a step depend neither on the number of threads nor on the layouts.
// prepare_step() throws std::runtime_error for a sparse gradient whose entries are less than a row; the error
// names the tensor.
BoundRule bind_rowwise(const RowwiseOptions& options);

}  // namespace fusedstep
