#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

#define FUSEDSTEP_SGD_OPTIONS(X) \
  X(double, lr, 1e-3)            \
  X(double, momentum, 0)         \
  X(double, dampening, 0)        \
  X(double, weight_decay, 0)     \
  X(bool, nesterov, false)       \
  X(bool, maximize, false)       \
  X(double, max_grad_norm, kNoLimit)

struct SGDOptions : detail::BasicOptions<SGDOptions> {
  FUSEDSTEP_OPTIONS(SGDOptions, FUSEDSTEP_SGD_OPTIONS)
};

struct SGDParamState : ParamState<SGDParamState, rules::SGD> {
  FUSEDSTEP_STATE(momentum_buffer)

  using ParamState::serialize;
  // An archive of torch has no step count, and no buffer before the first step with momentum.
  void serialize(torch::serialize::InputArchive& archive) override {
    ParamState::serialize(archive);
    if (!step().defined() && momentum_buffer().defined()) step(torch::ones({}));
  }
};

// SGD with momentum (Sutskever et al., "On the importance of initialization and momentum in deep learning",
// 2013), with torch's options. For each tensor p with gradient g:
//
//   g = g + weight_decay p
//   b = momentum b + (1 - dampening) g                       (b = g at the first step)
//   p = p - lr b        with nesterov   p = p - lr (g + momentum b)
//
// Without momentum there is no b: p = p - lr g. Of a parameter with a sparse gradient (torch::nn::Embedding
// has such) only the rows that it is for are read and written; momentum and weight_decay must then be 0.
class SGD : public FusedOptimizer<SGD, SGDOptions, SGDParamState, rules::SGD> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static void check(const SGDOptions& options) {
    options.check_ranges();
    TORCH_CHECK(!options.nesterov() || (options.momentum() > 0 && options.dampening() == 0),
                "Nesterov momentum requires a momentum and zero dampening");
  }
  static rules::SGDHyper hyper(const SGDOptions& o) {
    return {.lr = o.lr(),
            .momentum = o.momentum(),
            .dampening = o.dampening(),
            .weight_decay = o.weight_decay(),
            .nesterov = double(o.nesterov())};
  }
  static const char* sparse_error(const SGDOptions& options) {
    return hyper(options).flags() == 0
               ? nullptr
               : "momentum and weight_decay options are not compatible with sparse gradients";
  }
};

}  // namespace fusedstep::optim
