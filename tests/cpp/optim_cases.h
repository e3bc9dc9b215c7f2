// The C++ optimizers under test, a row for each rule and AdamW's, and what their tests share.
#pragma once
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "fusedstep/optim.h"
#include "fusedstep/rules/list.h"

namespace fusedstep::optim {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

// The values of the options that few optimizers have, and the rate for the test of XOR.
struct AsMost {
  static constexpr double kLrForXor = 0.1;
};
template <class Options>
struct Own : AsMost {
  static void set(Options& /*options*/) {}
};
template <>
struct Own<AdadeltaOptions> {
  static constexpr double kLrForXor = 10;
  static void set(AdadeltaOptions& options) { options.lr(0.5).rho(0.8).eps(1e-4); }
};
template <>
struct Own<AdagradOptions> {
  static constexpr double kLrForXor = 1;
  static void set(AdagradOptions& options) { options.lr(0.1).lr_decay(0.01).initial_accumulator_value(0.5); }
};
template <>
struct Own<AdamOptions> : AsMost {
  static void set(AdamOptions& options) { options.amsgrad(true); }
};
template <>
struct Own<AdanOptions> : AsMost {
  static void set(AdanOptions& options) { options.betas({0.8, 0.7, 0.95}).no_prox(true); }
};
template <>
struct Own<ASGDOptions> {
  static constexpr double kLrForXor = 1;
  static void set(ASGDOptions& options) { options.lambd(0.5).alpha(0.5).t0(1); }
};
template <>
struct Own<NAdamOptions> : AsMost {
  static void set(NAdamOptions& options) { options.momentum_decay(0.25); }
};
template <>
struct Own<RAdamOptions> : AsMost {
  static void set(RAdamOptions& options) { options.decoupled_weight_decay(true); }
};
template <>
struct Own<RMSpropOptions> : AsMost {
  static void set(RMSpropOptions& options) { options.alpha(0.9).momentum(0.5).centered(true); }
};
template <>
struct Own<RpropOptions> : AsMost {
  static void set(RpropOptions& options) { options.etas({0.25, 1.5}).step_sizes({1e-3, 0.5}); }
};
template <>
struct Own<SGDOptions> {
  static constexpr double kLrForXor = 1;
  static void set(SGDOptions& options) { options.momentum(0.8).dampening(0.3); }
};

template <class OptimizerOfRow, class OptionsOfRow, class StateOfRow>
struct RowOf {
  using Optimizer = OptimizerOfRow;
  using Options = OptionsOfRow;
  using State = StateOfRow;
  static constexpr double kLrForXor = Own<Options>::kLrForXor;

  static Options options() {
    Options options(0.02);
    if constexpr (requires { options.betas({0.8, 0.95}); }) options.betas({0.8, 0.95});
    if constexpr (requires { options.eps(1e-6); }) options.eps(1e-6);
    if constexpr (requires { options.weight_decay(0.1); }) options.weight_decay(0.1);
    Own<Options>::set(options);
    return options;
  }
};

#define FUSEDSTEP_ROW(Rule) \
  struct Rule##Row : RowOf<Rule, Rule##Options, Rule##ParamState> {};
FUSEDSTEP_RULES(FUSEDSTEP_ROW)
#undef FUSEDSTEP_ROW
struct AdamWRow : RowOf<AdamW, AdamWOptions, AdamWParamState> {};

#define FUSEDSTEP_ROW(Rule) Rule##Row,
using Rows = testing::Types<FUSEDSTEP_RULES(FUSEDSTEP_ROW) AdamWRow>;
#undef FUSEDSTEP_ROW

// The class's name, without its namespace.
template <class Row>
std::string name_of() {
  const std::string name = c10::demangle(typeid(typename Row::Optimizer).name());
  return name.substr(name.rfind(':') + 1);
}

// For typed tests: a row's name is its class's.
struct RowName {
  template <class Row>
  static std::string GetName(int) {
    return name_of<Row>();
  }
};

inline Tensors make_weights(torch::Dtype dtype = torch::kFloat32) {
  Tensors weights;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{17, 5}, {33}, {}, {2, 3, 4, 5}, {1000}}) {
    weights.push_back(torch::randn(sizes, dtype).requires_grad_());
  }
  return weights;
}

inline Tensors clones(const Tensors& tensors) {
  Tensors copies;
  for (const Tensor& tensor : tensors) copies.push_back(tensor.detach().clone().requires_grad_());
  return copies;
}

// Gradients that depend on `step` only.
inline void set_grads(const Tensors& weights, uint64_t step) {
  torch::manual_seed(1000 + step);
  for (const Tensor& weight : weights) weight.mutable_grad() = torch::randn(weight.sizes(), weight.options());
}

template <class Optimizer>
inline void take_steps(Optimizer& optimizer, const Tensors& weights, uint64_t first, uint64_t last) {
  for (uint64_t step = first; step < last; ++step) {
    set_grads(weights, step);
    optimizer.step();
  }
}

inline void expect_equal(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << "tensor " << i;
}

inline void expect_close(const Tensors& a, const Tensors& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    const double error = (a[i] - b[i]).abs().max().template item<double>();
    EXPECT_LE(error, tolerance) << "tensor " << i;
  }
}

// Returns the text of an error, without where it came from.
inline std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace fusedstep::optim
