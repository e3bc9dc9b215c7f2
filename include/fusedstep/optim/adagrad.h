#pragma once
#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

#define FUSEDSTEP_ADAGRAD_OPTIONS(X)      \
  X(double, lr, 1e-2)                     \
  X(double, lr_decay, 0)                  \
  X(double, weight_decay, 0)              \
  X(double, initial_accumulator_value, 0) \
  X(double, eps, 1e-10)                   \
  X(bool, maximize, false)                \
  X(double, max_grad_norm, kNoLimit)

struct AdagradOptions : detail::BasicOptions<AdagradOptions> {
  FUSEDSTEP_OPTIONS(AdagradOptions, FUSEDSTEP_ADAGRAD_OPTIONS)
};

struct AdagradParamState : ParamState<AdagradParamState, rules::Adagrad> {
  FUSEDSTEP_STATE(sum)
};

// Adagrad (Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
// Optimization", 2011, section 1.1), with torch's options. For each tensor p with gradient g, at step t:
//
//   g = g + weight_decay p
//   s = s + g^2
//   p = p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)
//
// s starts at initial_accumulator_value. Of a parameter with a sparse gradient (torch::nn::Embedding has
// such) only the rows that it is for are read and written; weight_decay must then be 0.
class Adagrad : public FusedOptimizer<Adagrad, AdagradOptions, AdagradParamState, rules::Adagrad> {
 public:
  using FusedOptimizer::FusedOptimizer;

  static rules::AdagradHyper hyper(const AdagradOptions& o) {
    return {.lr = o.lr(), .lr_decay = o.lr_decay(), .weight_decay = o.weight_decay(), .eps = o.eps()};
  }
  static double initial_value(const AdagradOptions& options, std::string_view name, double otherwise) {
    return name == "sum" ? options.initial_accumulator_value() : otherwise;
  }
  static const char* sparse_error(const AdagradOptions& options) {
    return options.weight_decay() == 0 ? nullptr
                                       : "weight_decay option is not compatible with sparse gradients";
  }
};

}  // namespace fusedstep::optim
