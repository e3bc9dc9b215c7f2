// What both engines share: the operands of an update and the formats that they have in memory.
#pragma once
#include <cstdint>

namespace fusedstep {

// Operands of an update in this order: weight, gradient, states.
enum Operand : int { kWeight, kGrad, kFirstState };
constexpr int kMaxStates = 4;
constexpr int kMaxOperands = kFirstState + kMaxStates;

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

}  // namespace fusedstep
