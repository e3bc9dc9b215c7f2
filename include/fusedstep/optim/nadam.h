#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

#define FUSEDSTEP_NADAM_OPTIONS(X)       \
  X(double, lr, 2e-3)                    \
  X(TwoBetas, betas, 0.9, 0.999)         \
  X(double, eps, 1e-8)                   \
  X(double, weight_decay, 0)             \
  X(double, momentum_decay, 4e-3)        \
  X(bool, decoupled_weight_decay, false) \
  X(bool, maximize, false)               \
  X(double, max_grad_norm, kNoLimit)

struct NAdamOptions : detail::BasicOptions<NAdamOptions> {
  FUSEDSTEP_OPTIONS(NAdamOptions, FUSEDSTEP_NADAM_OPTIONS)
};

struct NAdamParamState : ParamState<NAdamParamState, rules::NAdam> {
  const torch::Tensor& mu_product() const { return number(1); }
  FUSEDSTEP_STATE(exp_avg)
  FUSEDSTEP_STATE(exp_avg_sq)
};

// NAdam (Dozat, "Incorporating Nesterov Momentum into Adam", 2016, algorithm 2), with torch's options. For
// each tensor p with gradient g, at step t:
//
//   g = g + weight_decay p                                   (unless decoupled_weight_decay)
//   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//   mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2),   q_t = mu_1 mu_2 ... mu_t
//   u = mu_(t+1) m / (1 - q_(t+1)) + (1 - mu_t) g / (1 - q_t)
//   p = p - lr weight_decay p                                (if decoupled_weight_decay)
//   p = p - lr u / (sqrt(v / (1 - beta2^t)) + eps)
//
// The state mu_product is q_t.
class NAdam : public FusedOptimizer<NAdam, NAdamOptions, NAdamParamState, rules::NAdam> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static rules::NAdamHyper hyper(const NAdamOptions& o) {
    const auto [beta1, beta2] = o.betas();
    return {.lr = o.lr(),
            .beta1 = beta1,
            .beta2 = beta2,
            .eps = o.eps(),
            .weight_decay = o.weight_decay(),
            .momentum_decay = o.momentum_decay(),
            .decoupled_weight_decay = double(o.decoupled_weight_decay())};
  }
};

}  // namespace fusedstep::optim
