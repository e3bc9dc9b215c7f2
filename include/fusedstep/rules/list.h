// Every rule there is, one line each. Kernels for every instruction set, tests and benchmarks follow from
// this list.
#pragma once
#include "fusedstep/rules/adagrad.h"
#include "fusedstep/rules/adam.h"
#include "fusedstep/rules/adan.h"
#include "fusedstep/rules/lamb.h"
#include "fusedstep/rules/lion.h"
#include "fusedstep/rules/sgd.h"

#define FUSEDSTEP_RULES(X) \
  X(Adagrad)               \
  X(Adam)                  \
  X(Adan)                  \
  X(Lamb)                  \
  X(Lion)                  \
  X(SGD)

namespace fusedstep::rules {

enum class RuleId {
#define FUSEDSTEP_ID(Rule) k##Rule,
  FUSEDSTEP_RULES(FUSEDSTEP_ID)
#undef FUSEDSTEP_ID
};

template <template <unsigned> class Rule>
inline constexpr RuleId kIdOf = RuleId{};
#define FUSEDSTEP_ID(Rule) \
  template <>              \
  inline constexpr RuleId kIdOf<Rule> = RuleId::k##Rule;
FUSEDSTEP_RULES(FUSEDSTEP_ID)
#undef FUSEDSTEP_ID

}  // namespace fusedstep::rules
