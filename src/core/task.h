// One tensor's update as the kernels take it.
#pragma once
#include <cstdint>

#include "src/core/operands.h"
#include "src/core/walk.h"
#include "src/core/weight_code.h"

namespace fusedstep {

// Prefetch distances of a kernel, in bytes ahead of its loads: into the first-level cache, and into the
// second. Zero: not at all. A kernel that does not prefetch into the first does not prefetch into the second
// either.
struct PrefetchDistance {
  int64_t first = 0, second = 0;
};

struct CodeMap;

// A state that is kept in codes. Without a map it is not.
struct CodedState {
  const CodeMap* map = nullptr;
  float* absmax = nullptr;  // of each block

  bool operator==(const CodedState&) const = default;
};

struct TensorTask {
  void* data[kMaxOperands];
  CodedState coded[kMaxStates];  // the codes are in `data`; their order is that of rows and columns
  int element_size[kMaxOperands];
  int operands;
  const BlockLayout* layout;  // null: all operands share one dense order
  const void* scalars;        // the rule's Scalars, in the precision of its maths
  double ratio;               // the trust ratio, in the second phase of a two-phase rule
  PrefetchDistance ahead;     // in operands that lie in one run

  bool is_coded(int operand) const { return operand >= kFirstState && coded[operand - kFirstState].map; }
  bool has_codes = false;

  // The way that the weight keeps its value, if there is no float32 copy. The last operand is then what it
  // keeps beside the weight; it has no memory where the weight is rounded at random.
  WeightCode weight_code = WeightCode::kPlain;
  uint64_t draws = 0;  // the key of the step's random numbers

  bool keeps_value(int operand) const {
    return weight_code != WeightCode::kPlain && (operand == kWeight || operand == operands - 1);
  }
  bool is_on_tiles() const { return has_codes || weight_code != WeightCode::kPlain; }
};

}  // namespace fusedstep
