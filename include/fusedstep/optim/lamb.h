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

  // What the variants of LAMB differ in, besides eps and weight_decay; docs/optimizers/lamb.md has a table.
  static constexpr double kNone = std::numeric_limits<double>::infinity();
  TORCH_ARG(bool, decoupled_decay) = false;    // the decay shrinks p first, and is no part of u
  TORCH_ARG(bool, debias) = true;              // m and v are divided by 1 - beta^t
  TORCH_ARG(bool, debias_lr) = false;          // lr is multiplied by sqrt(1 - beta2^t) / (1 - beta1^t)
  TORCH_ARG(bool, always_adapt) = true;        // false: the ratio is 1 in groups without weight decay
  TORCH_ARG(double, max_grad_norm) = kNone;    // clips the norm of all gradients together for the step
  TORCH_ARG(double, max_weight_norm) = kNone;  // |p| counts as no more than this
  TORCH_ARG(double, min_ratio) = 0;            // bounds of the ratio where neither norm is 0
  TORCH_ARG(double, max_ratio) = kNone;

 public:
  // The variants by name, with their own eps and weight_decay. The default is the paper's.
  static LambOptions apex(double lr = 1e-3) {
    return LambOptions(lr).eps(1e-6).weight_decay(0.01).always_adapt(false).max_grad_norm(1);
  }
  static LambOptions nvlamb(double lr = 1e-3) { return apex(lr).always_adapt(true); }
  static LambOptions timm(double lr = 1e-3) { return apex(lr); }
  static LambOptions deepspeed(double lr = 1e-3) {
    return LambOptions(lr).debias(false).debias_lr(true).min_ratio(0.01).max_ratio(10);
  }
  static LambOptions cybertron(double lr = 1e-3) {
    return LambOptions(lr).eps(1e-6).debias(false).max_weight_norm(10);
  }

  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, maximize);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, keep_grad);
    detail::read_if_there(archive, "decoupled_decay", decoupled_decay_);
    detail::read_if_there(archive, "debias", debias_);
    detail::read_if_there(archive, "debias_lr", debias_lr_);
    detail::read_if_there(archive, "always_adapt", always_adapt_);
    detail::read_if_there(archive, "max_grad_norm", max_grad_norm_);
    detail::read_if_there(archive, "max_weight_norm", max_weight_norm_);
    detail::read_if_there(archive, "min_ratio", min_ratio_);
    detail::read_if_there(archive, "max_ratio", max_ratio_);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(maximize);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(keep_grad);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(decoupled_decay);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(debias);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(debias_lr);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(always_adapt);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(max_grad_norm);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(max_weight_norm);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(min_ratio);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(max_ratio);
  }
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { lr_ = lr; }
  friend bool operator==(const LambOptions& a, const LambOptions& b) {
    return a.lr_ == b.lr_ && a.betas_ == b.betas_ && a.eps_ == b.eps_ && a.weight_decay_ == b.weight_decay_ &&
           a.maximize_ == b.maximize_ && a.keep_grad_ == b.keep_grad_ &&
           a.decoupled_decay_ == b.decoupled_decay_ && a.debias_ == b.debias_ &&
           a.debias_lr_ == b.debias_lr_ && a.always_adapt_ == b.always_adapt_ &&
           a.max_grad_norm_ == b.max_grad_norm_ && a.max_weight_norm_ == b.max_weight_norm_ &&
           a.min_ratio_ == b.min_ratio_ && a.max_ratio_ == b.max_ratio_;
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
// Parameters: float32, float64, bfloat16 or float16 tensors on the CPU or a CUDA device, of any shape and of
// any layout that does not overlap itself; states have the parameter's dtype. Throws c10::Error for options
// out of range.
//
//   const auto options = fusedstep::optim::LambOptions(1e-2).weight_decay(0.01);
//   fusedstep::optim::Lamb optimizer(model->parameters(), options);
//
// LAMB as other libraries compute it:
//
//   fusedstep::optim::Lamb optimizer(model->parameters(), fusedstep::optim::LambOptions::apex(1e-2));
class Lamb : public FusedOptimizer<Lamb, LambOptions, LambParamState> {
 public:
  explicit Lamb(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, LambOptions defaults = {})
      : FusedOptimizer(param_groups, std::make_unique<LambOptions>(defaults)) {
    detail::check_at_least_zero(defaults.lr(), "learning rate");
    detail::check_at_least_zero(defaults.eps(), "epsilon value");
    detail::check_betas(defaults.betas());
    detail::check_at_least_zero(defaults.weight_decay(), "weight_decay value");
    detail::check_above_zero(defaults.max_grad_norm(), "max_grad_norm value");
    detail::check_at_least_zero(defaults.max_weight_norm(), "max_weight_norm value");
    detail::check_at_least_zero(defaults.min_ratio(), "min_ratio value");
    TORCH_CHECK(defaults.max_ratio() >= defaults.min_ratio(),
                "Invalid max_ratio value: ", defaults.max_ratio(), ", below min_ratio, ",
                defaults.min_ratio());
    TORCH_CHECK(!(defaults.debias() && defaults.debias_lr()), "debias and debias_lr cannot both be true");
  }
  explicit Lamb(std::vector<torch::Tensor> params, LambOptions defaults = {})
      : Lamb({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  static size_t slots(const LambOptions&) { return 2; }
  static double initial_value(const LambOptions&) { return 0; }
  static GradUse grad_use(const LambOptions& options) {
    return options.keep_grad() ? GradUse::kLeave : GradUse::kScratch;
  }
  static double grad_norm_eps(const LambOptions&) { return 0; }
  static void prepare(const LambOptions& o, int64_t plan, double grad_factor) {
    static const auto op =
        detail::find_op<void(int64_t, double, double, double, double, double, bool, bool, bool, bool, double,
                             double, double, bool, double, int64_t)>("fusedstep::lamb_prepare");
    const auto [beta1, beta2] = o.betas();
    const bool adapt = o.always_adapt() || o.weight_decay() != 0;
    op.call(plan, o.lr(), beta1, beta2, o.eps(), o.weight_decay(), o.decoupled_decay(), o.debias(),
            o.debias_lr(), adapt, o.max_weight_norm(), o.min_ratio(), o.max_ratio(), o.maximize(),
            grad_factor, static_cast<int64_t>(grad_use(o)));
  }
};

}  // namespace fusedstep::optim
