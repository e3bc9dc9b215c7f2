// One tensor's update as the kernels take it.
#pragma once
#include <cstdint>

#include "src/core/operands.h"
#include "src/core/walk.h"

namespace fusedstep {

// Prefetch distances of a kernel, in bytes ahead of its loads: into the first-level cache, and into the
// second. Zero: not at all. A kernel that does not prefetch into the first does not prefetch into the second
// either.
struct PrefetchDistance {
  int64_t first = 0, second = 0;
};

struct TensorTask {
  void* data[kMaxOperands];
  int element_size[kMaxOperands];
  int operands;
  const BlockLayout* layout;  // null: all operands share one dense order
  const void* scalars;        // the rule's Scalars, in the precision of its maths
  double ratio;               // the trust ratio, in the second phase of a two-phase rule
  PrefetchDistance ahead;     // in operands that lie in one run
};

}  // namespace fusedstep
