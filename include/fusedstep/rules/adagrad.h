#pragma once
#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

enum AdagradFlag : unsigned { kAdagradDecay = 1 };

struct AdagradHyper {
  double lr = 1e-2, lr_decay = 0, weight_decay = 0, eps = 1e-10;
  static constexpr const char* kNames[] = {"lr", "lr_decay", "weight_decay", "eps"};

  constexpr unsigned flags() const { return (weight_decay != 0) * kAdagradDecay; }
};

template <class T>
struct AdagradScalars {
  T weight_decay, eps, neg_lr;
};

// Adagrad (Duchi, Hazan and Singer, 2011, section 1.1), in torch's form.
//
//   s = s + g^2        p = p - lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps)
template <unsigned kFlags>
struct Adagrad {
  using Hyper = AdagradHyper;
  template <class T>
  using Scalars = AdagradScalars<T>;
  static constexpr unsigned kFlagCombinations = 2;
  static constexpr StateSpec kAllStates[] = {{"sum", Sign::kNotNegative}};
  static constexpr int kStates = states_with(kAllStates, kFlags);
  // True if a sparse gradient's step is that of its rows alone.
  static constexpr bool kZeroGradChangesNothing = !(kFlags & kAdagradDecay);

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double step) {
    return {T(h.weight_decay), T(h.eps), T(-h.lr / (1 + (step - 1) * h.lr_decay))};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V p, V g, States<V, kStates>& state) {
    V& sum = state[0];
    if constexpr (kFlags & kAdagradDecay) g = mul_add(V(s.weight_decay), p, g);
    sum = mul_add(g, g, sum);
    return g / (square_root(sum) + V(s.eps));
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, V& p, V u) {
    p = mul_add(V(s.neg_lr), u, p);
  }
};

}  // namespace fusedstep::rules
