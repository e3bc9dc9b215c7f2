#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

#define FUSEDSTEP_RADAM_OPTIONS(X)                \
  X(double, lr, 1e-3)                             \
  X(TwoBetas, betas, std::make_tuple(0.9, 0.999)) \
  X(double, eps, 1e-8)                            \
  X(double, weight_decay, 0)                      \
  X(bool, decoupled_weight_decay, false)          \
  X(bool, maximize, false)                        \
  X(double, max_grad_norm, kNoLimit)

struct RAdamOptions : detail::BasicOptions<RAdamOptions> {
  FUSEDSTEP_OPTIONS(RAdamOptions, FUSEDSTEP_RADAM_OPTIONS)
};

struct RAdamParamState : ParamState<RAdamParamState, rules::RAdam> {
  FUSEDSTEP_STATE(exp_avg)
  FUSEDSTEP_STATE(exp_avg_sq)
};

// RAdam (Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", 2020, algorithm 2), with
// torch's options. For each tensor p with gradient g, at step t:
//
//   g = g + weight_decay p                                   (unless decoupled_weight_decay)
//   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//   p = p - lr weight_decay p                                (if decoupled_weight_decay)
//   p = p - lr m / (1 - beta1^t) r sqrt(1 - beta2^t) / (sqrt(v) + eps)
//
// r rectifies the variance. In the first steps, which are too few to estimate that (with the default betas
// the first five), p = p - lr m / (1 - beta1^t).
class RAdam : public FusedOptimizer<RAdam, RAdamOptions, RAdamParamState, rules::RAdam> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static constexpr const char* kRule = "radam";

  static rules::RAdamHyper hyper(const RAdamOptions& o) {
    const auto [beta1, beta2] = o.betas();
    return {.lr = o.lr(),
            .beta1 = beta1,
            .beta2 = beta2,
            .eps = o.eps(),
            .weight_decay = o.weight_decay(),
            .decoupled_weight_decay = double(o.decoupled_weight_decay())};
  }
};

}  // namespace fusedstep::optim
