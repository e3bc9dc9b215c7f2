#include "tests/cpp/cases.h"

#include <algorithm>
#include <array>
#include <bit>
#include <ostream>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "src/core/phases.h"
#include "src/plan/tensor_view.h"

namespace fusedstep::test {
namespace {

// The value of a hyper-parameter in a test; the default is that of the rule. None may be without effect.
constexpr double value_of(std::string_view name, double default_value, unsigned flags) {
  if (name == "lr") return 0.02;
  if (name == "beta1") return 0.8;
  if (name == "beta2") return 0.95;
  if (name == "eps") return 1e-3;
  if (name == "weight_decay") return 0.125;
  if (name == "decoupled_weight_decay") return flags == 0 ? 1 : 0;  // the only flag is that of coupled decay
  if (default_value == 0) {
    throw std::logic_error(
        "a rule with a hyper-parameter that does nothing by default has an own hyper_of()");
  }
  return default_value;
}

template <class Hyper>
constexpr auto values_of(unsigned flags) {
  auto values = std::bit_cast<std::array<double, std::size(Hyper::kNames)>>(Hyper());
  for (size_t i = 0; i < values.size(); ++i) values[i] = value_of(Hyper::kNames[i], values[i], flags);
  return values;
}

// The hyper-parameters that a rule is tested with.
template <template <unsigned> class Rule>
typename Rule<0>::Hyper hyper_of(unsigned flags) {
  using Hyper = typename Rule<0>::Hyper;
  constexpr auto kWithoutFlags = values_of<Hyper>(0), kWithFlags = values_of<Hyper>(1);
  return std::bit_cast<Hyper>(flags == 0 ? kWithoutFlags : kWithFlags);
}
template <>
rules::AdadeltaHyper hyper_of<rules::Adadelta>(unsigned) {
  return {.lr = 0.5, .rho = 0.8, .eps = 1e-3, .weight_decay = 0.125};
}
template <>
rules::AdagradHyper hyper_of<rules::Adagrad>(unsigned) {
  return {.lr = 0.05, .lr_decay = 0.25, .weight_decay = 0.125, .eps = 1e-3};
}
template <>
rules::AdamHyper hyper_of<rules::Adam>(unsigned flags) {
  const double decoupled = flags & rules::kAdamCoupledDecay ? 0 : 1;
  const double as_transformers = flags == rules::kAdamAmsgrad ? 1 : 0;
  return {.lr = 0.02,
          .beta1 = 0.8,
          .beta2 = 0.95,
          .eps = 1e-3,
          .weight_decay = 0.125,
          .decoupled_weight_decay = decoupled,
          .eps_before_bias = as_transformers,
          .decay_last = as_transformers};
}
template <>
rules::AdanHyper hyper_of<rules::Adan>(unsigned) {
  return {.lr = 0.02,
          .beta1 = 0.8,
          .beta2 = 0.7,
          .beta3 = 0.95,
          .eps = 1e-3,
          .weight_decay = 0.125,
          .no_prox = 0};
}
template <>
rules::LambHyper hyper_of<rules::Lamb>(unsigned flags) {
  rules::LambHyper hyper = {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.125};
  if (flags == 0) {  // bounds that some of the tensors reach
    hyper.debias = 0;
    hyper.debias_lr = 1;
    hyper.min_ratio = 1.5;
    hyper.max_ratio = 2;
  }
  if (flags == rules::kLambDecoupled) hyper.max_weight_norm = 4;
  return hyper;
}
template <>
rules::ASGDHyper hyper_of<rules::ASGD>(unsigned) {
  return {.lr = 0.01, .lambd = 0.5, .alpha = 0.5, .t0 = -1, .weight_decay = 0.125};
}
template <>
rules::LionHyper hyper_of<rules::Lion>(unsigned) {
  // Binary fractions: with others a rounding decides on the sign of what cancels.
  return {.lr = 0.02, .beta1 = 0.75, .beta2 = 0.875, .weight_decay = 0.125};
}
template <>
rules::RpropHyper hyper_of<rules::Rprop>(unsigned) {
  return {.etaminus = 0.75, .etaplus = 1.25, .step_size_min = 0.125, .step_size_max = 2};
}
template <>
rules::SGDHyper hyper_of<rules::SGD>(unsigned) {
  return {.lr = 0.05, .momentum = 0.75, .dampening = 0.25, .weight_decay = 0.125};
}
template <>
rules::NAdamHyper hyper_of<rules::NAdam>(unsigned flags) {
  const double decoupled = flags & rules::kNAdamCoupledDecay ? 0 : 1;
  return {.lr = 0.02,
          .beta1 = 0.8,
          .beta2 = 0.95,
          .eps = 1e-3,
          .weight_decay = 0.125,
          .momentum_decay = 0.25,
          .decoupled_weight_decay = decoupled};
}
template <>
rules::RMSpropHyper hyper_of<rules::RMSprop>(unsigned) {
  return {.lr = 0.02, .alpha = 0.8, .eps = 1e-3, .weight_decay = 0.125, .momentum = 0.5, .centered = 1};
}

// In more than double, so that the order of summation does not show.
struct NormSums {
  long double weight = 0, update = 0;
  void add(long double p, long double u) {
    weight += p * p;
    update += u * u;
  }
};

// Calls work(state, i) with the states of each element, and keeps what it leaves in them.
template <int kStates, class Work>
void for_each_element(Values& x, Work work) {
  for (size_t i = 0; i < x.weight.size(); ++i) {
    rules::States<double, kStates> state;
    for (int k = 0; k < kStates; ++k) state[k] = x.states[k][i];
    work(state, i);
    for (int k = 0; k < kStates; ++k) x.states[k][i] = state[k];
  }
}

template <template <unsigned> class Rule, unsigned kFlags>
void oracle_step(double step, Values& x) {
  using R = Rule<kFlags>;
  double numbers[kMaxNumbers] = {};
  if constexpr (rules::kNumbersOf<R> != 0)
    std::ranges::transform(R::kNumbers, numbers, &rules::NumberSpec::first);
  const auto scalars = rules::prepare<R, double>(hyper_of<Rule>(kFlags), step, numbers);
  if constexpr (kHasNorms<R>) {
    NormSums norms;
    x.update.resize(x.weight.size());
    for_each_element<R::kStates>(x, [&](rules::States<double, R::kStates>& state, size_t i) {
      x.update[i] = R::direction(scalars, x.weight[i], x.grad[i], state);
      norms.add(R::decayed(scalars, x.weight[i]), x.update[i]);
    });
    x.ratio = R::trust_ratio(hyper_of<Rule>(kFlags), static_cast<double>(norms.weight),
                             static_cast<double>(norms.update));
    const double factor = R::factor(scalars, x.ratio);
    for (size_t i = 0; i < x.weight.size(); ++i) R::apply(scalars, factor, x.weight[i], x.update[i]);
  } else {
    for_each_element<R::kStates>(x, [&](rules::States<double, R::kStates>& state, size_t i) {
      update<R>(scalars, x.weight[i], x.grad[i], state);
    });
  }
}

template <template <unsigned> class Rule, unsigned... kFlags>
void add_rule(const char* name, std::integer_sequence<unsigned, kFlags...>, std::vector<RuleCase>& rules) {
  (rules.push_back({std::string(name) + "_flags" + std::to_string(kFlags), Rule<kFlags>::kStates,
                    kHasNorms<Rule<kFlags>>, bind_rule<Rule>(hyper_of<Rule>(kFlags), kFlags),
                    oracle_step<Rule, kFlags>, kFlags, sizeof...(kFlags)}),
   ...);
}

std::vector<RuleCase> all_rules() {
  std::vector<RuleCase> rules;
#define FUSEDSTEP_ADD(Rule)                                                                               \
  add_rule<rules::Rule>(#Rule, std::make_integer_sequence<unsigned, rules::Rule<0>::kFlagCombinations>{}, \
                        rules);
  FUSEDSTEP_RULES(FUSEDSTEP_ADD)
#undef FUSEDSTEP_ADD
  return rules;
}

}  // namespace

std::string name(DType dtype) { return name_of(dtype); }

DType Case::dtype_of_state(int k) const {
  if (k < rule.states || weight_code == WeightCode::kPlain) return state_dtype;
  return weight_code == WeightCode::kSplit ? DType::kInt16 : dtype;
}

Plan Case::plan(size_t tensors, int device) const {
  Plan plan(tensors, states(), device, has_master);
  if (weight_code != WeightCode::kRandom) return plan;
  std::vector<int64_t> places;
  for (size_t i = 0; i < tensors; ++i) places.push_back((int64_t{5} << 32) + static_cast<int64_t>(3 * i));
  plan.round_at_random(/*seed=*/7, places);
  return plan;
}

std::vector<GradUse> grad_uses(const Case& test_case) {
  constexpr GradUse kUses[] = {GradUse::kLeave, GradUse::kScale, GradUse::kScratch, GradUse::kClear};
  const auto [flags, format] = std::pair(test_case.rule.flags, static_cast<unsigned>(test_case.dtype));
  if (flags == 0) return {std::begin(kUses), std::end(kUses)};
  return {kUses[(flags + format) % std::size(kUses)]};
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const RuleCase& rule : all_rules()) {
    std::vector<Case> of_rule;
    for (const DType dtype : kDTypes) of_rule.push_back({rule, dtype});
    for (const bool has_master : {false, true}) {
      for (const DType dtype : {DType::kBFloat16, DType::kHalf}) {
        of_rule.push_back({rule, dtype, DType::kFloat, has_master});
      }
    }
    for (size_t format = 0; format < of_rule.size(); ++format) {
      if (!kSanitized || format % rule.flag_combinations == rule.flags) cases.push_back(of_rule[format]);
    }
  }
  return cases;
}

std::vector<Case> two_phase_cases() {
  std::vector<Case> cases = all_cases();
  std::erase_if(cases, [](const Case& c) { return !c.rule.two_phase; });
  return cases;
}

std::string name(const Case& test_case) {
  std::string text = test_case.rule.name + "_" + name(test_case.dtype);
  if (test_case.state_dtype != test_case.dtype) text += "_" + name(test_case.state_dtype);
  switch (test_case.weight_code) {
    case WeightCode::kPlain:
      return test_case.has_master ? text + "_master" : text;
    case WeightCode::kSplit:
      return text + "_split";
    case WeightCode::kKahanBf16:
    case WeightCode::kKahanHalf:
      return text + "_kahan";
    case WeightCode::kRandom:
      return text + "_stochastic";
  }
  return "?";
}

void PrintTo(const Case& test_case, std::ostream* out) { *out << name(test_case); }

}  // namespace fusedstep::test
