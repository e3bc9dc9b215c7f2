// Checks that the operands of a tensor can be updated together. Each throws std::runtime_error, naming tensor
// `i` of the list and the operand, if they cannot.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "fusedstep/isa.h"
#include "src/core/code_map.h"
#include "src/core/weight_code.h"
#include "src/plan/overlap.h"
#include "src/plan/tensor_view.h"

namespace fusedstep {

[[noreturn]] void refuse(size_t i, const std::string& why);
[[noreturn]] void refuse_row(size_t i, int dim, int64_t at, int64_t size);

void check_devices(size_t i, const TensorOperands& operands, int slots, int device);
// Checks that no two elements of a tensor share memory. `what`: "the weight" or "a state".
void check_no_overlap(size_t i, const char* what, Dims sizes, Dims strides);
// Checks that weights, of which none overlaps itself, share no memory.
void check_none_shared(std::span<const Elements> weights);
// Checks shapes, dtypes and strides. Returns the format of the operands; with `masters` the last state is a
// master copy of the weight, or what it keeps beside itself. `code` is checked_weight_code().
Format checked_format(size_t i, const TensorOperands& operands, int slots, bool masters, WeightCode code);
// Returns how a weight keeps its float32 value, which the dtype of the last state tells with `masters`.
// Checks that a weight of its dtype may.
WeightCode checked_weight_code(size_t i, const TensorOperands& operands, int slots, bool masters,
                               bool is_random);
// Checks that a state has the numbers of its role, which is not kElement.
void check_numbers(size_t i, const TensorView& weight, const TensorView& state, Role role);
// Returns how a state is stored. Checks that its codes, and their absmax, are those of a weight.
FUSEDSTEP_API Storage checked_storage(size_t i, const TensorView& weight, const TensorView& state);
// Checks that every entry of a sparse gradient is for a row of a tensor with these sizes, on up to `threads`
// threads.
void check_rows(size_t i, const RowIndex& rows, Dims sizes, int threads);

}  // namespace fusedstep
