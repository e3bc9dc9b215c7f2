// A step of weights of whose second moments each row has one (row-wise Adagrad).
#pragma once
#include <memory>
#include <span>

#include "src/core/rowwise.h"
#include "src/steps/step.h"

namespace fusedstep {

// The plan is on the CPU and bound; it has no states. sums[i] has a number for each index in the first
// dimension of weight i, which is a row: double beside a double weight, else float. steps[i] is its step
// count, this step included. The bits depend neither on the number of threads nor on the layouts. Throws
// std::runtime_error, naming it, for a sparse gradient whose entries are less than a row.
std::unique_ptr<PreparedStep> prepare_rowwise_step(Plan& plan, const RowwiseOptions& rule,
                                                   std::span<void* const> sums, std::span<const double> steps,
                                                   const StepOptions& options);

}  // namespace fusedstep
