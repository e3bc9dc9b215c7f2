// Base of the C++ optimizers: states by name, the plan behind each parameter group, and the step. They are
// used as torch::optim's:
//
//   #include <fusedstep/optim/adam.h>
//   #include <torch/torch.h>
//
//   int main() {
//     torch::nn::Linear model(4, 1);
//     const auto options = fusedstep::optim::AdamOptions(1e-2).amsgrad(true);
//     fusedstep::optim::Adam optimizer(model->parameters(), options);
//     for (int step = 0; step < 3; ++step) {
//       optimizer.zero_grad();
//       model(torch::ones({8, 4})).square().mean().backward();
//       optimizer.step();
//     }
//   }
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "fusedstep/grad_use.h"
#include "fusedstep/isa.h"
#include "fusedstep/rules/list.h"

namespace fusedstep::optim {
namespace detail {

// An operator of libfusedstep.so. The call to fusedstep_abi_version() ties the program to that library, which
// it would otherwise reach through the dispatcher only, so that the linker could drop it.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  TORCH_CHECK(fusedstep_abi_version() == FUSEDSTEP_ABI_VERSION, "libfusedstep.so has interface version ",
              fusedstep_abi_version(), ", the headers have ", FUSEDSTEP_ABI_VERSION);
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline void check_at_least_zero(double value, const char* what) {
  TORCH_CHECK(value >= 0, "Invalid ", what, ": ", value);
}

inline void check_beta(int index, double beta) {
  TORCH_CHECK(0 <= beta && beta < 1, "Invalid beta parameter at index ", index, ": ", beta);
}

inline void check_betas(const std::tuple<double, double>& betas) {
  check_beta(0, std::get<0>(betas));
  check_beta(1, std::get<1>(betas));
}

inline void check_above_zero(double value, const char* what) {
  TORCH_CHECK(value > 0, "Invalid ", what, ": ", value);
}

// Reads an option that older archives lack; it is then left alone.
template <class T>
void read_if_there(torch::serialize::InputArchive& archive, const char* name, T& option) {
  c10::IValue value;
  if (archive.try_read(name, value)) option = value.to<T>();
}

// The hyper-parameters of a rule as its operator takes them, in their order and, last, whether to maximize.
template <class Hyper>
std::vector<double> numbers(const Hyper& hyper, bool maximize) {
  constexpr size_t kCount = std::size(Hyper::kNames);
  static_assert(sizeof(Hyper) == kCount * sizeof(double));
  std::vector<double> values(kCount);
  std::memcpy(values.data(), &hyper, sizeof hyper);
  values.push_back(maximize);
  return values;
}

// The native plan of a list of weights and their states, and who they are.
class Plan {
 public:
  Plan(const std::vector<torch::Tensor>& weights, const std::vector<torch::Tensor>& states,
       const std::vector<torch::Tensor>& steps)
      : key_(key(weights, states, steps)) {
    static const auto op =
        find_op<int64_t(at::TensorList, at::TensorList, at::TensorList, bool)>("fusedstep::plan_new");
    handle_ = op.call(weights, states, steps, /*masters=*/false);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    static const auto op = find_op<void(int64_t)>("fusedstep::plan_delete");
    op.call(handle_);
  }

  int64_t handle() const { return handle_; }
  bool is_of(const std::vector<torch::Tensor>& weights, const std::vector<torch::Tensor>& states,
             const std::vector<torch::Tensor>& steps) const {
    return key_ == key(weights, states, steps);
  }

 private:
  using Key = std::vector<const void*>;
  static Key key(const std::vector<torch::Tensor>& weights, const std::vector<torch::Tensor>& states,
                 const std::vector<torch::Tensor>& steps) {
    Key impls;
    impls.reserve(weights.size() + states.size() + steps.size());
    for (const auto* list : {&weights, &states, &steps}) {
      for (const torch::Tensor& tensor : *list) impls.push_back(tensor.unsafeGetTensorImpl());
    }
    return impls;
  }

  Key key_;
  int64_t handle_ = 0;
};

}  // namespace detail

// Declares the members of an optimizer's options from a list of X(type, name, default value), of which `lr`
// is one: what TORCH_ARG makes of each, archives and comparison. An option that an archive lacks is left as
// it is: later versions have more of them.
#define FUSEDSTEP_OPTIONS(Options, LIST)                                                                   \
 public:                                                                                                   \
  Options() = default;                                                                                     \
  /* NOLINTNEXTLINE(google-explicit-constructor): as torch's options */                                    \
  Options(double lr) : lr_(lr) {}                                                                          \
  LIST(FUSEDSTEP_DECLARE_OPTION)                                                                           \
 public:                                                                                                   \
  void serialize(torch::serialize::InputArchive& archive) override { LIST(FUSEDSTEP_READ_OPTION) }         \
  void serialize(torch::serialize::OutputArchive& archive) const override { LIST(FUSEDSTEP_WRITE_OPTION) } \
  double get_lr() const override { return lr(); }                                                          \
  void set_lr(const double lr) override { lr_ = lr; }                                                      \
  friend bool operator==(const Options& a, const Options& b) { return true LIST(FUSEDSTEP_COMPARE_OPTION); }
#define FUSEDSTEP_DECLARE_OPTION(type, name, value) TORCH_ARG(type, name) = value;
#define FUSEDSTEP_READ_OPTION(type, name, value) detail::read_if_there(archive, #name, name##_);
#define FUSEDSTEP_WRITE_OPTION(type, name, value) _TORCH_OPTIM_SERIALIZE_TORCH_ARG(name);
#define FUSEDSTEP_COMPARE_OPTION(type, name, value) &&a.name##_ == b.name##_

// Types and values of options that have commas in them, or are long.
using TwoBetas = std::tuple<double, double>;
using TwoNumbers = std::tuple<double, double>;
using ThreeBetas = std::tuple<double, double, double>;
inline constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// The numbers that a rule keeps for each parameter. The first is the step count.
template <class Rule>
constexpr auto numbers_of() {
  std::array<rules::NumberSpec, 1 + rules::kNumbersOf<Rule>> numbers{{{"step", 0}}};
  if constexpr (rules::kNumbersOf<Rule> != 0) std::ranges::copy(Rule::kNumbers, numbers.begin() + 1);
  return numbers;
}

// The state of one parameter: numbers (each a float32 tensor) and the rule's states, by name.
template <class Derived, template <unsigned> class Rule>
class ParamState : public torch::optim::OptimizerCloneableParamState<Derived> {
 public:
  static constexpr auto& kStates = Rule<0>::kAllStates;
  static constexpr auto kNumbers = numbers_of<Rule<0>>();

  const torch::Tensor& step() const { return number(0); }
  void step(torch::Tensor step) { number(0, std::move(step)); }
  const torch::Tensor& number(size_t i) const { return numbers_[i]; }
  void number(size_t i, torch::Tensor tensor) { numbers_[i] = std::move(tensor); }
  const torch::Tensor& slot(size_t i) const { return slots_[i]; }
  void slot(size_t i, torch::Tensor tensor) { slots_[i] = std::move(tensor); }

  bool has_slots() const {
    return std::any_of(slots_.begin(), slots_.end(),
                       [](const torch::Tensor& slot) { return slot.defined(); });
  }

  // As before a first step.
  void zero() {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < numbers_.size(); ++i) numbers_[i].fill_(kNumbers[i].first);
    for (torch::Tensor& slot : slots_) {
      if (slot.defined()) slot.zero_();
    }
  }

  void serialize(torch::serialize::OutputArchive& archive) const override {
    for (size_t i = 0; i < numbers_.size(); ++i) {
      archive.write(kNumbers[i].name, numbers_[i], /*is_buffer=*/true);
    }
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].defined()) archive.write(kStates[i].name, slots_[i], /*is_buffer=*/true);
    }
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    for (size_t i = 0; i < numbers_.size(); ++i) {
      archive.read(kNumbers[i].name, numbers_[i], /*is_buffer=*/true);
    }
    for (size_t i = 0; i < slots_.size(); ++i) {
      archive.try_read(kStates[i].name, slots_[i], /*is_buffer=*/true);
    }
  }

 private:
  std::array<torch::Tensor, kNumbers.size()> numbers_;
  std::array<torch::Tensor, std::size(Rule<0>::kAllStates)> slots_;
};

// Base of the C++ optimizers over the native rule `Rule`.
//
// Parameters are float32, float64, bfloat16 or float16 tensors on the CPU or a CUDA device, of any shape and
// of any layout that does not overlap itself. States have the parameter's shape and dtype; the step count is
// one float32 number. Constructors throw c10::Error for options out of range, step() for parameters and
// gradients that the kernels cannot update, with nothing changed by then.
//
// `Derived` has
//   static constexpr const char* kRule            the rule's name,
//   static void check(const Options&)             which throws c10::Error for options out of range,
//   static Hyper hyper(const Options&)            the rule's hyper-parameters,
// and, where a state does not start at zero, or a number not as the rule says, but by an option,
//   static double initial_value(const Options&, std::string_view name, double otherwise),
// and, where it does anything with the gradients but read them,
//   static GradUse grad_use(const Options&),
// and, where they are not the option max_grad_norm and 1e-6,
//   static double max_grad_norm(const Options&)   what the 2-norm of all gradients is clipped to,
//   static double grad_norm_eps(const Options&)   which is added to the norm that is divided by,
// and, where it takes sparse gradients,
//   static const char* sparse_error(const Options&)   null, or why it does not with these options.
template <class Derived, class Options, class State, template <unsigned> class Rule>
class FusedOptimizer : public torch::optim::Optimizer {
 public:
  explicit FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                          const Options& defaults = {})
      : torch::optim::Optimizer(param_groups, std::make_unique<Options>(defaults)) {
    Derived::check(defaults);
  }
  explicit FusedOptimizer(std::vector<torch::Tensor> params, const Options& defaults = {})
      : FusedOptimizer({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

  static double initial_value(const Options&, std::string_view /*name*/, double otherwise) {
    return otherwise;
  }
  static GradUse grad_use(const Options&) { return GradUse::kLeave; }
  static double max_grad_norm(const Options& options) { return options.max_grad_norm(); }
  static double grad_norm_eps(const Options&) { return 1e-6; }  // as torch::nn::utils::clip_grad_norm_
  static const char* sparse_error(const Options&) { return "sparse gradients are not supported"; }

  // Evaluates the closure, if there is one, and updates every parameter that has a gradient. Returns the
  // closure's loss. Throws c10::Error or std::runtime_error, before any parameter is changed, for a gradient
  // that does not match its parameter in shape, dtype or device or is sparse (but see Adagrad), and for
  // parameters that overlap themselves or one another in memory.
  torch::Tensor step(LossClosure closure = nullptr) override {
    torch::NoGradGuard no_grad;
    torch::Tensor loss;
    if (closure) {
      at::AutoGradMode enable_grad(true);
      loss = closure();
    }
    if (param_groups_.empty()) return loss;
    const double max_norm = max_norm_of_groups();
    plans_.resize(param_groups_.size());
    std::vector<BoundGroup> bound;
    for (size_t i = 0; i < param_groups_.size(); ++i) bind_group(param_groups_[i], plans_[i], bound);
    find_aliasing_grads(bound);
    const auto& last = static_cast<const Options&>(param_groups_.back().options());
    const torch::Tensor factor = grad_factor(bound, max_norm, Derived::grad_norm_eps(last));
    std::vector<int64_t> plans;
    for (const BoundGroup& group : bound) {
      prepare(*group.options, group.plan, take_factor(group, factor));
      plans.push_back(group.plan);
    }
    static const auto take_steps = detail::find_op<void(at::IntArrayRef)>("fusedstep::plans_step");
    take_steps.call(plans);
    for (const BoundGroup& group : bound) {
      bump_versions(group.weights);
      bump_versions(group.states);
      if (Derived::grad_use(*group.options) != GradUse::kLeave) bump_versions(group.grads);
    }
    return loss;
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<State, Options>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<State, Options>(archive, *this);
  }

 private:
  using Tensors = std::vector<torch::Tensor>;
  static constexpr auto& kStates = Rule<0>::kAllStates;

  // The rule's states that these options ask for, as indices of kStates.
  static std::vector<size_t> slots(const Options& options) {
    const unsigned flags = Derived::hyper(options).flags();
    std::vector<size_t> found;
    for (size_t k = 0; k < std::size(kStates); ++k) {
      if (kStates[k].flag == 0 || (flags & kStates[k].flag) != 0) found.push_back(k);
    }
    return found;
  }

  static void prepare(const Options& options, int64_t plan, double grad_factor) {
    static const auto op =
        detail::find_op<void(int64_t, std::string_view, at::ArrayRef<double>, double, int64_t)>(
            "fusedstep::plan_prepare");
    op.call(plan, Derived::kRule, detail::numbers(Derived::hyper(options), options.maximize()), grad_factor,
            static_cast<int64_t>(Derived::grad_use(options)));
  }

  // A group that has gradients, bound.
  struct BoundGroup {
    const Options* options;
    int64_t plan;
    Tensors weights, grads, states;
  };

  void bind_group(torch::optim::OptimizerParamGroup& group, std::unique_ptr<detail::Plan>& plan,
                  std::vector<BoundGroup>& bound) {
    const auto& options = static_cast<const Options&>(group.options());
    const char* const sparse_error = Derived::sparse_error(options);
    Tensors weights, grads;
    for (const torch::Tensor& weight : group.params()) {
      if (!weight.grad().defined()) continue;
      TORCH_CHECK(!weight.grad().is_sparse() || sparse_error == nullptr, sparse_error);
      weights.push_back(weight);
      grads.push_back(in_memory(weight.grad()));
    }
    if (weights.empty()) return;
    make_missing_states(weights, options);

    Tensors states, steps;
    for (const size_t k : slots(options)) {
      for (const torch::Tensor& weight : weights) states.push_back(state_of(weight).slot(k));
    }
    for (size_t k = 0; k < State::kNumbers.size(); ++k) {
      for (const torch::Tensor& weight : weights) steps.push_back(state_of(weight).number(k));
    }
    if (plan == nullptr || !plan->is_of(weights, states, steps)) {
      plan = std::make_unique<detail::Plan>(weights, states, steps);
    }
    static const auto bind =
        detail::find_op<int64_t(int64_t, at::TensorList, at::TensorList)>("fusedstep::plan_bind_sparse");
    if (bind.call(plan->handle(), weights, grads) < 0) {  // the weights are on another device now
      plan = std::make_unique<detail::Plan>(weights, states, steps);
      TORCH_CHECK(bind.call(plan->handle(), weights, grads) >= 0,
                  "the weights of a group must be on one device");
    }
    states.insert(states.end(), steps.begin(), steps.end());
    bound.push_back({&options, plan->handle(), std::move(weights), std::move(grads), std::move(states)});
  }

  // A gradient as kernels read it: one of which the memory holds other values is copied, and lives as long as
  // the step.
  static torch::Tensor in_memory(const torch::Tensor& grad) {
    if (grad._is_zerotensor()) return torch::zeros(grad.sizes(), grad.options());
    return grad.is_neg() ? grad.resolve_neg() : grad;
  }

  // Over all groups: a gradient that one of them wrote would be another's.
  static void find_aliasing_grads(const std::vector<BoundGroup>& bound) {
    std::vector<int64_t> plans;
    bool writes = false;
    for (const BoundGroup& group : bound) {
      plans.push_back(group.plan);
      writes = writes || Derived::grad_use(*group.options) != GradUse::kLeave;
    }
    static const auto op =
        detail::find_op<std::vector<int64_t>(at::IntArrayRef)>("fusedstep::plans_aliasing_grads");
    if (writes) op.call(plans);
  }

  double max_norm_of_groups() const {
    double max_norm = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < param_groups_.size(); ++i) {
      const double of_group = Derived::max_grad_norm(static_cast<const Options&>(param_groups_[i].options()));
      TORCH_CHECK(i == 0 || of_group == max_norm, "max_grad_norm must be the same in all groups, not ",
                  max_norm, " and ", of_group);
      max_norm = of_group;
    }
    return max_norm;
  }

  // Returns the factor that clips the norm of all gradients, on the weights' device; undefined if nothing
  // clips.
  static torch::Tensor grad_factor(const std::vector<BoundGroup>& bound, double max_norm, double eps) {
    if (!std::isfinite(max_norm)) return {};
    static const auto add_norm2 =
        detail::find_op<void(int64_t, at::Tensor)>("fusedstep::plan_add_grad_norm2");
    static const auto norm_of = detail::find_op<double(at::IntArrayRef)>("fusedstep::plans_grad_norm");
    std::vector<int64_t> on_cpu;
    torch::Tensor norm2;
    for (const BoundGroup& group : bound) {
      const torch::Tensor& weight = group.weights[0];
      if (weight.is_cpu()) {
        on_cpu.push_back(group.plan);
      } else if (norm2.defined() && norm2.device() == weight.device()) {
        add_norm2.call(group.plan, norm2);
      } else {
        torch::Tensor sum = torch::zeros({}, weight.options().dtype(torch::kFloat64));
        add_norm2.call(group.plan, sum);
        norm2 = norm2.defined() ? sum + norm2.to(sum.device()) : sum;
      }
    }
    torch::Tensor norm = norm2.defined() ? norm2.sqrt() : torch::zeros({}, torch::kFloat64);
    if (!on_cpu.empty()) norm = torch::hypot(norm, torch::full_like(norm, norm_of.call(on_cpu)));
    norm = norm + eps;
    return torch::where(norm > max_norm, max_norm / norm, torch::ones_like(norm));
  }

  // The factor as a number for a step on the CPU; another finds it on its device.
  static double take_factor(const BoundGroup& group, const torch::Tensor& factor) {
    if (!factor.defined()) return 1;
    const torch::Device device = group.weights[0].device();
    if (device.is_cpu()) return factor.item<double>();
    static const auto inputs =
        detail::find_op<void(int64_t, std::optional<at::Tensor>, std::optional<at::Tensor>,
                             std::optional<at::Tensor>)>("fusedstep::plan_device_inputs");
    inputs.call(group.plan, std::nullopt, factor.to(device), std::nullopt);
    return 1;
  }

  State& state_of(const torch::Tensor& weight) {
    return static_cast<State&>(*state_[weight.unsafeGetTensorImpl()]);
  }

  void make_missing_states(const Tensors& weights, const Options& options) {
    const std::vector<size_t> all = slots(options);
    Tensors fresh;
    const auto is_whole = [&all](const State& state) {
      bool whole = true;
      for (size_t k = 0; k < State::kNumbers.size(); ++k) whole = whole && state.number(k).defined();
      for (const size_t k : all) whole = whole && state.slot(k).defined();
      return whole;
    };
    for (const torch::Tensor& weight : weights) {
      const auto found = state_.find(weight.unsafeGetTensorImpl());
      if (found == state_.end() || !is_whole(static_cast<const State&>(*found->second))) {
        fresh.push_back(weight);
      }
    }
    if (fresh.empty()) return;
    static const auto new_states =
        detail::find_op<Tensors(at::TensorList, int64_t, bool)>("fusedstep::new_states");
    const Tensors made = new_states.call(fresh, static_cast<int64_t>(all.size()), /*wide=*/false);
    for (size_t i = 0; i < made.size(); ++i) {
      const double value = Derived::initial_value(options, kStates[all[i / fresh.size()]].name, 0);
      if (value != 0) made[i].fill_(value);
    }
    for (size_t i = 0; i < fresh.size(); ++i) {
      const auto found = state_.find(fresh[i].unsafeGetTensorImpl());
      std::unique_ptr<torch::optim::OptimizerParamState> state;
      if (found == state_.end()) state = std::make_unique<State>();
      State& to = static_cast<State&>(state ? *state : *found->second);
      // Steps before there was any state to keep do not count: SGD's momentum may come later.
      const bool is_first = !to.has_slots();
      for (size_t k = 0; k < State::kNumbers.size(); ++k) {
        if (is_first || !to.number(k).defined()) {
          const auto [name, first] = State::kNumbers[k];
          to.number(k, torch::full({}, Derived::initial_value(options, name, first), torch::kFloat32));
        }
      }
      for (size_t s = 0; s < all.size(); ++s) {
        // One that is there is kept: an option such as amsgrad came later.
        if (!to.slot(all[s]).defined()) to.slot(all[s], made[s * fresh.size() + i]);
      }
      // Kept when it is whole: memory may run out before.
      if (state) state_.emplace(fresh[i].unsafeGetTensorImpl(), std::move(state));
    }
  }

  // Autograd notices by its version that a tensor saved for backward has changed since; operators over the
  // stable interface raise none by themselves.
  static void bump_versions(const Tensors& tensors) {
    for (const torch::Tensor& tensor : tensors) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }

  std::vector<std::unique_ptr<detail::Plan>> plans_;  // one a group
};

}  // namespace fusedstep::optim
