#pragma once
#include "fusedstep/optim/adam.h"

namespace fusedstep::optim {

// max_grad_norm clips the 2-norm of all gradients together for the step; inf: not at all.
#define FUSEDSTEP_ADAMW_OPTIONS(X)                \
  X(double, lr, 1e-3)                             \
  X(TwoBetas, betas, std::make_tuple(0.9, 0.999)) \
  X(double, eps, 1e-8)                            \
  X(double, weight_decay, 1e-2)                   \
  X(bool, amsgrad, false)                         \
  X(bool, maximize, false)                        \
  X(double, max_grad_norm, kNoLimit)

struct AdamWOptions : torch::optim::OptimizerCloneableOptions<AdamWOptions> {
  FUSEDSTEP_OPTIONS(AdamWOptions, FUSEDSTEP_ADAMW_OPTIONS)

  // Takes the values of Adam's options, weight_decay among them. Whether they decouple the decay does not
  // count. NOLINTNEXTLINE(google-explicit-constructor): an AdamW takes AdamOptions too
  AdamWOptions(const AdamOptions& o)
      : lr_(o.lr()),
        betas_(o.betas()),
        eps_(o.eps()),
        weight_decay_(o.weight_decay()),
        amsgrad_(o.amsgrad()),
        maximize_(o.maximize()),
        max_grad_norm_(o.max_grad_norm()),
        state_dtype_(o.state_dtype()),
        master_weights_(o.master_weights()),
        rounding_(o.rounding()),
        seed_(o.seed()) {}
};

using AdamWParamState = AdamParamState;

// AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2): Adam, in whose
// formula the decay shrinks the weight instead of being added to the gradient.
//
// Parameters, states and errors are those of FusedOptimizer.
class AdamW : public FusedOptimizer<AdamW, AdamWOptions, AdamWParamState, rules::Adam> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static constexpr const char* kRule = Adam::kRule;

  static rules::AdamHyper hyper(const AdamWOptions& o) { return Adam::hyper_of(o, true); }
  static void convert(torch::optim::OptimizerParamGroup& group) {
    const auto* const adams = dynamic_cast<const AdamOptions*>(&group.options());
    if (adams != nullptr) group.set_options(std::make_unique<AdamWOptions>(*adams));
  }
};

}  // namespace fusedstep::optim
