// Phases of a rule make a step. `direction` takes the states forward and returns the update; `apply` moves
// the weight along it. A rule with norms has a number for each tensor between the two.
#pragma once
#include "fusedstep/vocabulary.h"

namespace fusedstep {

template <class Rule>
inline constexpr bool kHasNorms = requires {
  &Rule::trust_ratio;
};

// A step of a rule without norms: the update stays in a register.
template <class Rule, class Scalars, class V, class States>
FUSEDSTEP_FN void update(const Scalars& scalars, V& p, const V& g, States& state) {
  const V u = Rule::direction(scalars, p, g, state);
  Rule::apply(scalars, p, u);
}

}  // namespace fusedstep
