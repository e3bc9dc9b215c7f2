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

// Two cache lines: of many small tensors a step reads each one's task from memory.
struct alignas(64) TensorTask {
  void* data[kMaxOperands];
  const BlockLayout* layout;  // null: all operands share one dense order
  const CodedState* coded;    // [kMaxStates]; the codes are in `data`, in the order of rows and columns
  const void* scalars;        // the rule's Scalars, in the precision of its maths
  double ratio;               // the trust ratio, in the second phase of a two-phase rule
  PrefetchDistance ahead;     // in operands that lie in one run
  uint64_t draws = 0;         // the key of the step's random numbers
  uint8_t element_size[kMaxOperands];
  uint8_t operands;
  bool has_codes = false;

  // The way that the weight keeps its value, if there is no float32 copy. The last operand is then what it
  // keeps beside the weight; it has no memory where the weight is rounded at random.
  WeightCode weight_code = WeightCode::kPlain;

  float rounding = 0;  // what the step adds to the exact levels of states in codes (src/core/code_map.h)

  bool is_coded(int operand) const {
    return has_codes && operand >= kFirstState && coded[operand - kFirstState].map;
  }
  bool keeps_value(int operand) const {
    return weight_code != WeightCode::kPlain && (operand == kWeight || operand == operands - 1);
  }
  bool is_on_tiles() const { return has_codes || weight_code != WeightCode::kPlain; }
};
static_assert(sizeof(TensorTask) == 128);

}  // namespace fusedstep
