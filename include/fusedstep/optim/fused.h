// Base of the C++ optimizers: the plans behind each parameter group, and the step. They are used as
// torch::optim's:
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
#if __cplusplus <= 201703L
#error "The C++ optimizers of fusedstep need C++20: compile with -std=c++20, or set CMAKE_CXX_STANDARD to 20"
#endif

#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "fusedstep/grad_use.h"
#include "fusedstep/optim/archive.h"
#include "fusedstep/optim/errors.h"
#include "fusedstep/optim/gradients.h"
#include "fusedstep/optim/operators.h"
#include "fusedstep/optim/options.h"
#include "fusedstep/optim/param_state.h"
#include "fusedstep/optim/state_maker.h"
#include "fusedstep/rules/list.h"

namespace fusedstep::optim {

// Base of the C++ optimizers over the native rule `Rule`.
//
// Parameters are float32, float64, bfloat16 or float16 tensors on the CPU or a CUDA device, of any shape and
// of any layout that does not overlap itself. States have the parameter's shape and, unless options ask for
// another storage (FUSEDSTEP_STORAGE_OPTIONS), its dtype; the step count is one float32 number. Constructors
// throw c10::Error for options out of range, step() for parameters and gradients that the kernels cannot
// update, with nothing changed by then. A class's own comment has its formula, and what is special to it.
//
// `Derived` has
//   static Hyper hyper(const Options&)            the rule's hyper-parameters,
// and, where ranges of options are others than check_range() has, or depend on one another,
//   static void check(const Options&)             which throws c10::Error for options out of range,
// and, where a state does not start at zero, or a number not as the rule says, but by an option,
//   static double initial_value(const Options&, std::string_view name, double otherwise),
// and, where it does anything with the gradients but read them,
//   static GradUse grad_use(const Options&),
// and, where they are not the option max_grad_norm and 1e-6,
//   static double max_grad_norm(const Options&)   what the 2-norm of all gradients is clipped to,
//   static double grad_norm_eps(const Options&)   which is added to the norm that is divided by,
// and, where it takes sparse gradients,
//   static const char* sparse_error(const Options&)   null, or why it does not with these options,
// and, where a group may have options of another class,
//   static void convert(OptimizerParamGroup&)    which replaces such by its own.
template <class Derived, class Options, class State, template <unsigned> class Rule>
class FusedOptimizer : public torch::optim::Optimizer {
 public:
  explicit FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                          const Options& defaults = {})
      : torch::optim::Optimizer(param_groups, std::make_unique<Options>(defaults)) {
    Derived::check(defaults);
    detail::storage_of(defaults);
    for (size_t i = 0; i < param_groups_.size(); ++i) take_over(i, param_groups_[i]);
  }
  explicit FusedOptimizer(std::vector<torch::Tensor> params, const Options& defaults = {})
      : FusedOptimizer({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

  // Hides torch's, which is not virtual.
  // Throws c10::Error, with nothing changed, for a group that the constructor refuses.
  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method)
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    torch::optim::OptimizerParamGroup own(group);
    if (!own.has_options()) own.set_options(defaults_->clone());
    take_over(param_groups_.size(), own);
    torch::optim::Optimizer::add_param_group(own);
  }

  static void check(const Options& options) { options.check_ranges(); }
  static double initial_value(const Options&, std::string_view /*name*/, double otherwise) {
    return otherwise;
  }
  static GradUse grad_use(const Options&) { return GradUse::kLeave; }
  static double max_grad_norm(const Options& options) { return options.max_grad_norm(); }
  static double grad_norm_eps(const Options&) { return detail::kClippingEps; }
  static const char* sparse_error(const Options&) { return "sparse gradients are not supported"; }
  static void convert(torch::optim::OptimizerParamGroup&) {}

  // Evaluates the closure, if there is one, and updates every parameter that has a gradient. Returns the
  // closure's loss. Throws c10::Error, which names the parameter or the group, before any parameter is
  // changed: for a gradient that does not match its parameter in shape, dtype or device or is sparse (but see
  // Adagrad), for parameters that overlap themselves or one another in memory, for options that are out of
  // range or of another class, and for a state that is null or of another class.
  torch::Tensor step(LossClosure closure = nullptr) override { return step(StepOptions(), closure); }

  // The same, which also clips and zeroes the gradients, as Python's step(max_norm=…, zero_grad=…):
  //
  //   const torch::Tensor norm = optimizer.step({.max_norm = 1, .zero_grad = ZeroGrad::kSetToNone});
  //
  // Returns the closure's loss; without a closure, and with max_norm, the norm before clipping: one float64
  // number, on the weights' device if all of them are on one, else on the CPU; else an undefined tensor.
  // Throws c10::Error also for a max_norm that is negative or NaN, before the closure is called. A template,
  // for step({}) to be the other.
  template <class = void>
  torch::Tensor step(const StepOptions& options, const LossClosure& closure = nullptr) {
    TORCH_CHECK(!options.max_norm || *options.max_norm >= 0, "Invalid max_norm value: ", *options.max_norm);
    torch::NoGradGuard no_grad;
    torch::Tensor loss;
    if (closure) {
      at::AutoGradMode enable_grad(true);
      loss = closure();
    }
    torch::Tensor norm;
    detail::as_c10([&] { norm = update(options); });
    return closure ? loss : norm;
  }

  // Throws c10::Error for a group or a state that step() refuses for its class.
  void save(torch::serialize::OutputArchive& archive) const override {
    for (size_t i = 0; i < param_groups_.size(); ++i) {
      cast_options(i, param_groups_[i]);
      const Tensors& weights = param_groups_[i].params();
      for (size_t k = 0; k < weights.size(); ++k) {
        detail::find_state<State>(state_, weights[k], detail::place_of(i, k));
      }
    }
    for (const auto& [key, state] : state_) {
      TORCH_CHECK(dynamic_cast<const State*>(state.get()) != nullptr,
                  "a state of no parameter is null or of another class; erase it");
    }
    torch::optim::serialize<State, Options>(archive, *this);
    archive.write("optimizer", torch::IValue(class_name()));
  }
  // Loads options and states, which become codes or numbers as the options ask, from an archive of this class
  // or of torch's. Options that the archive lacks stay as they are. Throws c10::Error, with nothing changed,
  // for an archive of another optimizer, or one with an option or a state that a step would refuse.
  void load(torch::serialize::InputArchive& archive) override {
    torch::NoGradGuard no_grad;
    detail::as_c10([&] { take_from(archive); });
  }

 private:
  using Tensors = std::vector<torch::Tensor>;
  static constexpr auto& kStates = Rule<0>::kAllStates;

  // Returns the norm of the gradients if max_norm asks for it.
  torch::Tensor update(const StepOptions& asked) {
    std::vector<const Options*> options;
    for (size_t i = 0; i < param_groups_.size(); ++i) {
      options.push_back(&checked_options(i, param_groups_[i]));
    }
    const double max_norm = max_norm_of_groups(options);
    const double eps = options.empty() ? 0 : Derived::grad_norm_eps(*options.back());
    std::vector<detail::Bound> bound;
    for (size_t i = 0; i < param_groups_.size(); ++i) bind_group(i, *options[i], bound);
    const detail::Factors factors = detail::factors_of(bound, asked.max_norm, max_norm, eps);
    for (detail::Bound& each : bound) each.use = use_of_grads(*options[each.group], factors, asked.zero_grad);
    const std::vector<int64_t> aliasing = detail::aliasing_grads(bound);
    const bool clears = asked.zero_grad == ZeroGrad::kInPlace;
    const bool leaves = asked.zero_grad == ZeroGrad::kNo;
    const torch::Tensor of_grads = clears ? torch::zeros({}) : leaves ? factors.grad : torch::Tensor();
    const Tensors unwritten = of_grads.defined() ? detail::with_unwritten_grads(bound, aliasing) : Tensors();
    std::vector<int64_t> plans;
    for (const detail::Bound& each : bound) {
      prepare(*options[each.group], each, detail::take_factor(each, factors.product()));
      plans.push_back(each.plan);
    }
    static const detail::Op take_steps("fusedstep::plans_step");
    take_steps({plans});
    for (const detail::Bound& each : bound) {
      bump_versions(each.weights);
      bump_versions(each.states);
      if (each.use != GradUse::kLeave) bump_versions(each.grads);
    }
    if (!unwritten.empty()) detail::multiply_grads(unwritten, of_grads);
    if (clears) {
      for (const detail::Bound& each : bound) detail::cut_off_grads(each.weights);
    }
    if (asked.zero_grad == ZeroGrad::kSetToNone) torch::optim::Optimizer::zero_grad();
    return asked.max_norm ? factors.norm : torch::Tensor();
  }

  // What a step does with the memory of gradients. A kernel leaves them as it takes them: clipped for the
  // step alone, too.
  static GradUse use_of_grads(const Options& options, const detail::Factors& factors, ZeroGrad zero_grad) {
    if (zero_grad == ZeroGrad::kInPlace) return GradUse::kClear;
    const GradUse own = Derived::grad_use(options);
    const bool scales = factors.grad.defined() && !factors.clip.defined() && zero_grad == ZeroGrad::kNo;
    return own == GradUse::kLeave && scales ? GradUse::kScale : own;
  }

  void take_from(torch::serialize::InputArchive& archive) {
    c10::IValue saved;  // archives of torch have no name
    if (archive.try_read("optimizer", saved)) {
      const std::string name = saved.isString() ? saved.toStringRef() : "no class";
      TORCH_CHECK(name == class_name(), "the archive is of ", name, ", not of ", class_name());
    }
    std::vector<detail::SavedGroup> groups = detail::read_groups(archive, param_groups_);
    torch::serialize::InputArchive states;
    archive.read("state", states);
    std::vector<Options> options;
    decltype(state_) loaded;
    for (size_t i = 0; i < groups.size(); ++i) {
      options.push_back(own_options(i, param_groups_[i]));
      detail::read_options(detail::name_of_group(i), class_name(), groups[i], options[i]);
      options[i].complete_storage(static_cast<const Options&>(*defaults_));
      check_options([&] { return detail::name_of_group(i) + " of the archive"; }, options[i]);
      read_states(i, options[i], groups[i].keys, states, loaded);
    }
    for (const auto& [key, state] : state_) loaded.emplace(key, nullptr);
    // Nothing of this allocates.
    for (auto& [key, state] : state_) {
      auto& place = loaded.find(key)->second;
      if (place == nullptr) place = std::move(state);
    }
    state_.swap(loaded);
    for (size_t i = 0; i < groups.size(); ++i) {
      static_cast<Options&>(param_groups_[i].options()) = std::move(options[i]);
    }
  }

  static std::string class_name() { return c10::demangle(typeid(Derived).name()); }

  // Throws c10::Error for options of another class.
  static const Options& cast_options(size_t index, const torch::optim::OptimizerParamGroup& group) {
    const torch::optim::OptimizerOptions& options = group.options();
    const auto* const found = dynamic_cast<const Options*>(&options);
    TORCH_CHECK(found != nullptr, detail::name_of_group(index), ": the options must be ",
                c10::demangle(typeid(Options).name()), ", not ", c10::demangle(typeid(options).name()));
    return *found;
  }

  // The options of a group with this index, converted where the class takes them from others.
  static const Options& own_options(size_t index, torch::optim::OptimizerParamGroup& group) {
    Derived::convert(group);
    return cast_options(index, group);
  }

  // The same, in range.
  static const Options& checked_options(size_t index, torch::optim::OptimizerParamGroup& group) {
    const Options& options = own_options(index, group);
    check_options([&] { return detail::name_of_group(index); }, options);
    return options;
  }

  template <class Name>
  static void check_options(const Name& name, const Options& options) {
    detail::in_name_of(name, [&] {
      Derived::check(options);
      detail::storage_of(options);
    });
  }

  // The way in which a parameter keeps its value.
  static detail::Way way_of(const detail::Storage& storage, size_t group, size_t place,
                            const torch::Tensor& weight) {
    return detail::in_name_of([&] { return detail::name_of_parameter(group, place); },
                              [&] { return detail::way_of(storage, weight); });
  }

  // Throws c10::Error for a group that cannot be stepped with its options.
  static void take_over(size_t index, torch::optim::OptimizerParamGroup& group) {
    const detail::Storage storage = detail::storage_of(checked_options(index, group));
    for (size_t i = 0; i < group.params().size(); ++i) way_of(storage, index, i, group.params()[i]);
  }

  // The rule's states that these options ask for, as indices of kStates.
  static std::vector<size_t> slots(const Options& options) {
    const unsigned flags = Derived::hyper(options).flags();
    std::vector<size_t> found;
    for (size_t k = 0; k < std::size(kStates); ++k) {
      if (kStates[k].flag == 0 || (flags & kStates[k].flag) != 0) found.push_back(k);
    }
    return found;
  }

  static void prepare(const Options& options, const detail::Bound& bound, double grad_factor) {
    static const detail::Op op("fusedstep::plan_prepare");
    static const int64_t rule = detail::rule_index(rules::kNameOf<Rule>);
    op({bound.plan, rule, detail::numbers(Derived::hyper(options), options.maximize()), grad_factor,
        static_cast<int64_t>(bound.use)});
  }

  // Weights of a group with gradients, those that keep their values in one way.
  struct Launch {
    Tensors weights, grads;
    std::vector<int64_t> places;  // among all weights of the optimizer: the group, and the weight in it
  };

  void bind_group(size_t index, const Options& options, std::vector<detail::Bound>& bound) {
    const torch::optim::OptimizerParamGroup& group = param_groups_[index];
    const detail::Storage storage = detail::storage_of(options);
    const char* const sparse_error = Derived::sparse_error(options);
    std::map<detail::Way, Launch> launches;
    for (size_t i = 0; i < group.params().size(); ++i) {
      const torch::Tensor& weight = group.params()[i];
      if (!weight.grad().defined()) continue;
      const int64_t place = detail::place_of(index, i);
      check_kinds(place, weight, weight.grad(), sparse_error);
      Launch& launch = launches[way_of(storage, index, i, weight)];
      launch.weights.push_back(weight);
      launch.grads.push_back(detail::in_memory(weight.grad()));
      launch.places.push_back(place);
    }
    if (launches.empty()) return;
    auto maker = state_maker(state_, options, storage);
    for (const auto& [way, launch] : launches) maker.make_missing(launch.weights, launch.places);
    // A plan holds states, of which those of another way are of no use any more.
    std::erase_if(plans_, [&](const auto& each) {
      return each.first.first == index && !launches.contains(each.first.second);
    });
    for (auto& [way, launch] : launches) {
      bind_launch(index, options, way, std::move(launch), bound);
    }
  }

  // Throws c10::Error for tensors that no kernel can be asked about.
  static void check_kinds(int64_t place, const torch::Tensor& weight, const torch::Tensor& grad,
                          const char* sparse_error) {
    const auto has_memory = [](const torch::Tensor& tensor) {
      return tensor.layout() == torch::kStrided && (tensor.is_cpu() || tensor.is_cuda());
    };
    TORCH_CHECK(has_memory(weight), detail::name_of_place(place), ": the weight has the layout ",
                weight.layout(), " on ", weight.device(),
                "; it must be a dense tensor on the CPU or a CUDA device");
    const torch::Dtype dtype = weight.scalar_type();
    TORCH_CHECK(dtype == torch::kFloat32 || dtype == torch::kFloat64 || detail::has_16_bits(weight),
                detail::name_of_place(place), ": the weight is ", detail::name_of_dtype(dtype),
                "; it must be float32, float64, bfloat16 or float16");
    if (grad.is_sparse()) {
      TORCH_CHECK(sparse_error == nullptr, detail::name_of_place(place), ": ", sparse_error);
    } else {
      TORCH_CHECK(has_memory(grad), detail::name_of_place(place), ": the gradient has the layout ",
                  grad.layout(), " on ", grad.device(), "; it must be a dense tensor on the weight's device");
    }
  }

  void bind_launch(size_t index, const Options& options, detail::Way way, Launch launch,
                   std::vector<detail::Bound>& bound) {
    std::unique_ptr<detail::Plan>& plan = plans_[{index, way}];
    detail::PlanOperands operands = operands_of(options, way, std::move(launch.weights), launch.places);
    const auto text = [&](std::string_view said) {
      return text_of(said, options, way, {operands.weights, launch.grads, launch.places});
    };
    detail::with_text(text, [&] { bind(operands, launch.grads, plan); });
    operands.states.insert(operands.states.end(), operands.steps.begin(), operands.steps.end());
    bound.push_back({index, plan->handle(), std::move(operands.weights), std::move(launch.grads),
                     std::move(operands.states)});
  }

  static void bind(const detail::PlanOperands& operands, const Tensors& grads,
                   std::unique_ptr<detail::Plan>& plan) {
    if (plan == nullptr || !plan->is_of(operands)) plan = std::make_unique<detail::Plan>(operands);
    static const detail::Op op("fusedstep::plan_bind_sparse");
    const auto binds = [&] { return op({plan->handle(), operands.weights, grads})[0].toInt() >= 0; };
    if (binds()) return;
    // The weights are on another device now.
    plan = std::make_unique<detail::Plan>(operands);
    TORCH_CHECK(binds(), "the weights of a group must be on one device");
  }

  // An error's text with names of parameters, also where it tells no place: it is of that which has it alone.
  std::string text_of(std::string_view said, const Options& options, detail::Way way, const Launch& launch) {
    const std::string advised = std::string(said).append(detail::advice(said));
    if (said.starts_with("tensor ")) return detail::with_names(advised, launch.places);
    for (size_t i = 0; i < launch.weights.size(); ++i) {
      std::unique_ptr<detail::Plan> plan;
      try {
        bind(operands_of(options, way, {launch.weights[i]}, {launch.places[i]}), {launch.grads[i]}, plan);
      } catch (const std::exception&) {
        return detail::name_of_place(launch.places[i]) + ": " + advised;
      }
    }
    return detail::name_of_group(static_cast<size_t>(launch.places[0]) >> 32) + ": " + advised;
  }

  // The tensors of weights, whose states are whole, as a plan takes them.
  detail::PlanOperands operands_of(const Options& options, detail::Way way, Tensors weights,
                                   const std::vector<int64_t>& places) {
    detail::PlanOperands found;
    Tensors absmax;
    for (const size_t k : slots(options)) {
      for (const torch::Tensor& weight : weights) {
        const State& state = state_of(weight);
        found.states.push_back(state.slot(k));
        if (detail::is_codes(state.slot(k))) absmax.push_back(state.absmax(k));
      }
    }
    found.has_beside = detail::has_beside(way);
    for (const torch::Tensor& weight : weights) {
      if (found.has_beside) found.states.push_back(state_of(weight).beside(way));
    }
    found.states.insert(found.states.end(), absmax.begin(), absmax.end());
    for (size_t k = 0; k < State::kNumbers.size(); ++k) {
      for (const torch::Tensor& weight : weights) found.steps.push_back(state_of(weight).number(k));
    }
    if (way == detail::Way::kStochastic) found.draws = detail::Draws{options.seed(), places};
    found.weights = std::move(weights);
    return found;
  }

  static double max_norm_of_groups(const std::vector<const Options*>& options) {
    double max_norm = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < options.size(); ++i) {
      const double of_group = Derived::max_grad_norm(*options[i]);
      TORCH_CHECK(i == 0 || of_group == max_norm, detail::name_of_group(i),
                  ": max_grad_norm must be the same in all groups, not ", max_norm, " and ", of_group);
      max_norm = of_group;
    }
    return max_norm;
  }

  State& state_of(const torch::Tensor& weight) {
    return static_cast<State&>(*state_[weight.unsafeGetTensorImpl()]);
  }

  static detail::StateMaker<State> state_maker(decltype(state_)& states, const Options& options,
                                               const detail::Storage& storage) {
    return {states, storage, slots(options), [&options](std::string_view name, double otherwise) {
              return Derived::initial_value(options, name, otherwise);
            }};
  }

  // Adds the states of a group's weights, as its options to come ask for them, to others.
  void read_states(size_t index, const Options& options, const std::vector<std::string>& keys,
                   torch::serialize::InputArchive& archive, decltype(state_)& loaded) const {
    const detail::Storage storage = detail::storage_of(options);
    auto maker = state_maker(loaded, options, storage);
    for (size_t i = 0; i < keys.size(); ++i) {
      const torch::Tensor& weight = param_groups_[index].params()[i];
      way_of(storage, index, i, weight);
      torch::serialize::InputArchive saved;
      if (!archive.try_read(keys[i], saved)) continue;
      auto state = std::make_unique<State>();
      state->serialize(saved);
      detail::fit_state(detail::name_of_parameter(index, i), weight, *state);
      loaded[weight.unsafeGetTensorImpl()] = std::move(state);
      maker.convert(weight);
    }
  }

  // Autograd notices by its version that a tensor saved for backward has changed since; operators over the
  // stable interface raise none by themselves.
  static void bump_versions(const Tensors& tensors) {
    for (const torch::Tensor& tensor : tensors) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }

  std::map<std::pair<size_t, detail::Way>, std::unique_ptr<detail::Plan>> plans_;  // by group and way
};

}  // namespace fusedstep::optim
