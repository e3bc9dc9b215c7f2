#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

#define FUSEDSTEP_ADADELTA_OPTIONS(X) \
  X(double, lr, 1)                    \
  X(double, rho, 0.9)                 \
  X(double, eps, 1e-6)                \
  X(double, weight_decay, 0)          \
  X(bool, maximize, false)            \
  X(double, max_grad_norm, kNoLimit)

struct AdadeltaOptions : detail::BasicOptions<AdadeltaOptions> {
  FUSEDSTEP_OPTIONS(AdadeltaOptions, FUSEDSTEP_ADADELTA_OPTIONS)
};

struct AdadeltaParamState : ParamState<AdadeltaParamState, rules::Adadelta> {
  FUSEDSTEP_STATE(square_avg)
  FUSEDSTEP_STATE(acc_delta)
};

// Adadelta (Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012, algorithm 1), with the options of
// torch's Python class. For each tensor p with gradient g:
//
//   g = g + weight_decay p
//   v = rho v + (1 - rho) g^2,   d = sqrt(a + eps) / sqrt(v + eps) g
//   a = rho a + (1 - rho) d^2
//   p = p - lr d
class Adadelta : public FusedOptimizer<Adadelta, AdadeltaOptions, AdadeltaParamState, rules::Adadelta> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static void check(const AdadeltaOptions& options) {
    options.check_ranges();
    TORCH_CHECK(options.rho() <= 1, "Invalid rho value: ", options.rho());
  }
  static rules::AdadeltaHyper hyper(const AdadeltaOptions& o) {
    return {.lr = o.lr(), .rho = o.rho(), .eps = o.eps(), .weight_decay = o.weight_decay()};
  }
};

}  // namespace fusedstep::optim
