#pragma once
#include <cstdint>

namespace fusedstep {

// Use of a gradient's memory by a step. Gradients that share memory with anything else are only read.
enum class GradUse : int64_t {
  kLeave,    // nothing
  kScale,    // multiplies them by the factor that the step takes them with
  kScratch,  // may leave anything in them: LAMB's update goes there between its phases
  kClear     // zeroes them
};

}  // namespace fusedstep
