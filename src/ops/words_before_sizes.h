// The words of a torch tensor in front of its sizes.
#pragma once
#include <cstddef>

#include "fusedstep/isa.h"

namespace fusedstep::ops {

// The number of words from the start of a tensor to its sizes, where these lie in the tensor itself. The
// stable ABI does not tell it, so it is found by trial when the library is loaded, on tensors whose start is
// known. 0 if the trial has failed: nobody may read in front of sizes.
FUSEDSTEP_API extern const size_t words_before_sizes;

}  // namespace fusedstep::ops
