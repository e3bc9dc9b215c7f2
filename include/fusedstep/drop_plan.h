// Frees plans: the part of a step's operators that destructors call.
#pragma once
#include <cstdint>

#include "fusedstep/isa.h"

// Frees the plan with this handle, if it exists, and lets go of its tensors. Allocates nothing and throws
// nothing: a destructor calls it while memory has run out. Torch's dispatcher would allocate.
extern "C" FUSEDSTEP_API void fusedstep_drop_plan(int64_t handle) noexcept;
