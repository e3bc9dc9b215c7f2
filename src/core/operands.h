// The operands of an update and the formats that they have in memory.
#pragma once
#include <cstdint>

namespace fusedstep {

// Numbers of a tensor: its step count, and those that a rule keeps beside it.
inline constexpr int kMaxNumbers = 3;

// Operands of an update in this order: weight, gradient, states. The last state may be a master copy.
enum Operand : int { kWeight, kGrad, kFirstState };
constexpr int kMaxStates = 5;
constexpr int kMaxOperands = kFirstState + kMaxStates;

// A weight with a master copy, which has the dtype of the states and comes behind the rule's states. A step
// updates the copy and stores it, rounded, as the weight. If the weight is not what the copy rounds to, since
// it has been changed or the copy is new, the step starts from the weight instead.
template <class Weight>
struct Mastered {};

// The type of an operand in memory, and whether it has a master copy.
template <class Weight>
struct StoredOf {
  using Type = Weight;
  static constexpr bool kHasMaster = false;
};
template <class Weight>
struct StoredOf<Mastered<Weight>> {
  using Type = Weight;
  static constexpr bool kHasMaster = true;
};

// The dtypes of weight (and gradient) and of the states.
#define FUSEDSTEP_FORMATS(X)               \
  X(Float, float, float)                   \
  X(Double, double, double)                \
  X(BFloat16, bf16, bf16)                  \
  X(Half, f16, f16)                        \
  X(BFloat16Float, bf16, float)            \
  X(HalfFloat, f16, float)                 \
  X(BFloat16Master, Mastered<bf16>, float) \
  X(HalfMaster, Mastered<f16>, float)

enum class Format : uint8_t {
#define FUSEDSTEP_ID(name, weight, state) k##name,
  FUSEDSTEP_FORMATS(FUSEDSTEP_ID)
#undef FUSEDSTEP_ID
      kCount
};

}  // namespace fusedstep
