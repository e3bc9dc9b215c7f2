#pragma once
#include <cmath>

#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

enum AdamaxFlag : unsigned { kAdamaxDecay = 1 };

#define FUSEDSTEP_OPTIONS_OF_Adamax(X) \
  X(double, lr, 2e-3)                  \
  X(TwoBetas, betas, 0.9, 0.999)       \
  X(double, eps, 1e-8)                 \
  X(double, weight_decay, 0)
#define FUSEDSTEP_STATES_OF_Adamax(X) \
  X(exp_avg)                          \
  X(exp_inf, Sign::kNotNegative)

struct AdamaxHyper {
  FUSEDSTEP_HYPER(FUSEDSTEP_OPTIONS_OF_Adamax)

  constexpr unsigned flags() const { return (weight_decay != 0) * kAdamaxDecay; }
};

template <class T>
struct AdamaxScalars {
  Average<T> first;
  T beta2, eps, weight_decay, neg_step_size;
};

// Adamax (Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 2), with torch's
// options and in torch's form: eps is added to |g|. For each element p with gradient g, at step t:
//
//   g = g + weight_decay p
//   m = m + (1 - beta1) (g - m)        u = max(beta2 u, |g| + eps)
//   p = p - lr / (1 - beta1^t) * m / u
template <unsigned kFlags>
struct Adamax {
  using Hyper = AdamaxHyper;
  template <class T>
  using Scalars = AdamaxScalars<T>;
  static constexpr unsigned kFlagCombinations = 2;
  static constexpr StateSpec kAllStates[] = {FUSEDSTEP_STATES_OF_Adamax(FUSEDSTEP_STATE_SPEC)};
  static constexpr int kStates = states_with(kAllStates, kFlags);

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double step) {
    return {Average<T>::of(h.beta1), T(h.beta2), T(h.eps), T(h.weight_decay),
            T(-h.lr / (1 - std::pow(h.beta1, step)))};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V p, V g, States<V, kStates>& state) {
    V &m = state[0], &largest = state[1];
    if constexpr (kFlags & kAdamaxDecay) g = mul_add(V(s.weight_decay), p, g);
    m = s.first(m, g);
    largest = maximum(V(s.beta2) * largest, absolute(g) + V(s.eps));
    return m / largest;
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, V& p, V u) {
    p = mul_add(V(s.neg_step_size), u, p);
  }
};

}  // namespace fusedstep::rules
