#pragma once
#include <cmath>

#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

// The decay is added to the gradient. Decoupled, it is a factor of the weight.
enum NAdamFlag : unsigned { kNAdamCoupledDecay = 1 };

struct NAdamHyper {
  double lr = 2e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, momentum_decay = 4e-3,
         decoupled_weight_decay = 0;
  static constexpr const char* kNames[] = {
      "lr", "beta1", "beta2", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay"};

  constexpr unsigned flags() const {
    return (weight_decay != 0 && decoupled_weight_decay == 0) * kNAdamCoupledDecay;
  }
};

template <class T>
struct NAdamScalars {
  Average<T> first;
  T beta2, one_minus_beta2, inv_sqrt_bias2, eps, weight_decay, keep, grad_share, mean_share, neg_lr;
};

// NAdam (Dozat, 2016, algorithm 2), in torch's form.
//
//   mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2)        q_t = mu_1 mu_2 ... mu_t
//   m = m + (1 - beta1) (g - m)        v = beta2 v + (1 - beta2) g^2
//   u = mu_(t+1) m / (1 - q_(t+1)) + (1 - mu_t) g / (1 - q_t)
//   p = p - lr u / (sqrt(v / (1 - beta2^t)) + eps)
template <unsigned kFlags>
struct NAdam {
  using Hyper = NAdamHyper;
  template <class T>
  using Scalars = NAdamScalars<T>;
  static constexpr unsigned kFlagCombinations = 2;
  static constexpr StateSpec kAllStates[] = {{"exp_avg"}, {"exp_avg_sq", Sign::kNotNegative}};
  static constexpr int kStates = states_with(kAllStates, kFlags);
  static constexpr NumberSpec kNumbers[] = {{"mu_product", 1}};

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double step, double* numbers) {
    const double mu = h.beta1 * (1 - 0.5 * std::pow(0.96, step * h.momentum_decay));
    const double next_mu = h.beta1 * (1 - 0.5 * std::pow(0.96, (step + 1) * h.momentum_decay));
    numbers[0] = static_cast<float>(numbers[0]) * static_cast<float>(mu);  // rounded as torch's
    return {Average<T>::of(h.beta1),
            T(h.beta2),
            T(1 - h.beta2),
            T(1 / std::sqrt(1 - std::pow(h.beta2, step))),
            T(h.eps),
            T(h.weight_decay),
            T(h.decoupled_weight_decay != 0 ? 1 - h.lr * h.weight_decay : 1),
            T((1 - mu) / (1 - numbers[0])),
            T(next_mu / (1 - numbers[0] * next_mu)),
            T(-h.lr)};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V p, V g, States<V, kStates>& state) {
    V &m = state[0], &v = state[1];
    if constexpr (kFlags & kNAdamCoupledDecay) g = mul_add(V(s.weight_decay), p, g);
    m = s.first(m, g);
    v = mul_add(V(s.one_minus_beta2) * g, g, V(s.beta2) * v);
    const V denominator = mul_add(square_root(v), V(s.inv_sqrt_bias2), V(s.eps));
    return mul_add(V(s.mean_share), m, V(s.grad_share) * g) / denominator;
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, V& p, V u) {
    p = mul_add(V(s.neg_lr), u, V(s.keep) * p);
  }
};

}  // namespace fusedstep::rules
