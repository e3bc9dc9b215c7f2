#pragma once
#include <limits>
#include <tuple>

#include "fusedstep/optim/fused.h"

namespace fusedstep::optim {

struct AdanOptions : torch::optim::OptimizerCloneableOptions<AdanOptions> {
  AdanOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as torch's options
  using betas_t = std::tuple<double, double, double>;
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.98, 0.92, 0.99);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(double, max_grad_norm) = 0;  // clips the norm of all gradients together for the step; 0: no
  TORCH_ARG(bool, no_prox) = false;      // the decay shrinks p before the step, as AdamW's
  TORCH_ARG(bool, maximize) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, max_grad_norm);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, no_prox);
    _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, maximize);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(max_grad_norm);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(no_prox);
    _TORCH_OPTIM_SERIALIZE_TORCH_ARG(maximize);
  }
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { lr_ = lr; }
  friend bool operator==(const AdanOptions& a, const AdanOptions& b) {
    return a.lr_ == b.lr_ && a.betas_ == b.betas_ && a.eps_ == b.eps_ && a.weight_decay_ == b.weight_decay_ &&
           a.max_grad_norm_ == b.max_grad_norm_ && a.no_prox_ == b.no_prox_ && a.maximize_ == b.maximize_;
  }
};

struct AdanParamState : ParamState<AdanParamState> {
  static constexpr std::array kNames = {"exp_avg", "exp_avg_sq", "exp_avg_diff", "neg_pre_grad"};
  const torch::Tensor& exp_avg() const { return slot(0); }
  const torch::Tensor& exp_avg_sq() const { return slot(1); }
  const torch::Tensor& exp_avg_diff() const { return slot(2); }
  const torch::Tensor& neg_pre_grad() const { return slot(3); }
};

// Adan (Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models", 2022,
// algorithm 1, whose betas are one minus these). For each tensor p with gradient g, at step t:
//
//   d = g - previous g                              (0 at the first step)
//   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) d
//   n = beta3 n + (1 - beta3) (g + beta2 d)^2
//   u = (m / (1 - beta1^t) + beta2 v / (1 - beta2^t)) / (sqrt(n / (1 - beta3^t)) + eps)
//   p = (p - lr u) / (1 + lr weight_decay),   with no_prox   p = (1 - lr weight_decay) p - lr u
//
// Parameters: float32, float64, bfloat16 or float16 tensors on the CPU or a CUDA device, of any shape and of
// any layout that does not overlap itself; states have the parameter's dtype. Throws c10::Error for options
// out of range.
class Adan : public FusedOptimizer<Adan, AdanOptions, AdanParamState> {
 public:
  explicit Adan(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, AdanOptions defaults = {})
      : FusedOptimizer(param_groups, std::make_unique<AdanOptions>(defaults)) {
    const auto [beta1, beta2, beta3] = defaults.betas();
    detail::check_at_least_zero(defaults.max_grad_norm(), "Max grad norm");
    detail::check_at_least_zero(defaults.lr(), "learning rate");
    detail::check_at_least_zero(defaults.eps(), "epsilon value");
    detail::check_betas({beta1, beta2});
    detail::check_beta(2, beta3);
    detail::check_at_least_zero(defaults.weight_decay(), "weight_decay value");
  }
  explicit Adan(std::vector<torch::Tensor> params, AdanOptions defaults = {})
      : Adan({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  // Forgets all steps so far: the next one is again a first.
  void restart_opt() {
    for (auto& [key, state] : state_) static_cast<AdanParamState&>(*state).zero();
  }

  static size_t slots(const AdanOptions&) { return 4; }
  static double initial_value(const AdanOptions&) { return 0; }
  static double max_grad_norm(const AdanOptions& o) {
    return o.max_grad_norm() == 0 ? std::numeric_limits<double>::infinity() : o.max_grad_norm();
  }
  static double grad_norm_eps(const AdanOptions& options) { return options.eps(); }
  static void prepare(const AdanOptions& o, int64_t plan, double grad_factor) {
    static const auto op = detail::find_op<void(int64_t, double, double, double, double, double, double, bool,
                                                bool, double, int64_t)>("fusedstep::adan_prepare");
    const auto [beta1, beta2, beta3] = o.betas();
    op.call(plan, o.lr(), beta1, beta2, beta3, o.eps(), o.weight_decay(), o.no_prox(), o.maximize(),
            grad_factor, static_cast<int64_t>(grad_use(o)));
  }
};

}  // namespace fusedstep::optim
