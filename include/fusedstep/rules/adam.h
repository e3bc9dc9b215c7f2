#pragma once
#include <cmath>

#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

// kAdamCoupledDecay: the decay is added to the gradient. Decoupled, it is a factor of the weight.
enum AdamFlag : unsigned { kAdamAmsgrad = 1, kAdamCoupledDecay = 2 };

struct AdamHyper {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, amsgrad = 0,
         decoupled_weight_decay = 0;
  double eps_before_bias = 0;  // 1: eps is added before the bias of v is corrected
  double correct_bias = 1;     // 0: no bias is corrected
  double decay_last = 0;       // 1: the decoupled decay shrinks the weight after the step
  static constexpr const char* kNames[] = {"lr",
                                           "beta1",
                                           "beta2",
                                           "eps",
                                           "weight_decay",
                                           "amsgrad",
                                           "decoupled_weight_decay",
                                           "eps_before_bias",
                                           "correct_bias",
                                           "decay_last"};

  constexpr unsigned flags() const {
    const bool coupled_decay = weight_decay != 0 && decoupled_weight_decay == 0;
    return (amsgrad != 0) * kAdamAmsgrad | coupled_decay * kAdamCoupledDecay;
  }
};

template <class T>
struct AdamScalars {
  Average<T> first;
  T beta2, one_minus_beta2, inv_sqrt_bias2, eps, weight_decay, keep, neg_step_size;
};

// Adam (Kingma and Ba, 2015, algorithm 1), AMSGrad (Reddi et al., 2018, algorithm 2) and AdamW (Loshchilov
// and Hutter, 2019, algorithm 2), in torch's form: AMSGrad takes the maximum of v before its bias is
// corrected.
//
//   m = m + (1 - beta1) (g - m)        v = beta2 v + (1 - beta2) g^2
//   p = (1 - lr wd) p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// AdamW of transformers, which GaLore's and APOLLO's authors took over, has eps_before_bias and decay_last:
//
//   p = (1 - lr wd) (p - lr sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps))
//
// Without correct_bias both bias corrections are 1. These three change the scalars of a step alone: a factor
// of one changes no bit.
template <unsigned kFlags>
struct Adam {
  using Hyper = AdamHyper;
  template <class T>
  using Scalars = AdamScalars<T>;
  static constexpr unsigned kFlagCombinations = 4;
  static constexpr StateSpec kAllStates[] = {
      {"exp_avg"}, {"exp_avg_sq", Sign::kNotNegative}, {"max_exp_avg_sq", Sign::kNotNegative, kAdamAmsgrad}};
  static constexpr int kStates = states_with(kAllStates, kFlags);

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double step) {
    const bool corrects = h.correct_bias != 0, adds_eps_first = h.eps_before_bias != 0;
    const double bias1 = corrects ? 1 - std::pow(h.beta1, step) : 1;
    const double root_bias2 = corrects ? std::sqrt(1 - std::pow(h.beta2, step)) : 1;
    const double keep = h.decoupled_weight_decay != 0 ? 1 - h.lr * h.weight_decay : 1;
    return {Average<T>::of(h.beta1),
            T(h.beta2),
            T(1 - h.beta2),
            T(adds_eps_first ? 1 : 1 / root_bias2),
            T(h.eps),
            T(h.weight_decay),
            T(keep),
            T(-h.lr / bias1 * (adds_eps_first ? root_bias2 : 1) * (h.decay_last != 0 ? keep : 1))};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V p, V g, States<V, kStates>& state) {
    V &m = state[0], &v = state[1], &largest = state[kStates - 1];
    if constexpr (kFlags & kAdamCoupledDecay) g = mul_add(V(s.weight_decay), p, g);
    m = s.first(m, g);
    v = mul_add(V(s.one_minus_beta2) * g, g, V(s.beta2) * v);
    if constexpr (kFlags & kAdamAmsgrad) largest = maximum(largest, v);
    return m / mul_add(square_root(largest), V(s.inv_sqrt_bias2), V(s.eps));
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, V& p, V u) {
    p = mul_add(V(s.neg_step_size), u, V(s.keep) * p);
  }
};

}  // namespace fusedstep::rules
