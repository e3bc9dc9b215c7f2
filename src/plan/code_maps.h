// The maps of codes, made once.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "fusedstep/isa.h"
#include "src/core/code_map.h"
#include "src/plan/tensor_view.h"

namespace fusedstep {

// The map of a state that is kept in codes. `is_signed` unless the state is never negative.
FUSEDSTEP_API const CodeMap& code_map(Storage storage, bool is_signed);

// The map of such a state in a step of a rule with states that are never negative. Steps do not round
// positive ones to the lowest codes of int8 and fp8, which are far apart: those below 1.3e-4 and 3.5e-5 of
// the absolute maximum. An element that had such a code would wait long for its next one, and a step divides
// by its root.
FUSEDSTEP_API const CodeMap& step_map(Storage storage, bool is_signed);

// All of them, in one place.
FUSEDSTEP_API std::span<const CodeMap> code_maps();

// The storage of a name: "int8", "int4" or "fp8". Throws std::runtime_error if it is another.
FUSEDSTEP_API Storage storage_of(std::string_view name);

// The sizes of a tensor that has one number for so many elements in a row of another, which has these sizes:
// [rows, units of a row], so that both can be cut between two rows. Flat where a row has no whole units.
std::vector<int64_t> sizes_in_units(Dims sizes, int64_t unit);

}  // namespace fusedstep
