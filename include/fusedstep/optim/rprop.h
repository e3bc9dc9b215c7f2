#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

#define FUSEDSTEP_RPROP_OPTIONS(X)    \
  X(double, lr, 1e-2)                 \
  X(TwoNumbers, etas, 0.5, 1.2)       \
  X(TwoNumbers, step_sizes, 1e-6, 50) \
  X(bool, maximize, false)            \
  X(double, max_grad_norm, kNoLimit)

struct RpropOptions : detail::BasicOptions<RpropOptions> {
  FUSEDSTEP_OPTIONS(RpropOptions, FUSEDSTEP_RPROP_OPTIONS)
};

struct RpropParamState : ParamState<RpropParamState, rules::Rprop> {
  FUSEDSTEP_STATE(prev)
  FUSEDSTEP_STATE(step_size)
};

// Rprop (Riedmiller and Braun, "A Direct Adaptive Method for Faster Backpropagation Learning", 1993), with
// the options of torch's Python class. For each element p with gradient g and step size d, which starts at
// lr:
//
//   d = d etaplus if g has the sign of prev, d etaminus if it has the other, within step_sizes
//   g = 0 if it has the other
//   p = p - d sign(g),   prev = g
class Rprop : public FusedOptimizer<Rprop, RpropOptions, RpropParamState, rules::Rprop> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static void check(const RpropOptions& options) {
    options.check_ranges();
    const auto [etaminus, etaplus] = options.etas();
    TORCH_CHECK(0 < etaminus && etaminus < 1 && 1 < etaplus, "Invalid eta values: ", etaminus, ", ", etaplus);
  }
  static rules::RpropHyper hyper(const RpropOptions& o) {
    const auto [etaminus, etaplus] = o.etas();
    const auto [smallest, largest] = o.step_sizes();
    return {o.lr(), etaminus, etaplus, smallest, largest};
  }
  static double initial_value(const RpropOptions& options, std::string_view name, double otherwise) {
    return name == "step_size" ? options.lr() : otherwise;
  }
};

}  // namespace fusedstep::optim
