// Every rule there is, one line each. Kernels for every instruction set, tests and benchmarks follow from
// this list. Of plain rules the C++ class follows too (optim/plain.h): all that the class has beside the
// rule's options and states is what every class has.
#pragma once
#include "fusedstep/rules/adadelta.h"
#include "fusedstep/rules/adagrad.h"
#include "fusedstep/rules/adam.h"
#include "fusedstep/rules/adamax.h"
#include "fusedstep/rules/adan.h"
#include "fusedstep/rules/adopt.h"
#include "fusedstep/rules/asgd.h"
#include "fusedstep/rules/lamb.h"
#include "fusedstep/rules/lion.h"
#include "fusedstep/rules/nadam.h"
#include "fusedstep/rules/radam.h"
#include "fusedstep/rules/rmsprop.h"
#include "fusedstep/rules/rprop.h"
#include "fusedstep/rules/sgd.h"

#define FUSEDSTEP_PLAIN_RULES(X) \
  X(Adamax)                      \
  X(ADOPT)                       \
  X(Lion)                        \
  X(RAdam)                       \
  X(RMSprop)

#define FUSEDSTEP_RULES(X) \
  FUSEDSTEP_PLAIN_RULES(X) \
  X(Adadelta)              \
  X(Adagrad)               \
  X(Adam)                  \
  X(Adan)                  \
  X(ASGD)                  \
  X(Lamb)                  \
  X(NAdam)                 \
  X(Rprop)                 \
  X(SGD)

namespace fusedstep::rules {

enum class RuleId {
#define FUSEDSTEP_ID(Rule) k##Rule,
  FUSEDSTEP_RULES(FUSEDSTEP_ID)
#undef FUSEDSTEP_ID
};

template <template <unsigned> class Rule>
inline constexpr RuleId kIdOf = RuleId{};
template <template <unsigned> class Rule>
inline constexpr const char* kNameOf = "";
#define FUSEDSTEP_ID(Rule)                               \
  template <>                                            \
  inline constexpr RuleId kIdOf<Rule> = RuleId::k##Rule; \
  template <>                                            \
  inline constexpr const char* kNameOf<Rule> = #Rule;
FUSEDSTEP_RULES(FUSEDSTEP_ID)
#undef FUSEDSTEP_ID

}  // namespace fusedstep::rules
