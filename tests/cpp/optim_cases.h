// The C++ optimizers under test, one row each, and what their tests share.
#pragma once
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "fusedstep/optim/adadelta.h"
#include "fusedstep/optim/adagrad.h"
#include "fusedstep/optim/adam.h"
#include "fusedstep/optim/adamax.h"
#include "fusedstep/optim/adamw.h"
#include "fusedstep/optim/adan.h"
#include "fusedstep/optim/asgd.h"
#include "fusedstep/optim/lamb.h"
#include "fusedstep/optim/lion.h"
#include "fusedstep/optim/nadam.h"
#include "fusedstep/optim/radam.h"
#include "fusedstep/optim/rmsprop.h"
#include "fusedstep/optim/rprop.h"
#include "fusedstep/optim/sgd.h"

namespace fusedstep::optim {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

// Base of most rows.
template <class OptimizerOfRow, class OptionsOfRow, class StateOfRow>
struct RowOf {
  using Optimizer = OptimizerOfRow;
  using Options = OptionsOfRow;
  using State = StateOfRow;
  static constexpr double kLrForXor = 0.1;
};

struct LambRow : RowOf<Lamb, LambOptions, LambParamState> {
  static Options options() { return LambOptions(0.02).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1); }
};
struct AdamRow : RowOf<Adam, AdamOptions, AdamParamState> {
  static Options options() {
    return AdamOptions(0.02).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1).amsgrad(true);
  }
};
struct AdamWRow : RowOf<AdamW, AdamOptions, AdamParamState> {
  static Options options() { return AdamWOptions(0.02).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1); }
};
struct AdanRow : RowOf<Adan, AdanOptions, AdanParamState> {
  static Options options() {
    return AdanOptions(0.02).betas({0.8, 0.7, 0.95}).eps(1e-6).weight_decay(0.1).no_prox(true);
  }
};
struct AdagradRow : RowOf<Adagrad, AdagradOptions, AdagradParamState> {
  static constexpr double kLrForXor = 1;
  static Options options() {
    return AdagradOptions(0.1).lr_decay(0.01).eps(1e-6).weight_decay(0.1).initial_accumulator_value(0.5);
  }
};
struct AdadeltaRow : RowOf<Adadelta, AdadeltaOptions, AdadeltaParamState> {
  static constexpr double kLrForXor = 10;
  static Options options() { return AdadeltaOptions(0.5).rho(0.8).eps(1e-4).weight_decay(0.1); }
};
struct AdamaxRow : RowOf<Adamax, AdamaxOptions, AdamaxParamState> {
  static Options options() { return AdamaxOptions(0.02).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1); }
};
struct LionRow : RowOf<Lion, LionOptions, LionParamState> {
  static Options options() { return LionOptions(0.02).betas({0.8, 0.95}).weight_decay(0.1); }
};
struct SGDRow : RowOf<SGD, SGDOptions, SGDParamState> {
  static constexpr double kLrForXor = 1;
  static Options options() { return SGDOptions(0.02).momentum(0.8).dampening(0.3).weight_decay(0.1); }
};

struct NAdamRow : RowOf<NAdam, NAdamOptions, NAdamParamState> {
  static Options options() {
    return NAdamOptions(0.02).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1).momentum_decay(0.25);
  }
};
struct RAdamRow : RowOf<RAdam, RAdamOptions, RAdamParamState> {
  static Options options() {
    return RAdamOptions(0.02).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1).decoupled_weight_decay(true);
  }
};
struct RMSpropRow : RowOf<RMSprop, RMSpropOptions, RMSpropParamState> {
  static Options options() {
    return RMSpropOptions(0.02).alpha(0.9).eps(1e-6).weight_decay(0.1).momentum(0.5).centered(true);
  }
};
struct ASGDRow : RowOf<ASGD, ASGDOptions, ASGDParamState> {
  static constexpr double kLrForXor = 1;
  static Options options() { return ASGDOptions(0.02).lambd(0.5).alpha(0.5).t0(1).weight_decay(0.1); }
};
struct RpropRow : RowOf<Rprop, RpropOptions, RpropParamState> {
  static Options options() { return RpropOptions(0.02).etas({0.25, 1.5}).step_sizes({1e-3, 0.5}); }
};

using Rows = testing::Types<LambRow, AdamRow, AdamWRow, AdagradRow, AdanRow, AdadeltaRow, AdamaxRow, ASGDRow,
                            LionRow, NAdamRow, RAdamRow, RMSpropRow, RpropRow, SGDRow>;

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
