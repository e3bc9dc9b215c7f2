#pragma once
#include <cstdint>
#include <optional>
#include <span>

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

}  // namespace fusedstep::ops
