// The border between the kernels, compiled once per instruction set, and everything else, compiled once: raw
// pointers and PODs only. What crosses it is a table of functions per instruction set.
#pragma once
#include <cstdint>

#include "src/core/operands.h"
#include "src/core/reduction.h"
#include "src/core/task.h"

namespace fusedstep::rules {
enum class RuleId;  // in list.h, which kernels of one rule do not depend on
}

namespace fusedstep {
enum class FactoredFormat : uint8_t;
struct FactoredKernels;
struct RowKernels;
}  // namespace fusedstep

namespace fusedstep::cpu {

// Rows of `count` elements that lie side by side in every operand.
struct Span {
  void* operand[kMaxOperands];      // of the first row
  int64_t row_bytes[kMaxOperands];  // from a row to the next
  int64_t rows = 1, count;          // at least one row
  uint32_t writes;                  // the kernel's
  const void* scalars;              // the rule's Scalars<float or double>
  PrefetchDistance ahead;
  double grad_factor;  // multiplies the gradient as it is read
  double ratio;        // second phase: the tensor's trust ratio
  double* norms;       // first phase: [2][kLanes] sums of squares of weight and update
  // For a kernel that takes states in codes, and weights as they are stored: element `first` by rows and
  // columns is the first, and begins a block.
  const CodedState* coded = nullptr;
  int64_t first = 0;
  float rounding;
  WeightCode weight_code;  // and `rounding`, `draws`: as in TensorTask
  uint64_t draws;
};

struct SpanKernel {
  void (*run)(const Span&);
  uint32_t reads, writes;  // bit i: operand i
  // The same where states are in codes, or weights keep their value in a code: without tiles for them.
  void (*run_as_stored)(const Span&) = nullptr;
};

// Phases of a rule. An elementwise rule has kUpdate; a two-phase rule has the others. Its update is kept in
// the gradient's memory between the phases, or the second phase computes it again and is the one that writes
// the states.
enum Phase : int { kUpdate, kAccumulateStore, kAccumulate, kApplyStored, kApplyRecompute, kPhases };

struct RuleKernels {
  SpanKernel phase[kPhases];
};

// Kernels over gradients, the same for every rule. `norm` sums in Span::norms[0]; `add` adds the gradient to
// the operand in the weight's place.
struct GradKernels {
  SpanKernel norm, scale, add;
};

// Treatment of a gradient while a kernel runs over it.
struct GradTreatment {
  const SpanKernel* scale = nullptr;  // multiplies it in memory by `scale_factor` first
  double scale_factor = 1;
  double factor = 1;   // multiplies it as it is read
  bool clear = false;  // it is zero in the end
};

struct KernelTable {
  const char* isa;
  const RuleKernels* (*find)(rules::RuleId, unsigned flags, Format);
  const GradKernels* (*grads)(Format);
  // Runs a kernel over elements [begin, end) of a dense tensor, or over blocks [begin, end) of another.
  // Returns the name of the instruction set that the code was compiled for.
  const char* (*run)(const SpanKernel&, const TensorTask&, const GradTreatment&, int64_t begin, int64_t end,
                     double* norms);
  // Elements [begin, begin + count) of a state in codes, which begin with a block, to numbers; and back, in a
  // step that rounds by this (TensorTask::rounding).
  void (*decode)(const CodedState&, const void* codes, int64_t begin, int64_t count, float* to);
  void (*encode)(const CodedState&, float rounding, const float* from, int64_t begin, int64_t count,
                 void* codes);
  const FactoredKernels* (*factored)(FactoredFormat);
  const RowKernels* (*rowwise)(Format);
};

namespace base {
extern const KernelTable kTable;
}
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}

}  // namespace fusedstep::cpu
