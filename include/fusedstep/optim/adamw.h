#pragma once
#include "fusedstep/optim/adam.h"

namespace fusedstep::optim {

#define FUSEDSTEP_ADAMW_OPTIONS(X) FUSEDSTEP_BOTH_ADAMS_OPTIONS(X, 1e-2)
#define FUSEDSTEP_TAKE_OPTION(type, name, ...) name(o.name());

struct AdamWOptions : detail::BasicOptions<AdamWOptions> {
  FUSEDSTEP_OPTIONS(AdamWOptions, FUSEDSTEP_ADAMW_OPTIONS)

  // Takes the values of Adam's options, weight_decay among them. Whether they decouple the decay does not
  // count.
  template <class = void>
  // NOLINTNEXTLINE(google-explicit-constructor): an AdamW takes AdamOptions too
  AdamWOptions(const AdamOptions& o) {
    FUSEDSTEP_ADAMW_OPTIONS(FUSEDSTEP_TAKE_OPTION)
    FUSEDSTEP_STORAGE_OPTIONS(FUSEDSTEP_TAKE_OPTION)
  }
};

using AdamWParamState = AdamParamState;

// AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2): Adam, in whose
// formula the decay shrinks the weight instead of being added to the gradient.
class AdamW : public FusedOptimizer<AdamW, AdamWOptions, AdamWParamState, rules::Adam> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static rules::AdamHyper hyper(const AdamWOptions& o) { return Adam::hyper_of(o, true); }
  template <class = void>
  static void convert(torch::optim::OptimizerParamGroup& group) {
    const auto* const adams = dynamic_cast<const AdamOptions*>(&group.options());
    if (adams != nullptr) group.set_options(std::make_unique<AdamWOptions>(*adams));
  }
};

}  // namespace fusedstep::optim
