#pragma once
#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

// kSGDNesterov stands in the place of kSGDMomentum, not beside it.
enum SGDFlag : unsigned { kSGDDecay = 1, kSGDMomentum = 2, kSGDNesterov = 4 };

struct SGDHyper {
  double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0, nesterov = 0;
  static constexpr const char* kNames[] = {"lr", "momentum", "dampening", "weight_decay", "nesterov"};

  constexpr unsigned flags() const {
    const unsigned kind = nesterov != 0 ? kSGDNesterov : kSGDMomentum;
    return (weight_decay != 0) * kSGDDecay | (momentum != 0) * kind;
  }
};

template <class T>
struct SGDScalars {
  T momentum, grad_share, weight_decay, neg_lr;
};

// SGD with momentum (Sutskever et al., 2013), in torch's form: the first gradient is not dampened.
//
//   g = g + wd p
//   b = momentum b + (1 - dampening) g                       (b = g at the first step)
//   p = p - lr b        with nesterov   p = p - lr (g + momentum b)
template <unsigned kFlags>
struct SGD {
  using Hyper = SGDHyper;
  template <class T>
  using Scalars = SGDScalars<T>;
  static constexpr unsigned kFlagCombinations = 6;
  static constexpr StateSpec kAllStates[] = {{"momentum_buffer", Sign::kAny, kSGDMomentum | kSGDNesterov}};
  static constexpr int kStates = states_with(kAllStates, kFlags);
  // True if a sparse gradient's step is that of its rows alone.
  static constexpr bool kZeroGradChangesNothing = kFlags == 0;

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double step) {
    return {T(h.momentum), T(step == 1 ? 1 : 1 - h.dampening), T(h.weight_decay), T(-h.lr)};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V p, V g, States<V, kStates>& state) {
    if constexpr (kFlags & kSGDDecay) g = mul_add(V(s.weight_decay), p, g);
    if constexpr (kStates == 0) {
      return g;
    } else {
      V& buffer = state[0];
      buffer = mul_add(V(s.momentum), buffer, V(s.grad_share) * g);
      return kFlags & kSGDNesterov ? mul_add(V(s.momentum), buffer, g) : buffer;
    }
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, V& p, V u) {
    p = mul_add(V(s.neg_lr), u, p);
  }
};

}  // namespace fusedstep::rules
