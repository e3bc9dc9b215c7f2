#pragma once
#include <cmath>

#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

// The decay is added to the gradient. Decoupled, it is a factor of the weight.
enum ADOPTFlag : unsigned { kADOPTCoupledDecay = 1 };

#define FUSEDSTEP_OPTIONS_OF_ADOPT(X) \
  X(double, lr, 1e-3)                 \
  X(TwoBetas, betas, 0.9, 0.9999)     \
  X(double, eps, 1e-6)                \
  X(double, weight_decay, 0)          \
  X(double, clip_exp, 0.25)           \
  X(bool, decoupled_weight_decay, false)
#define FUSEDSTEP_STATES_OF_ADOPT(X) \
  X(exp_avg)                         \
  X(exp_avg_sq, Sign::kNotNegative)

struct ADOPTHyper {
  FUSEDSTEP_HYPER(FUSEDSTEP_OPTIONS_OF_ADOPT)

  constexpr unsigned flags() const {
    return (weight_decay != 0 && decoupled_weight_decay == 0) * kADOPTCoupledDecay;
  }
};

template <class T>
struct ADOPTScalars {
  Average<T> first;
  T beta2, one_minus_beta2, eps, is_later, neg_bound, weight_decay, keep, neg_lr;
};

// ADOPT (Taniguchi et al., "ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate", 2024,
// algorithm 2). For each element p with gradient g, at step t:
//
//   g = g + weight_decay p                                   (unless decoupled_weight_decay)
//   t = 1:  v = g^2
//   t > 1:  u = g / max(sqrt(v), eps),   within -+ (t - 1)^clip_exp
//           m = m + (1 - beta1) (u - m)
//           p = p - lr weight_decay p                        (if decoupled_weight_decay)
//           p = p - lr m
//           v = beta2 v + (1 - beta2) g^2
//
// An infinite clip_exp bounds nothing.
template <unsigned kFlags>
struct ADOPT {
  using Hyper = ADOPTHyper;
  template <class T>
  using Scalars = ADOPTScalars<T>;
  static constexpr unsigned kFlagCombinations = 2;
  static constexpr StateSpec kAllStates[] = {FUSEDSTEP_STATES_OF_ADOPT(FUSEDSTEP_STATE_SPEC)};
  static constexpr int kStates = states_with(kAllStates, kFlags);

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double step) {
    const bool is_later = step > 1;
    const double bound = std::isinf(h.clip_exp) ? h.clip_exp : std::pow(step - 1, h.clip_exp);
    return {Average<T>::of(h.beta1),
            T(is_later ? h.beta2 : 0),
            T(is_later ? 1 - h.beta2 : 1),
            T(h.eps),
            T(is_later ? 1 : 0),
            T(-bound),
            T(h.weight_decay),
            T(is_later && h.decoupled_weight_decay != 0 ? 1 - h.lr * h.weight_decay : 1),
            T(is_later ? -h.lr : 0)};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V p, V g, States<V, kStates>& state) {
    V &m = state[0], &v = state[1];
    if constexpr (kFlags & kADOPTCoupledDecay) g = mul_add(V(s.weight_decay), p, g);
    const V not_below = maximum(g / maximum(square_root(v), V(s.eps)), V(s.neg_bound));
    const V u = -maximum(-not_below, V(s.neg_bound));
    m = s.first(m, where_equal(V(s.is_later), V(T(0)), V(T(0)), u));
    v = mul_add(V(s.one_minus_beta2) * g, g, V(s.beta2) * v);
    return m;
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, V& p, V u) {
    p = mul_add(V(s.neg_lr), u, V(s.keep) * p);
  }
};

}  // namespace fusedstep::rules
