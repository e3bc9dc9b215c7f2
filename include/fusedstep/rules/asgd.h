#pragma once
#include <cmath>

#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

enum ASGDFlag : unsigned { kASGDDecay = 1 };

struct ASGDHyper {
  double lr = 1e-2, lambd = 1e-4, alpha = 0.75, t0 = 1e6, weight_decay = 0;
  static constexpr const char* kNames[] = {"lr", "lambd", "alpha", "t0", "weight_decay"};

  constexpr unsigned flags() const { return (weight_decay != 0) * kASGDDecay; }
};

template <class T>
struct ASGDScalars {
  T weight_decay, keep, neg_eta, mu;
};

// Averaged SGD (Polyak and Juditsky, 1992), in torch's form: a step computes eta and mu for the next one.
//
//   p = (1 - lambd eta) p - eta g              a = a + mu (p - a), which is p while mu is 1
//   eta = lr / (1 + lambd lr t)^alpha          mu = 1 / max(1, t - t0)
template <unsigned kFlags>
struct ASGD {
  using Hyper = ASGDHyper;
  template <class T>
  using Scalars = ASGDScalars<T>;
  static constexpr unsigned kFlagCombinations = 2;
  static constexpr StateSpec kAllStates[] = {{"ax"}};
  static constexpr int kStates = states_with(kAllStates, kFlags);
  static constexpr NumberSpec kNumbers[] = {{"eta", 1e-2F}, {"mu", 1}};

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double step, double* numbers) {
    const double eta = numbers[0], mu = numbers[1];
    numbers[0] = static_cast<float>(h.lr / std::pow(1 + h.lambd * h.lr * step, h.alpha));
    numbers[1] = static_cast<float>(1 / maximum(1.0, step - h.t0));
    return {T(h.weight_decay), T(1 - h.lambd * eta), T(-eta), T(mu)};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V p, V g, States<V, kStates>& state) {
    V& mean = state[0];
    if constexpr (kFlags & kASGDDecay) g = mul_add(V(s.weight_decay), p, g);
    apply(s, p, g);
    mean = where_equal(V(s.mu), V(T(1)), p, mul_add(V(s.mu), p - mean, mean));
    return g;
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, V& p, V u) {
    p = mul_add(V(s.neg_eta), u, V(s.keep) * p);
  }
};

}  // namespace fusedstep::rules
