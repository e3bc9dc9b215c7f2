#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

#define FUSEDSTEP_RMSPROP_OPTIONS(X) \
  X(double, lr, 1e-2)                \
  X(double, alpha, 0.99)             \
  X(double, eps, 1e-8)               \
  X(double, weight_decay, 0)         \
  X(double, momentum, 0)             \
  X(bool, centered, false)           \
  X(bool, maximize, false)           \
  X(double, max_grad_norm, kNoLimit)

struct RMSpropOptions : detail::BasicOptions<RMSpropOptions> {
  FUSEDSTEP_OPTIONS(RMSpropOptions, FUSEDSTEP_RMSPROP_OPTIONS)
};

struct RMSpropParamState : ParamState<RMSpropParamState, rules::RMSprop> {
  FUSEDSTEP_STATE(square_avg)
  FUSEDSTEP_STATE(momentum_buffer)
  FUSEDSTEP_STATE(grad_avg)
};

// RMSprop (Tieleman and Hinton, "Neural Networks for Machine Learning", lecture 6e, 2012), with torch's
// options. For each tensor p with gradient g:
//
//   g = g + weight_decay p
//   v = alpha v + (1 - alpha) g^2,   a = alpha a + (1 - alpha) g
//   u = g / (sqrt(v) + eps)                    centered: g / (sqrt(v - a^2) + eps), and g / eps if alpha = 0
//   b = momentum b + u                         (if momentum > 0)
//   p = p - lr b                               (otherwise p - lr u)
class RMSprop : public FusedOptimizer<RMSprop, RMSpropOptions, RMSpropParamState, rules::RMSprop> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static constexpr const char* kRule = "rmsprop";

  static rules::RMSpropHyper hyper(const RMSpropOptions& o) {
    return {.lr = o.lr(),
            .alpha = o.alpha(),
            .eps = o.eps(),
            .weight_decay = o.weight_decay(),
            .momentum = o.momentum(),
            .centered = double(o.centered())};
  }
};

}  // namespace fusedstep::optim
