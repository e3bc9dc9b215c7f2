// What fusedstep._bind calls directly, past the dispatcher.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "fusedstep/isa.h"
#include "src/plan.h"

namespace fusedstep::ops {

// Takes note of where a plan's weights, gradients and states are. Throws std::runtime_error, naming the
// operand, if they cannot be updated together. Returns false, with nothing noted, if a weight is not on the
// plan's device any more. `rows` are those of sparse gradients (see TensorOperands); none given: all are
// dense.
FUSEDSTEP_API bool bind_plan(int64_t handle, std::span<const TensorView> weights,
                             std::span<const TensorView> grads,
                             std::span<const std::optional<RowIndex>> rows = {});

// The gradients that a step over these plans will not write, as they share memory: pairs of the plan's and
// the tensor's index.
FUSEDSTEP_API std::vector<int64_t> shared_grads(const std::vector<int64_t>& handles);

// A step over a plan, with the options of the optimizer's operator as numbers, those from the first to
// maximize. Throws std::runtime_error if their count is wrong, or the plan does not exist.
using StepFunction = void (*)(int64_t plan, std::span<const double> options, double grad_factor,
                              int64_t grads);

// That of an optimizer, by the name that its operators begin with; null if there is none.
FUSEDSTEP_API StepFunction find_step(std::string_view optimizer);

}  // namespace fusedstep::ops
