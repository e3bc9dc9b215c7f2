// The figures that depend on the processor.
#pragma once
#include <cstdint>

#include "src/core/task.h"

namespace fusedstep {

// Returns how far ahead kernels prefetch in a step over `bytes` of operands, on a team whose second-level
// caches hold `second_level` bytes.
PrefetchDistance prefetch_distance(int64_t bytes, int64_t second_level);

// Returns whether a socket's caches keep a part of so many bytes of operands from one step to the next.
bool stays_in_cache(int64_t bytes);

}  // namespace fusedstep
