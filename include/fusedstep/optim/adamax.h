#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

#define FUSEDSTEP_ADAMAX_OPTIONS(X)               \
  X(double, lr, 2e-3)                             \
  X(TwoBetas, betas, std::make_tuple(0.9, 0.999)) \
  X(double, eps, 1e-8)                            \
  X(double, weight_decay, 0)                      \
  X(bool, maximize, false)                        \
  X(double, max_grad_norm, kNoLimit)

struct AdamaxOptions : detail::BasicOptions<AdamaxOptions> {
  FUSEDSTEP_OPTIONS(AdamaxOptions, FUSEDSTEP_ADAMAX_OPTIONS)
};

struct AdamaxParamState : ParamState<AdamaxParamState, rules::Adamax> {
  FUSEDSTEP_STATE(exp_avg)
  FUSEDSTEP_STATE(exp_inf)
};

// Adamax (Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 2), with the options
// of torch's Python class. For each tensor p with gradient g, at step t:
//
//   g = g + weight_decay p
//   m = beta1 m + (1 - beta1) g,   u = max(beta2 u, |g| + eps)
//   p = p - lr m / ((1 - beta1^t) u)
class Adamax : public FusedOptimizer<Adamax, AdamaxOptions, AdamaxParamState, rules::Adamax> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static constexpr const char* kRule = "adamax";

  static rules::AdamaxHyper hyper(const AdamaxOptions& o) {
    const auto [beta1, beta2] = o.betas();
    return {.lr = o.lr(), .beta1 = beta1, .beta2 = beta2, .eps = o.eps(), .weight_decay = o.weight_decay()};
  }
};

}  // namespace fusedstep::optim
