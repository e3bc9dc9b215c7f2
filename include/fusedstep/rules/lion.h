#pragma once
#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

#define FUSEDSTEP_OPTIONS_OF_Lion(X) \
  X(double, lr, 1e-4)                \
  X(TwoBetas, betas, 0.9, 0.99)      \
  X(double, weight_decay, 0)
#define FUSEDSTEP_STATES_OF_Lion(X) X(exp_avg)

struct LionHyper {
  FUSEDSTEP_HYPER(FUSEDSTEP_OPTIONS_OF_Lion)

  constexpr unsigned flags() const { return 0; }
};

template <class T>
struct LionScalars {
  T beta1, one_minus_beta1, beta2, one_minus_beta2, keep, neg_lr;
};

// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2). For each element p
// with gradient g:
//
//   p = (1 - lr weight_decay) p - lr sign(beta1 m + (1 - beta1) g)
//   m = beta2 m + (1 - beta2) g
template <unsigned kFlags>
struct Lion {
  using Hyper = LionHyper;
  template <class T>
  using Scalars = LionScalars<T>;
  static constexpr unsigned kFlagCombinations = 1;
  static constexpr StateSpec kAllStates[] = {FUSEDSTEP_STATES_OF_Lion(FUSEDSTEP_STATE_SPEC)};
  static constexpr int kStates = states_with(kAllStates, kFlags);

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double /*step*/) {
    return {T(h.beta1), T(1 - h.beta1), T(h.beta2), T(1 - h.beta2), T(1 - h.lr * h.weight_decay), T(-h.lr)};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V /*p*/, V g, States<V, kStates>& state) {
    V& m = state[0];
    const V u = sign_of(mul_add(V(s.one_minus_beta1), g, V(s.beta1) * m));
    m = mul_add(V(s.one_minus_beta2), g, V(s.beta2) * m);
    return u;
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, V& p, V u) {
    p = mul_add(V(s.neg_lr), u, V(s.keep) * p);
  }
};

}  // namespace fusedstep::rules
