#pragma once
#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

enum RMSpropFlag : unsigned { kRMSpropDecay = 1, kRMSpropMomentum = 2, kRMSpropCentered = 4 };

#define FUSEDSTEP_OPTIONS_OF_RMSprop(X) \
  X(double, lr, 1e-2)                   \
  X(double, alpha, 0.99)                \
  X(double, eps, 1e-8)                  \
  X(double, weight_decay, 0)            \
  X(double, momentum, 0)                \
  X(bool, centered, false)
#define FUSEDSTEP_STATES_OF_RMSprop(X)             \
  X(square_avg, Sign::kNotNegative)                \
  X(momentum_buffer, Sign::kAny, kRMSpropMomentum) \
  X(grad_avg, Sign::kAny, kRMSpropCentered)

struct RMSpropHyper {
  FUSEDSTEP_HYPER(FUSEDSTEP_OPTIONS_OF_RMSprop)

  constexpr unsigned flags() const {
    return (weight_decay != 0) * kRMSpropDecay | (momentum > 0) * kRMSpropMomentum |
           (centered != 0) * kRMSpropCentered;
  }
};

template <class T>
struct RMSpropScalars {
  Average<T> average;
  T alpha, eps, weight_decay, momentum, neg_lr;
};

// RMSprop (Tieleman and Hinton, "Neural Networks for Machine Learning", lecture 6e, 2012), with momentum and,
// centered, with the variance in place of the mean square (Graves, 2013, equations 38 to 41), with torch's
// options and in torch's form. Averages without memory have no variance: where alpha is 0, v and a^2 are the
// same number, and their difference would be a rounding error. For each element p with gradient g:
//
//   g = g + weight_decay p
//   v = alpha v + (1 - alpha) g^2        a = a + (1 - alpha) (g - a)
//   b = momentum b + g / (sqrt(v) + eps)            centered: sqrt(v - a^2)
//   p = p - lr b
template <unsigned kFlags>
struct RMSprop {
  using Hyper = RMSpropHyper;
  template <class T>
  using Scalars = RMSpropScalars<T>;
  static constexpr unsigned kFlagCombinations = 8;
  static constexpr StateSpec kAllStates[] = {FUSEDSTEP_STATES_OF_RMSprop(FUSEDSTEP_STATE_SPEC)};
  static constexpr int kStates = states_with(kAllStates, kFlags);

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double /*step*/) {
    return {Average<T>::of(h.alpha), T(h.alpha), T(h.eps), T(h.weight_decay), T(h.momentum), T(-h.lr)};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V p, V g, States<V, kStates>& state) {
    V& square = state[0];
    if constexpr (kFlags & kRMSpropDecay) g = mul_add(V(s.weight_decay), p, g);
    square = mul_add(V(s.average.share) * g, g, V(s.alpha) * square);
    V variance = square;
    if constexpr (kFlags & kRMSpropCentered) {
      V& mean = state[kStates - 1];
      mean = s.average(mean, g);
      // States have been rounded: the difference of two that are nearly equal may lie below 0.
      const V zero(T(0)), rounded = maximum(mul_add(-mean, mean, square), zero);
      variance = where_equal(V(s.alpha), zero, zero, rounded);
    }
    V u = g / (square_root(variance) + V(s.eps));
    if constexpr (kFlags & kRMSpropMomentum) {
      V& buffer = state[1];
      u = buffer = mul_add(V(s.momentum), buffer, u);
    }
    return u;
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, V& p, V u) {
    p = mul_add(V(s.neg_lr), u, p);
  }
};

}  // namespace fusedstep::rules
