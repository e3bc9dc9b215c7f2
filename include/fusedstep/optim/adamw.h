#pragma once
#include "fusedstep/optim/adam.h"

namespace fusedstep::optim {

// AdamOptions with AdamW's defaults.
struct AdamWOptions : AdamOptions {
  // NOLINTNEXTLINE(google-explicit-constructor): as torch's options
  AdamWOptions(double lr = 1e-3) : AdamOptions(lr) { weight_decay(1e-2).decoupled_weight_decay(true); }
};

// AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2): Adam, in whose
// formula the decay shrinks the weight instead of being added to the gradient.
class AdamW : public Adam {
 public:
  explicit AdamW(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 AdamOptions defaults = AdamWOptions())
      : Adam(param_groups, defaults.decoupled_weight_decay(true)) {}
  explicit AdamW(std::vector<torch::Tensor> params, AdamOptions defaults = AdamWOptions())
      : AdamW({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}
};

}  // namespace fusedstep::optim
