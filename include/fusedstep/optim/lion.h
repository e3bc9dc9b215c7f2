#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

#define FUSEDSTEP_LION_OPTIONS(X)                \
  X(double, lr, 1e-4)                            \
  X(TwoBetas, betas, std::make_tuple(0.9, 0.99)) \
  X(double, weight_decay, 0)                     \
  X(bool, maximize, false)                       \
  X(double, max_grad_norm, kNoLimit)

struct LionOptions : detail::BasicOptions<LionOptions> {
  FUSEDSTEP_OPTIONS(LionOptions, FUSEDSTEP_LION_OPTIONS)
};

struct LionParamState : ParamState<LionParamState, rules::Lion> {
  FUSEDSTEP_STATE(exp_avg)
};

// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2). For each tensor p
// with gradient g:
//
//   p = (1 - lr weight_decay) p - lr sign(beta1 m + (1 - beta1) g)
//   m = beta2 m + (1 - beta2) g
class Lion : public FusedOptimizer<Lion, LionOptions, LionParamState, rules::Lion> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static constexpr const char* kRule = "lion";

  static rules::LionHyper hyper(const LionOptions& o) {
    const auto [beta1, beta2] = o.betas();
    return {.lr = o.lr(), .beta1 = beta1, .beta2 = beta2, .weight_decay = o.weight_decay()};
  }
};

}  // namespace fusedstep::optim
