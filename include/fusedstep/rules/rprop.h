#pragma once
#include "fusedstep/rules/specs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

struct RpropHyper {
  double lr = 1e-2, etaminus = 0.5, etaplus = 1.2, step_size_min = 1e-6, step_size_max = 50;
  static constexpr const char* kNames[] = {"lr", "etaminus", "etaplus", "step_size_min", "step_size_max"};

  constexpr unsigned flags() const { return 0; }
};

template <class T>
struct RpropScalars {
  T etaminus, etaplus, smallest, neg_largest;
};

// Rprop (Riedmiller and Braun, 1993), in torch's form. lr is what d is before the first step.
//
//   s = sign(g previous g)
//   d = d etaplus if s > 0, d etaminus if s < 0, between step_size_min and step_size_max
//   g = 0 if s < 0          p = p - d sign(g)
template <unsigned kFlags>
struct Rprop {
  using Hyper = RpropHyper;
  template <class T>
  using Scalars = RpropScalars<T>;
  static constexpr unsigned kFlagCombinations = 1;
  static constexpr StateSpec kAllStates[] = {{"prev"}, {"step_size", Sign::kNotNegative}};
  static constexpr int kStates = states_with(kAllStates, kFlags);

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double /*step*/) {
    return {T(h.etaminus), T(h.etaplus), T(h.step_size_min), T(-h.step_size_max)};
  }

  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>& s, V /*p*/, V g, States<V, kStates>& state) {
    V &previous = state[0], &size = state[1];
    const V one(T(1)), zero(T(0)), turned(T(-1));
    const V sign = sign_of(g) * sign_of(previous);  // the product of tiny gradients would be 0
    const V factor = where_equal(sign, one, V(s.etaplus), where_equal(sign, turned, V(s.etaminus), one));
    size = zero - maximum(zero - maximum(size * factor, V(s.smallest)), V(s.neg_largest));
    previous = where_equal(sign, turned, zero, g);
    return sign_of(previous) * size;
  }

  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& /*s*/, V& p, V u) {
    p = p - u;
  }
};

}  // namespace fusedstep::rules
