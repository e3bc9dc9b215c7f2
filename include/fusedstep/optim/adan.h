#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

// max_grad_norm 0 clips nothing. With no_prox the decay shrinks p before the step, as AdamW's.
#define FUSEDSTEP_ADAN_OPTIONS(X)        \
  X(double, lr, 1e-3)                    \
  X(ThreeBetas, betas, 0.98, 0.92, 0.99) \
  X(double, eps, 1e-8)                   \
  X(double, weight_decay, 0)             \
  X(double, max_grad_norm, 0)            \
  X(bool, no_prox, false)                \
  X(bool, maximize, false)

struct AdanOptions : detail::BasicOptions<AdanOptions> {
  FUSEDSTEP_OPTIONS(AdanOptions, FUSEDSTEP_ADAN_OPTIONS)
};

struct AdanParamState : ParamState<AdanParamState, rules::Adan> {
  FUSEDSTEP_STATE(exp_avg)
  FUSEDSTEP_STATE(exp_avg_sq)
  FUSEDSTEP_STATE(exp_avg_diff)
  FUSEDSTEP_STATE(neg_pre_grad)
};

// Adan (Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models", 2022,
// algorithm 1, whose betas are one minus these). For each tensor p with gradient g, at step t:
//
//   d = g - previous g                              (0 at the first step)
//   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) d
//   n = beta3 n + (1 - beta3) (g + beta2 d)^2
//   u = (m / (1 - beta1^t) + beta2 v / (1 - beta2^t)) / (sqrt(n / (1 - beta3^t)) + eps)
//   p = (p - lr u) / (1 + lr weight_decay),   with no_prox   p = (1 - lr weight_decay) p - lr u
class Adan : public FusedOptimizer<Adan, AdanOptions, AdanParamState, rules::Adan> {
 public:
  using FusedOptimizer::FusedOptimizer;

  // Forgets all steps so far: the next one is again a first.
  void restart_opt() {
    for (const auto& group : param_groups_) {
      for (const torch::Tensor& weight : group.params()) {
        const auto found = state_.find(weight.unsafeGetTensorImpl());
        if (found == state_.end() || found->second == nullptr) continue;
        static_cast<AdanParamState&>(*found->second).zero(weight);
      }
    }
  }

  static void check(const AdanOptions& options) {
    TORCH_CHECK(options.max_grad_norm() >= 0, "Invalid Max grad norm: ", options.max_grad_norm());
    detail::check_range("lr", options.lr());
    detail::check_range("eps", options.eps());
    detail::check_range("betas", options.betas());
    detail::check_range("weight_decay", options.weight_decay());
  }
  static rules::AdanHyper hyper(const AdanOptions& o) {
    const auto [beta1, beta2, beta3] = o.betas();
    return {.lr = o.lr(),
            .beta1 = beta1,
            .beta2 = beta2,
            .beta3 = beta3,
            .eps = o.eps(),
            .weight_decay = o.weight_decay(),
            .no_prox = double(o.no_prox())};
  }
  static double max_grad_norm(const AdanOptions& o) {
    return o.max_grad_norm() == 0 ? kNoLimit : o.max_grad_norm();
  }
  static double grad_norm_eps(const AdanOptions& options) { return options.eps(); }
};

}  // namespace fusedstep::optim
