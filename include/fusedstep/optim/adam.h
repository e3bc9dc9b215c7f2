#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

// Those that AdamW has too, with another weight_decay.
#define FUSEDSTEP_BOTH_ADAMS_OPTIONS(X, weight_decay_of_class) \
  X(double, lr, 1e-3)                                          \
  X(TwoBetas, betas, 0.9, 0.999)                               \
  X(double, eps, 1e-8)                                         \
  X(double, weight_decay, weight_decay_of_class)               \
  X(bool, amsgrad, false)                                      \
  X(bool, maximize, false)                                     \
  X(double, max_grad_norm, kNoLimit)
#define FUSEDSTEP_ADAM_OPTIONS(X)    \
  FUSEDSTEP_BOTH_ADAMS_OPTIONS(X, 0) \
  X(bool, decoupled_weight_decay, false)

struct AdamOptions : detail::BasicOptions<AdamOptions> {
  FUSEDSTEP_OPTIONS(AdamOptions, FUSEDSTEP_ADAM_OPTIONS)
};

struct AdamParamState : ParamState<AdamParamState, rules::Adam> {
  FUSEDSTEP_STATE(exp_avg)
  FUSEDSTEP_STATE(exp_avg_sq)
  FUSEDSTEP_STATE(max_exp_avg_sq)
};

// Adam (Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1), with torch's
// options. For each tensor p with gradient g, at step t:
//
//   g = g + weight_decay p                                   (unless decoupled_weight_decay)
//   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//   p = p - lr weight_decay p                                (if decoupled_weight_decay)
//   p = p - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
//
// With amsgrad (Reddi et al., 2018) the largest v so far stands in for v in the last line.
class Adam : public FusedOptimizer<Adam, AdamOptions, AdamParamState, rules::Adam> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static rules::AdamHyper hyper(const AdamOptions& o) { return hyper_of(o, o.decoupled_weight_decay()); }

  // The numbers of options that have Adam's names.
  template <class Options>
  static rules::AdamHyper hyper_of(const Options& o, bool decouples) {
    const auto [beta1, beta2] = o.betas();
    return {.lr = o.lr(),
            .beta1 = beta1,
            .beta2 = beta2,
            .eps = o.eps(),
            .weight_decay = o.weight_decay(),
            .amsgrad = double(o.amsgrad()),
            .decoupled_weight_decay = double(decouples)};
  }
};

}  // namespace fusedstep::optim
