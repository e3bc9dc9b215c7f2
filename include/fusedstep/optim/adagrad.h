#pragma once
#include <limits>

#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

struct AdagradOptions : torch::optim::OptimizerCloneableOptions<AdagradOptions> {
  AdagradOptions(double lr = 1e-2) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's options
  TORCH_ARG(double, lr) = 1e-2;
  TORCH_ARG(double, lr_decay) = 0;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(double, initial_accumulator_value) = 0;
  TORCH_ARG(double, eps) = 1e-10;
  TORCH_ARG(bool, maximize) = false;
  // Clips the 2-norm of all gradients together for the step; inf: not at all.
  TORCH_ARG(double, max_grad_norm) = std::numeric_limits<double>::infinity();

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr_decay);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, initial_accumulator_value);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, maximize);
    detail::read_if_there(archive, "max_grad_norm", max_grad_norm_);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr_decay);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(initial_accumulator_value);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(maximize);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(max_grad_norm);
  }
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { lr_ = lr; }
  friend bool operator==(const AdagradOptions& a, const AdagradOptions& b) {
    return a.lr_ == b.lr_ && a.lr_decay_ == b.lr_decay_ && a.weight_decay_ == b.weight_decay_ &&
           a.initial_accumulator_value_ == b.initial_accumulator_value_ && a.eps_ == b.eps_ &&
           a.maximize_ == b.maximize_ && a.max_grad_norm_ == b.max_grad_norm_;
  }
};

struct AdagradParamState : ParamState<AdagradParamState> {
  static constexpr std::array kNames = {"sum"};
  const torch::Tensor& sum() const { return slot(0); }
};

// Adagrad (Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
// Optimization", 2011, section 1.1), with torch's options. For each tensor p with gradient g, at step t:
//
//   g = g + weight_decay p
//   s = s + g^2
//   p = p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)
//
// s starts at initial_accumulator_value. Of a parameter with a sparse gradient (torch::nn::Embedding has
// such) only the rows that it is for are read and written; weight_decay must then be 0. Parameters: float32,
// float64, bfloat16 or float16 tensors on the CPU or a CUDA device, of any shape and of any layout that does
// not overlap itself; states have the parameter's dtype. Throws c10::Error for options out of range.
class Adagrad : public FusedOptimizer<Adagrad, AdagradOptions, AdagradParamState> {
 public:
  explicit Adagrad(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   AdagradOptions defaults = {})
      : FusedOptimizer(param_groups, std::make_unique<AdagradOptions>(defaults)) {
    detail::check_at_least_zero(defaults.lr(), "learning rate");
    detail::check_at_least_zero(defaults.lr_decay(), "lr_decay value");
    detail::check_at_least_zero(defaults.weight_decay(), "weight_decay value");
    detail::check_at_least_zero(defaults.initial_accumulator_value(), "initial_accumulator_value value");
    detail::check_at_least_zero(defaults.eps(), "epsilon value");
    detail::check_above_zero(defaults.max_grad_norm(), "max_grad_norm value");
  }
  explicit Adagrad(std::vector<torch::Tensor> params, AdagradOptions defaults = {})
      : Adagrad({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  static size_t slots(const AdagradOptions&) { return 1; }
  static double initial_value(const AdagradOptions& options) { return options.initial_accumulator_value(); }
  static const char* sparse_error(const AdagradOptions& options) {
    return options.weight_decay() == 0 ? nullptr
                                       : "weight_decay option is not compatible with sparse gradients";
  }
  static void prepare(const AdagradOptions& o, int64_t plan, double grad_factor) {
    static const auto op =
        detail::find_op<void(int64_t, double, double, double, double, bool, double, int64_t)>(
            "fusedstep::adagrad_prepare");
    op.call(plan, o.lr(), o.lr_decay(), o.weight_decay(), o.eps(), o.maximize(), grad_factor,
            static_cast<int64_t>(grad_use(o)));
  }
};

}  // namespace fusedstep::optim
