// The border between the kernels, compiled once per instruction set, and everything else, compiled once: raw
// pointers and PODs only. What crosses it is a table of functions per instruction set.
#pragma once
#include <cstdint>

#include "fusedstep/rules/list.h"

namespace fusedstep::cpu {

// Operands of an update in this order: weight, gradient, states.
enum Operand : int { kWeight, kGrad, kFirstState };
constexpr int kMaxStates = 4;
constexpr int kMaxOperands = kFirstState + kMaxStates;

// Elements of a chunk, and the number of virtual lanes over which a chunk's norms are summed. Both are part
// of the result of a reduction: fixed for every instruction set and thread count.
constexpr int64_t kChunkElements = 16384;
constexpr int kLanes = 16;

// The dtypes of weight (and gradient) and of the states.
#define FUSEDSTEP_FORMATS(X)    \
  X(Float, float, float)        \
  X(Double, double, double)     \
  X(BFloat16, bf16, bf16)       \
  X(Half, f16, f16)             \
  X(BFloat16Float, bf16, float) \
  X(HalfFloat, f16, float)

enum class Format : uint8_t {
#define FUSEDSTEP_ID(name, weight, state) k##name,
  FUSEDSTEP_FORMATS(FUSEDSTEP_ID)
#undef FUSEDSTEP_ID
      kCount
};

// `count` elements that lie side by side in every operand.
struct Span {
  void* operand[kMaxOperands];
  int64_t count;
  const void* scalars;  // the rule's Scalars<float or double>
  double grad_factor;   // what the gradient is multiplied by as it is read
  double ratio;         // second phase: the tensor's trust ratio
  double* norms;        // first phase: [2][kLanes] sums of squares of weight and update
};

struct SpanKernel {
  void (*run)(const Span&);
  uint32_t reads, writes;  // bit i: operand i
};

// What a rule can be asked to do. An elementwise rule has kUpdate; a two-phase rule has the others, where its
// update is either kept in the gradient's memory between the phases or computed again in the second, which
// then is the one that writes the states.
enum Phase : int { kUpdate, kAccumulateStore, kAccumulate, kApplyStored, kApplyRecompute, kPhases };

struct RuleKernels {
  SpanKernel phase[kPhases];
};

// What gradients are subject to whatever the rule. A norm is summed in Span::norms[0]; `add` adds the
// gradient to what takes the weight's place.
struct GradKernels {
  SpanKernel norm, scale, add;
};

// What becomes of a gradient while a kernel runs over it.
struct GradTreatment {
  const SpanKernel* scale = nullptr;  // multiplies it in memory by `scale_factor` first
  double scale_factor = 1;
  double factor = 1;   // what it is multiplied by as it is read
  bool clear = false;  // it is zero in the end
};

// How a tensor whose operands do not form one flat range is walked: in blocks of up to extent[0] by extent[1]
// elements of its last two dimensions (the last one is the weight's fastest).
struct BlockLayout {
  int dims;                // at least 2
  const int64_t* sizes;    // [dims]
  const int64_t* strides;  // [kMaxOperands][dims], in elements
  int64_t extent[2];       // rows, columns of a block
  bool long_rows;          // rows are long enough to be worked on one by one, in place
};

// One tensor as a kernel sees it.
struct TensorTask {
  void* data[kMaxOperands];
  int element_size[kMaxOperands];
  int operands;
  const BlockLayout* layout;  // null: all operands share one dense order
  const void* scalars;
  double ratio;
};

struct KernelTable {
  const char* isa;
  int float_lanes;
  const RuleKernels* (*find)(rules::RuleId, unsigned flags, Format);
  const GradKernels* (*grads)(Format);
  // Runs a kernel over elements [begin, end) of a dense tensor, or over blocks [begin, end) of another.
  // Returns the name of the instruction set that the code was compiled for.
  const char* (*run)(const SpanKernel&, const TensorTask&, const GradTreatment&, int64_t begin, int64_t end,
                     double* norms);
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
