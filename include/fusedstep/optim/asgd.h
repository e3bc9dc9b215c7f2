#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

#define FUSEDSTEP_ASGD_OPTIONS(X) \
  X(double, lr, 1e-2)             \
  X(double, lambd, 1e-4)          \
  X(double, alpha, 0.75)          \
  X(double, t0, 1e6)              \
  X(double, weight_decay, 0)      \
  X(bool, maximize, false)        \
  X(double, max_grad_norm, kNoLimit)

struct ASGDOptions : detail::BasicOptions<ASGDOptions> {
  FUSEDSTEP_OPTIONS(ASGDOptions, FUSEDSTEP_ASGD_OPTIONS)
};

struct ASGDParamState : ParamState<ASGDParamState, rules::ASGD> {
  const torch::Tensor& eta() const { return number(1); }
  const torch::Tensor& mu() const { return number(2); }
  FUSEDSTEP_STATE(ax)
};

// Averaged SGD (Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992), with the
// options of torch's Python class. For each tensor p with gradient g, at step t:
//
//   g = g + weight_decay p
//   p = (1 - lambd eta) p - eta g,   ax = ax + mu (p - ax)
//   eta = lr / (1 + lambd lr t)^alpha,   mu = 1 / max(1, t - t0)      for the next step
//
// eta starts at lr, mu at 1.
class ASGD : public FusedOptimizer<ASGD, ASGDOptions, ASGDParamState, rules::ASGD> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static rules::ASGDHyper hyper(const ASGDOptions& o) {
    return {o.lr(), o.lambd(), o.alpha(), o.t0(), o.weight_decay()};
  }
  static double initial_value(const ASGDOptions& options, std::string_view name, double otherwise) {
    return name == "eta" ? options.lr() : otherwise;
  }
};

}  // namespace fusedstep::optim
