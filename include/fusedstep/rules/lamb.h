#pragma once
#include <cmath>

#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

struct LambHyper {
  double lr, beta1, beta2, eps, weight_decay;
};

enum LambFlag : unsigned { kLambMaximize = 1, kLambDecay = 2 };

template <class T>
struct LambScalars {
  T beta1, one_minus_beta1, beta2, one_minus_beta2, inv_bias1, inv_sqrt_bias2, eps, weight_decay, neg_lr;
};

// LAMB (You et al., 2020, algorithm 2, with phi(z) = z).
//
//   m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
//   u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + wd p
//   p = p - lr * |p| / |u| * u         (the ratio is 1 where a norm is 0)
template <unsigned kFlags>
struct Lamb {
  using Hyper = LambHyper;
  template <class T>
  using Scalars = LambScalars<T>;
  static constexpr unsigned kFlagCombinations = 4;
  static constexpr int kStates = 2;

  template <class T>
  static Scalars<T> prepare(const Hyper& h, double step) {
    const double bias1 = 1 - std::pow(h.beta1, step), bias2 = 1 - std::pow(h.beta2, step);
    return {T(h.beta1), T(1 - h.beta1),    T(h.beta2), T(1 - h.beta2), T(1 / bias1), T(1 / std::sqrt(bias2)),
            T(h.eps),   T(h.weight_decay), T(-h.lr)};
  }

  // Phase 1: new moments; returns u and adds p and u to the norms.
  template <class V, class T, class Norms>
  FUSEDSTEP_FN static V accumulate(const Scalars<T>& s, V p, V g, V (&state)[kStates], Norms& norms) {
    V &m = state[0], &v = state[1];
    if constexpr (kFlags & kLambMaximize) g = -g;
    m = mul_add(V(s.one_minus_beta1), g, V(s.beta1) * m);
    v = mul_add(V(s.one_minus_beta2) * g, g, V(s.beta2) * v);
    const V denominator = mul_add(square_root(v), V(s.inv_sqrt_bias2), V(s.eps));
    V u = V(s.inv_bias1) * m / denominator;
    if constexpr (kFlags & kLambDecay) u = mul_add(V(s.weight_decay), p, u);
    norms.add(p, u);
    return u;
  }

  // Between the phases, once a tensor, from the squares of the two norms.
  static double trust_ratio(double weight_norm2, double update_norm2) {
    return weight_norm2 == 0 || update_norm2 == 0 ? 1 : std::sqrt(weight_norm2) / std::sqrt(update_norm2);
  }

  // Phase 2.
  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, T ratio, V& p, V u) {
    p = mul_add(V(s.neg_lr * ratio), u, p);
  }
};

}  // namespace fusedstep::rules
