#pragma once
#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

enum AdadeltaFlag : unsigned { kAdadeltaDecay = 1 };

struct AdadeltaHyper {
  double lr = 1, rho = 0.9, eps = 1e-6, weight_decay = 0;
  static constexpr const char* kNames[] = {"lr", "rho", "eps", "weight_decay"};

  constexpr unsigned flags() const { return (weight_decay != 0) * kAdadeltaDecay; }
};

template <class T>
struct AdadeltaScalars {
  T rho, one_minus_rho, eps, weight_decay, neg_lr;
};

// Adadelta (Zeiler, 2012, algorithm 1), with torch's learning rate.
//
//   v = rho v + (1 - rho) g^2          d = sqrt(a + eps) / sqrt(v + eps) * g
//   a = rho a + (1 - rho) d^2          p = p - lr d
template <unsigned kFlags>
struct Adadelta {
  using Hyper = AdadeltaHyper;
  template <class T>
  using Scalars = AdadeltaScalars<T>;
  static constexpr unsigned kFlagCombinations = 2;
  static constexpr StateSpec kAllStates[] = {{"square_avg", Sign::kNotNegative},
                                             {"acc_delta", Sign::kNotNegative}};
  static constexpr int kStates = states_with(kAllStates, kFlags);

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double /*step*/) {
    return {T(h.rho), T(1 - h.rho), T(h.eps), T(h.weight_decay), T(-h.lr)};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V p, V g, States<V, kStates>& state) {
    V &v = state[0], &a = state[1];
    if constexpr (kFlags & kAdadeltaDecay) g = mul_add(V(s.weight_decay), p, g);
    v = mul_add(V(s.one_minus_rho) * g, g, V(s.rho) * v);
    const V u = square_root(a + V(s.eps)) / square_root(v + V(s.eps)) * g;
    a = mul_add(V(s.one_minus_rho) * u, u, V(s.rho) * a);
    return u;
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, V& p, V u) {
    p = mul_add(V(s.neg_lr), u, p);
  }
};

}  // namespace fusedstep::rules
