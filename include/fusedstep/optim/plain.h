// The C++ optimizers of the rules in FUSEDSTEP_PLAIN_RULES, made from the lists of the rules. Each has a
// class, as `Lion`, its options, as `LionOptions`, and the state of one parameter, as `LionParamState`. The
// rule's header has the formula, the options of the rule with their defaults, and the states:
// fusedstep/rules/lion.h. All have the options maximize and max_grad_norm too, and those of
// FUSEDSTEP_STORAGE_OPTIONS.
//
//   const auto options = fusedstep::optim::LionOptions(1e-4).maximize(true);
//   fusedstep::optim::Lion optimizer(model->parameters(), options);
#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

#define FUSEDSTEP_GRADIENT_OPTIONS(X) \
  X(bool, maximize, false)            \
  X(double, max_grad_norm, kNoLimit)

#define FUSEDSTEP_TAKE_NUMBER(type, name, ...) FUSEDSTEP_TAKE_##type(name)
#define FUSEDSTEP_TAKE_double(name) hyper.name = o.name();
#define FUSEDSTEP_TAKE_bool(name) hyper.name = double(o.name());
#define FUSEDSTEP_TAKE_TwoBetas(name) std::tie(hyper.beta1, hyper.beta2) = o.name();

#define FUSEDSTEP_PLAIN_OPTIMIZER(Rule)                                                       \
  struct Rule##Options : detail::BasicOptions<Rule##Options> {                                \
    FUSEDSTEP_OPTIONS(Rule##Options, FUSEDSTEP_OPTIONS_OF_##Rule, FUSEDSTEP_GRADIENT_OPTIONS) \
  };                                                                                          \
  struct Rule##ParamState : ParamState<Rule##ParamState, rules::Rule> {                       \
    FUSEDSTEP_STATES_OF_##Rule(FUSEDSTEP_STATE)                                               \
  };                                                                                          \
  class Rule : public FusedOptimizer<Rule, Rule##Options, Rule##ParamState, rules::Rule> {    \
   public:                                                                                    \
    using FusedOptimizer::FusedOptimizer;                                                     \
                                                                                              \
    static rules::Rule##Hyper hyper(const Rule##Options& o) {                                 \
      rules::Rule##Hyper hyper;                                                               \
      FUSEDSTEP_OPTIONS_OF_##Rule(FUSEDSTEP_TAKE_NUMBER) return hyper;                        \
    }                                                                                         \
  };
FUSEDSTEP_PLAIN_RULES(FUSEDSTEP_PLAIN_OPTIMIZER)
#undef FUSEDSTEP_PLAIN_OPTIMIZER

}  // namespace fusedstep::optim
