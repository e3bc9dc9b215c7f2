#pragma once
#include <limits>
#include <tuple>

#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

struct LambOptions : torch::optim::OptimizerCloneableOptions<LambOptions> {
  LambOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's options
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, maximize) = false;
  // By default a step leaves its update u in the gradients of float32 and float64 weights, in place of a
  // second computation; true leaves gradients alone.
  TORCH_ARG(bool, keep_grad) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, maximize);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, keep_grad);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(maximize);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(keep_grad);
  }
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { lr_ = lr; }
  friend bool operator==(const LambOptions& a, const LambOptions& b) {
    return a.lr_ == b.lr_ && a.betas_ == b.betas_ && a.eps_ == b.eps_ && a.weight_decay_ == b.weight_decay_ &&
           a.maximize_ == b.maximize_ && a.keep_grad_ == b.keep_grad_;
  }
};

struct LambParamState : ParamState<LambParamState> {
  static constexpr std::array kNames = {"exp_avg", "exp_avg_sq"};
  const torch::Tensor& exp_avg() const { return slot(0); }
  const torch::Tensor& exp_avg_sq() const { return slot(1); }
};

// LAMB (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020,
// algorithm 2 with phi(z) = z). For each tensor p with gradient g, at step t:
//
//   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
//   u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
//   p = p - lr |p| / |u| u         (the ratio is 1 where either norm is 0)
//
// Parameters: float32, float64, bfloat16 or float16 tensors on the CPU of any shape and of any layout that
// does not overlap itself; states have the parameter's dtype. Throws c10::Error for options out of range.
//
//   fusedstep::optim::Lamb optimizer(model->parameters(),
//   fusedstep::optim::LambOptions(1e-2).weight_decay(0.01));
class Lamb : public FusedOptimizer<Lamb, LambOptions, LambParamState> {
 public:
  explicit Lamb(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, LambOptions defaults = {})
      : FusedOptimizer(param_groups, std::make_unique<LambOptions>(defaults)) {
    detail::check_at_least_zero(defaults.lr(), "learning rate");
    detail::check_at_least_zero(defaults.eps(), "epsilon value");
    detail::check_betas(defaults.betas());
    detail::check_at_least_zero(defaults.weight_decay(), "weight_decay value");
  }
  explicit Lamb(std::vector<torch::Tensor> params, LambOptions defaults = {})
      : Lamb({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  static size_t slots(const LambOptions&) { return 2; }
  static double initial_value(const LambOptions&) { return 0; }
  static GradUse grad_use(const LambOptions& options) {
    return options.keep_grad() ? GradUse::kLeave : GradUse::kScratch;
  }
  static void launch(const LambOptions& o, int64_t plan) {
    static const auto op =
        detail::find_op<void(int64_t, double, double, double, double, double, bool, bool, bool, bool, double,
                             double, double, bool, double, int64_t)>("fusedstep::lamb_");
    const auto [beta1, beta2] = o.betas();
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    op.call(plan, o.lr(), beta1, beta2, o.eps(), o.weight_decay(), /*decoupled=*/false, /*debias=*/true,
            /*debias_lr=*/false, /*adapt=*/true, /*max_weight_norm=*/kInfinity, /*min_ratio=*/0,
            /*max_ratio=*/kInfinity, o.maximize(), /*grad_factor=*/1, static_cast<int64_t>(grad_use(o)));
  }
};

}  // namespace fusedstep::optim
