#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

// By default a step leaves its update u in the gradients of float32 and float64 weights, in place of a second
// computation; keep_grad leaves gradients alone. The variants of LAMB differ in the others, besides eps and
// weight_decay (docs/optimizers/lamb.md has a table):
//   decoupled_decay   the decay shrinks p first, and is no part of u
//   debias            m and v are divided by 1 - beta^t
//   debias_lr         lr is multiplied by sqrt(1 - beta2^t) / (1 - beta1^t)
//   always_adapt      false: the ratio is 1 in groups without weight decay
//   max_weight_norm   |p| counts as no more than this
//   min_ratio, max_ratio   bounds of the ratio where neither norm is 0
#define FUSEDSTEP_LAMB_OPTIONS(X)      \
  X(double, lr, 1e-3)                  \
  X(TwoBetas, betas, 0.9, 0.999)       \
  X(double, eps, 1e-8)                 \
  X(double, weight_decay, 0)           \
  X(bool, maximize, false)             \
  X(bool, keep_grad, false)            \
  X(bool, decoupled_decay, false)      \
  X(bool, debias, true)                \
  X(bool, debias_lr, false)            \
  X(bool, always_adapt, true)          \
  X(double, max_grad_norm, kNoLimit)   \
  X(double, max_weight_norm, kNoLimit) \
  X(double, min_ratio, 0)              \
  X(double, max_ratio, kNoLimit)

struct LambOptions : detail::BasicOptions<LambOptions> {
  FUSEDSTEP_OPTIONS(LambOptions, FUSEDSTEP_LAMB_OPTIONS)

  // The variants by name, with their own eps and weight_decay. The default is the paper's.
  static LambOptions apex(double lr = 1e-3) {
    return LambOptions(lr).eps(1e-6).weight_decay(0.01).always_adapt(false).max_grad_norm(1);
  }
  static LambOptions nvlamb(double lr = 1e-3) { return apex(lr).always_adapt(true); }
  static LambOptions timm(double lr = 1e-3) { return apex(lr); }
  static LambOptions deepspeed(double lr = 1e-3) {
    return LambOptions(lr).debias(false).debias_lr(true).min_ratio(0.01).max_ratio(10);
  }
  static LambOptions cybertron(double lr = 1e-3) {
    return LambOptions(lr).eps(1e-6).debias(false).max_weight_norm(10);
  }
};

struct LambParamState : ParamState<LambParamState, rules::Lamb> {
  FUSEDSTEP_STATE(exp_avg)
  FUSEDSTEP_STATE(exp_avg_sq)
};

// LAMB (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020,
// algorithm 2 with phi(z) = z). For each tensor p with gradient g, at step t:
//
//   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//   u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
//   p = p - lr |p| / |u| u         (the ratio is 1 where either norm is 0)
//
//   const auto options = fusedstep::optim::LambOptions(1e-2).weight_decay(0.01);
//   fusedstep::optim::Lamb optimizer(model->parameters(), options);
//
// LAMB as other libraries compute it:
//
//   fusedstep::optim::Lamb optimizer(model->parameters(), fusedstep::optim::LambOptions::apex(1e-2));
class Lamb : public FusedOptimizer<Lamb, LambOptions, LambParamState, rules::Lamb> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static void check(const LambOptions& options) {
    options.check_ranges();
    TORCH_CHECK(options.max_ratio() >= options.min_ratio(), "Invalid max_ratio value: ", options.max_ratio(),
                ", below min_ratio, ", options.min_ratio());
    TORCH_CHECK(!(options.debias() && options.debias_lr()), "debias and debias_lr cannot both be true");
  }
  static rules::LambHyper hyper(const LambOptions& o) {
    const auto [beta1, beta2] = o.betas();
    return {.lr = o.lr(),
            .beta1 = beta1,
            .beta2 = beta2,
            .eps = o.eps(),
            .weight_decay = o.weight_decay(),
            .decoupled_decay = double(o.decoupled_decay()),
            .debias = double(o.debias()),
            .debias_lr = double(o.debias_lr()),
            .always_adapt = double(o.always_adapt()),
            .max_weight_norm = o.max_weight_norm(),
            .min_ratio = o.min_ratio(),
            .max_ratio = o.max_ratio()};
  }
  static GradUse grad_use(const LambOptions& options) {
    return options.keep_grad() ? GradUse::kLeave : GradUse::kScratch;
  }
  static double grad_norm_eps(const LambOptions&) { return 0; }
};

}  // namespace fusedstep::optim
