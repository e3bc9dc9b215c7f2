#pragma once
#include <cmath>

#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

// The decay is added to the gradient. Decoupled, it is a factor of the weight.
enum RAdamFlag : unsigned { kRAdamCoupledDecay = 1 };

#define FUSEDSTEP_OPTIONS_OF_RAdam(X) \
  X(double, lr, 1e-3)                 \
  X(TwoBetas, betas, 0.9, 0.999)      \
  X(double, eps, 1e-8)                \
  X(double, weight_decay, 0)          \
  X(bool, decoupled_weight_decay, false)
#define FUSEDSTEP_STATES_OF_RAdam(X) \
  X(exp_avg)                         \
  X(exp_avg_sq, Sign::kNotNegative)

struct RAdamHyper {
  FUSEDSTEP_HYPER(FUSEDSTEP_OPTIONS_OF_RAdam)

  constexpr unsigned flags() const {
    return (weight_decay != 0 && decoupled_weight_decay == 0) * kRAdamCoupledDecay;
  }
};

template <class T>
struct RAdamScalars {
  Average<T> first;
  T beta2, one_minus_beta2, eps, is_rectified, weight_decay, keep, neg_step_size;
};

// RAdam (Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", 2020, algorithm 2), with
// torch's options and in torch's form: eps is added before the bias is corrected. For each element p with
// gradient g, at step t:
//
//   g = g + weight_decay p                                   (unless decoupled_weight_decay)
//   p = p - lr weight_decay p                                (if decoupled_weight_decay)
//   m = m + (1 - beta1) (g - m)        v = beta2 v + (1 - beta2) g^2
//   rho = rho_inf - 2 t beta2^t / (1 - beta2^t)        rho_inf = 2 / (1 - beta2) - 1
//   rho > 5:    p = p - lr / (1 - beta1^t) * r * m * sqrt(1 - beta2^t) / (sqrt(v) + eps)
//   otherwise:  p = p - lr / (1 - beta1^t) * m
//   r = sqrt((rho - 4) (rho - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho))
template <unsigned kFlags>
struct RAdam {
  using Hyper = RAdamHyper;
  template <class T>
  using Scalars = RAdamScalars<T>;
  static constexpr unsigned kFlagCombinations = 2;
  static constexpr StateSpec kAllStates[] = {FUSEDSTEP_STATES_OF_RAdam(FUSEDSTEP_STATE_SPEC)};
  static constexpr int kStates = states_with(kAllStates, kFlags);

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double step) {
    const double power2 = std::pow(h.beta2, step), bias1 = 1 - std::pow(h.beta1, step), bias2 = 1 - power2;
    const double longest = 2 / (1 - h.beta2) - 1, length = longest - 2 * step * power2 / bias2;
    const bool rectified = length > 5;
    double step_size = h.lr / bias1;
    if (rectified) {
      const double rectification =
          (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length);
      step_size *= std::sqrt(rectification * bias2);
    }
    return {Average<T>::of(h.beta1),
            T(h.beta2),
            T(1 - h.beta2),
            T(h.eps),
            T(rectified ? 1 : 0),
            T(h.weight_decay),
            T(h.decoupled_weight_decay != 0 ? 1 - h.lr * h.weight_decay : 1),
            T(-step_size)};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V p, V g, States<V, kStates>& state) {
    V &m = state[0], &v = state[1];
    if constexpr (kFlags & kRAdamCoupledDecay) g = mul_add(V(s.weight_decay), p, g);
    m = s.first(m, g);
    v = mul_add(V(s.one_minus_beta2) * g, g, V(s.beta2) * v);
    return where_equal(V(s.is_rectified), V(T(1)), m / (square_root(v) + V(s.eps)), m);
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, V& p, V u) {
    p = mul_add(V(s.neg_step_size), u, V(s.keep) * p);
  }
};

}  // namespace fusedstep::rules
