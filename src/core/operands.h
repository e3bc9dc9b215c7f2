// What both engines share: the operands of an update and the formats that they have in memory.
#pragma once
#include <cstdint>

namespace fusedstep {

// Operands of an update in this order: weight, gradient, states. The last state may be a master copy.
enum Operand : int { kWeight, kGrad, kFirstState };
constexpr int kMaxStates = 5;
constexpr int kMaxOperands = kFirstState + kMaxStates;

// A weight with a master copy in the dtype of the states, behind those of the rule: what is updated is the
// copy, and the weight is what it rounds to. A weight that is something else, because it has been changed
// since or the copy is new, is taken as it is.
template <class Weight>
struct Mastered {};

// What an operand is in memory, and whether it has a master copy.
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
