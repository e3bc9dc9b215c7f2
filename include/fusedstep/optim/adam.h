#pragma once
#include <limits>
#include <tuple>

#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

struct AdamOptions : torch::optim::OptimizerCloneableOptions<AdamOptions> {
  AdamOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's options
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, amsgrad) = false;
  TORCH_ARG(bool, maximize) = false;
  TORCH_ARG(bool, decoupled_weight_decay) = false;
  // Clips the 2-norm of all gradients together for the step; inf: not at all.
  TORCH_ARG(double, max_grad_norm) = std::numeric_limits<double>::infinity();

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, amsgrad);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, maximize);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, decoupled_weight_decay);
    detail::read_if_there(archive, "max_grad_norm", max_grad_norm_);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(amsgrad);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(maximize);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(decoupled_weight_decay);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(max_grad_norm);
  }
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { lr_ = lr; }
  friend bool operator==(const AdamOptions& a, const AdamOptions& b) {
    return a.lr_ == b.lr_ && a.betas_ == b.betas_ && a.eps_ == b.eps_ && a.weight_decay_ == b.weight_decay_ &&
           a.amsgrad_ == b.amsgrad_ && a.maximize_ == b.maximize_ &&
           a.decoupled_weight_decay_ == b.decoupled_weight_decay_ && a.max_grad_norm_ == b.max_grad_norm_;
  }
};

struct AdamParamState : ParamState<AdamParamState> {
  static constexpr std::array kNames = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  const torch::Tensor& exp_avg() const { return slot(0); }
  const torch::Tensor& exp_avg_sq() const { return slot(1); }
  const torch::Tensor& max_exp_avg_sq() const { return slot(2); }
};

// Adam (Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1), with torch's
// options. For each tensor p with gradient g, at step t:
//
//   g = g + weight_decay p                                   (unless decoupled_weight_decay)
//   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//   p = p - lr weight_decay p                                (if decoupled_weight_decay)
//   p = p - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
//
// With amsgrad (Reddi et al., 2018) the largest v so far stands in for v in the last line.
//
// Parameters: float32, float64, bfloat16 or float16 tensors on the CPU or a CUDA device, of any shape and of
// any layout that does not overlap itself; states have the parameter's dtype. Throws c10::Error for options
// out of range.
class Adam : public FusedOptimizer<Adam, AdamOptions, AdamParamState> {
 public:
  explicit Adam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, AdamOptions defaults = {})
      : FusedOptimizer(param_groups, std::make_unique<AdamOptions>(defaults)) {
    detail::check_at_least_zero(defaults.lr(), "learning rate");
    detail::check_at_least_zero(defaults.eps(), "epsilon value");
    detail::check_betas(defaults.betas());
    detail::check_at_least_zero(defaults.weight_decay(), "weight_decay value");
    detail::check_above_zero(defaults.max_grad_norm(), "max_grad_norm value");
  }
  explicit Adam(std::vector<torch::Tensor> params, AdamOptions defaults = {})
      : Adam({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  static size_t slots(const AdamOptions& options) { return options.amsgrad() ? 3 : 2; }
  static double initial_value(const AdamOptions&) { return 0; }
  static void prepare(const AdamOptions& o, int64_t plan, double grad_factor) {
    static const auto op = detail::find_op<void(int64_t, double, double, double, double, double, bool, bool,
                                                bool, double, int64_t)>("fusedstep::adam_prepare");
    const auto [beta1, beta2] = o.betas();
    op.call(plan, o.lr(), beta1, beta2, o.eps(), o.weight_decay(), o.amsgrad(), o.decoupled_weight_decay(),
            o.maximize(), grad_factor, static_cast<int64_t>(grad_use(o)));
  }
};

}  // namespace fusedstep::optim
