#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

// kLambDecay: the decay is part of u. kLambDecoupled: it shrinks the weight first, outside of u. Not both.
enum LambFlag : unsigned { kLambDecay = 1, kLambDecoupled = 2 };

// As published, with what the known variants of LAMB do otherwise.
struct LambHyper {
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();

  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  double decoupled_decay = 0;
  double debias = 1;        // m and v are divided by 1 - beta^t
  double debias_lr = 0;     // lr is multiplied by sqrt(1 - beta2^t) / (1 - beta1^t)
  double always_adapt = 1;  // 0: the ratio is 1 without weight decay
  double max_weight_norm = kInfinity, min_ratio = 0, max_ratio = kInfinity;
  static constexpr const char* kNames[] = {"lr",           "beta1",           "beta2",     "eps",
                                           "weight_decay", "decoupled_decay", "debias",    "debias_lr",
                                           "always_adapt", "max_weight_norm", "min_ratio", "max_ratio"};

  constexpr unsigned flags() const {
    if (weight_decay == 0) return 0;
    return decoupled_decay != 0 ? kLambDecoupled : kLambDecay;
  }
};

template <class T>
struct LambScalars {
  T beta1, one_minus_beta1, beta2, one_minus_beta2, inv_bias1, inv_sqrt_bias2, eps, weight_decay, keep,
      neg_lr;
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
  static constexpr unsigned kFlagCombinations = 3;
  static constexpr StateSpec kAllStates[] = {{"exp_avg"}, {"exp_avg_sq", Sign::kNotNegative}};
  static constexpr int kStates = states_with(kAllStates, kFlags);

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double step) {
    const double bias1 = 1 - std::pow(h.beta1, step), bias2 = 1 - std::pow(h.beta2, step);
    return {T(h.beta1),
            T(1 - h.beta1),
            T(h.beta2),
            T(1 - h.beta2),
            T(h.debias != 0 ? 1 / bias1 : 1),
            T(h.debias != 0 ? 1 / std::sqrt(bias2) : 1),
            T(h.eps),
            T(h.weight_decay),
            T(1 - h.lr * h.weight_decay),
            T(h.debias_lr != 0 ? -h.lr * std::sqrt(bias2) / bias1 : -h.lr)};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V p, V g, States<V, kStates>& state) {
    V &m = state[0], &v = state[1];
    m = mul_add(V(s.one_minus_beta1), g, V(s.beta1) * m);
    v = mul_add(V(s.one_minus_beta2) * g, g, V(s.beta2) * v);
    const V u = V(s.inv_bias1) * m / mul_add(square_root(v), V(s.inv_sqrt_bias2), V(s.eps));
    return kFlags == kLambDecay ? mul_add(V(s.weight_decay), p, u) : u;
  }

  // The weight that moves along u, and whose norm the ratio takes.
  template <class V, class T>
  FUSEDSTEP_FN static V decayed(const Scalars<T>& s, V p) {
    return kFlags == kLambDecoupled ? V(s.keep) * p : p;
  }

  // Between the phases, once a tensor, from the squares of the two norms.
  FUSEDSTEP_FN static double trust_ratio(const Hyper& h, double weight_norm2, double update_norm2) {
    const bool adapts = h.always_adapt != 0 || h.weight_decay != 0;
    if (!adapts || weight_norm2 == 0 || update_norm2 == 0) return 1;
    const double weight_norm = std::min(std::sqrt(weight_norm2), h.max_weight_norm);
    return std::max(std::min(weight_norm / std::sqrt(update_norm2), h.max_ratio), h.min_ratio);  // keeps NaN
  }

  // Once a tensor: the number that `apply` multiplies u by. Denormal gradients make ratios beyond T. Their
  // product is then made in double and kept finite, since an infinite one turns elements without a gradient
  // into NaN.
  template <class T>
  FUSEDSTEP_FN static T factor(const Scalars<T>& s, double ratio) {
    const T product = s.neg_lr * T(ratio);
    if (is_finite(product) || !is_finite(ratio) || !is_finite(s.neg_lr)) return product;
    constexpr double kMost = std::numeric_limits<T>::max();
    return T(std::max(std::min(double(s.neg_lr) * ratio, kMost), -kMost));
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, T factor, V& p, V u) {
    p = mul_add(V(factor), u, decayed(s, p));
  }

 private:
  template <class T>
  FUSEDSTEP_FN static bool is_finite(T x) {
    return x - x == 0;  // NOLINT(misc-redundant-expression): NaN for infinities and NaN
  }
};

}  // namespace fusedstep::rules
