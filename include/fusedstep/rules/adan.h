#pragma once
#include <cmath>

#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

struct AdanHyper {
  double lr = 1e-3, beta1 = 0.98, beta2 = 0.92, beta3 = 0.99, eps = 1e-8, weight_decay = 0;
  double no_prox = 0;  // 1: the decay shrinks the weight before the step, as AdamW's; otherwise after it
  static constexpr const char* kNames[] = {"lr", "beta1", "beta2", "beta3", "eps", "weight_decay", "no_prox"};

  constexpr unsigned flags() const { return 0; }
};

template <class T>
struct AdanScalars {
  T beta1, one_minus_beta1, beta2, one_minus_beta2, beta3, one_minus_beta3, has_previous, inv_sqrt_bias3, eps,
      neg_step_size, neg_diff_step_size, keep_before, keep_after;
};

// Adan (Xie et al., 2022, algorithm 1, whose betas are one minus these), with its authors' bias corrections.
//
//   d = g - previous g                 (0 at the first step)
//   m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) d
//   n = beta3 n + (1 - beta3) (g + beta2 d)^2
//   u = (m / (1 - beta1^t) + beta2 v / (1 - beta2^t)) / (sqrt(n / (1 - beta3^t)) + eps)
//   p = (p - lr u) / (1 + lr wd)       with no_prox   p = (1 - lr wd) p - lr u
//
// `direction` returns -lr u, since the two terms of u have step sizes of their own.
//
// Both ways of decay are factors of one formula, and so is the first step's missing difference: a factor of
// one changes no bit.
template <unsigned kFlags>
struct Adan {
  using Hyper = AdanHyper;
  template <class T>
  using Scalars = AdanScalars<T>;
  static constexpr unsigned kFlagCombinations = 1;
  static constexpr StateSpec kAllStates[] = {
      {"exp_avg"}, {"exp_avg_sq", Sign::kNotNegative}, {"exp_avg_diff"}, {"neg_pre_grad"}};
  static constexpr int kStates = states_with(kAllStates, kFlags);

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double step) {
    const double bias1 = 1 - std::pow(h.beta1, step), bias2 = 1 - std::pow(h.beta2, step);
    const double decay = h.lr * h.weight_decay;
    return {T(h.beta1),
            T(1 - h.beta1),
            T(h.beta2),
            T(1 - h.beta2),
            T(h.beta3),
            T(1 - h.beta3),
            T(step > 1 ? 1 : 0),
            T(1 / std::sqrt(1 - std::pow(h.beta3, step))),
            T(h.eps),
            T(-h.lr / bias1),
            T(-h.lr * h.beta2 / bias2),
            T(h.no_prox != 0 ? 1 - decay : 1),
            T(h.no_prox != 0 ? 1 : 1 / (1 + decay))};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V, V g, States<V, kStates>& state) {
    V &m = state[0], &n = state[1], &v = state[2], &neg_previous = state[3];
    const V difference = V(s.has_previous) * (g + neg_previous);
    m = mul_add(V(s.one_minus_beta1), g, V(s.beta1) * m);
    v = mul_add(V(s.one_minus_beta2), difference, V(s.beta2) * v);
    const V ahead = mul_add(V(s.beta2), difference, g);
    n = mul_add(V(s.one_minus_beta3) * ahead, ahead, V(s.beta3) * n);
    const V denominator = mul_add(square_root(n), V(s.inv_sqrt_bias3), V(s.eps));
    neg_previous = -g;
    return mul_add(V(s.neg_step_size), m, V(s.neg_diff_step_size) * v) / denominator;
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, V& p, V u) {
    p = V(s.keep_after) * mul_add(V(s.keep_before), p, u);
  }
};

}  // namespace fusedstep::rules
