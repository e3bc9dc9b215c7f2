#include "src/ops/rules.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "fusedstep/rules/list.h"
#include "src/steps/factored.h"
#include "src/steps/rowwise.h"

namespace fusedstep::ops {
namespace {

template <class Hyper>
Hyper hyper_of(std::span<const double> options) {
  Hyper hyper;
  std::memcpy(static_cast<void*>(&hyper), options.data(), sizeof hyper);
  return hyper;
}

template <template <unsigned> class R>
BoundRule bind(std::span<const double> options) {
  const auto hyper = hyper_of<typename R<0>::Hyper>(options);
  return bind_rule<R>(hyper, hyper.flags());
}

template <class Hyper>
Rule described(std::string name, std::span<const rules::StateSpec> states, std::span<const Role> roles,
               BoundRule (*bind)(std::span<const double> options)) {
  constexpr size_t kOptions = std::size(Hyper::kNames);
  static_assert(sizeof(Hyper) == kOptions * sizeof(double), "each hyper-parameter is a double, with a name");
  const Hyper defaults;
  std::vector<double> values(kOptions);
  std::memcpy(values.data(), &defaults, sizeof defaults);
  return {std::move(name),
          {std::begin(Hyper::kNames), std::end(Hyper::kNames)},
          std::move(values),
          states,
          roles,
          bind};
}

template <template <unsigned> class R>
Rule described(std::string name) {
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
  return described<typename R<0>::Hyper>(std::move(name), R<0>::kAllStates, {}, bind<R>);
}

Rule rule_over_rows() {
  static constexpr rules::StateSpec kStates[] = {{"sum", rules::Sign::kNotNegative}};
  return described<RowwiseOptions>(
      "rowwise_adagrad", kStates, kRowwiseRoles,
      [](std::span<const double> options) { return bind_rowwise(hyper_of<RowwiseOptions>(options)); });
}

Rule rule_over_factors() {
  static constexpr rules::StateSpec kStates[] = {
      {"row", rules::Sign::kNotNegative}, {"column", rules::Sign::kNotNegative}, {"exp_avg"}};
  return described<AdafactorHyper>(
      "adafactor", kStates, kAdafactorRoles,
      [](std::span<const double> options) { return bind_adafactor(hyper_of<AdafactorHyper>(options)); });
}

std::vector<std::string> rule_names() {
  std::vector<std::string> names;
  for (const Rule& rule : rules()) names.push_back(rule.name);
  return names;
}

const Rule& rule_named(std::string_view name) {
  const Rule* const found = find_rule(name);
  if (found == nullptr) throw std::runtime_error("there is no rule \"" + std::string(name) + "\"");
  return *found;
}

// Its place in the list, as the operators of a step take it.
int64_t rule_index(std::string_view rule) { return &rule_named(rule) - rules().data(); }

std::vector<std::string> rule_options(std::string_view rule) { return rule_named(rule).options; }

std::vector<double> rule_defaults(std::string_view rule) { return rule_named(rule).defaults; }

std::vector<std::string> rule_states(std::string_view rule) {
  std::vector<std::string> names;
  for (const rules::StateSpec& state : rule_named(rule).states) names.emplace_back(state.name);
  return names;
}

std::vector<std::string> rule_signed_states(std::string_view rule) {
  std::vector<std::string> names;
  for (const rules::StateSpec& state : rule_named(rule).states) {
    if (state.sign == rules::Sign::kAny) names.emplace_back(state.name);
  }
  return names;
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def("rules() -> str[]");
  m.def("rule_index(str rule) -> int");
  m.def("rule_options(str rule) -> str[]");
  m.def("rule_defaults(str rule) -> float[]");
  m.def("rule_states(str rule) -> str[]");
  m.def("rule_signed_states(str rule) -> str[]");
}

STABLE_TORCH_LIBRARY_IMPL(fusedstep, CompositeExplicitAutograd, m) {
  m.impl("rules", TORCH_BOX(&rule_names));
  m.impl("rule_index", TORCH_BOX(&rule_index));
  m.impl("rule_options", TORCH_BOX(&rule_options));
  m.impl("rule_defaults", TORCH_BOX(&rule_defaults));
  m.impl("rule_states", TORCH_BOX(&rule_states));
  m.impl("rule_signed_states", TORCH_BOX(&rule_signed_states));
}

}  // namespace

const std::vector<Rule>& rules() {
  static const auto* const all = new std::vector<Rule>{
#define FUSEDSTEP_RULE(R) described<fusedstep::rules::R>(#R),
      FUSEDSTEP_RULES(FUSEDSTEP_RULE)
#undef FUSEDSTEP_RULE
          rule_over_rows(),
      rule_over_factors()};
  return *all;
}

const Rule* find_rule(std::string_view name) {
  for (const Rule& rule : rules()) {
    if (rule.name == name) return &rule;
  }
  return nullptr;
}

const Rule& rule_at(int64_t index) {
  if (index < 0 || index >= std::ssize(rules())) {
    throw std::runtime_error("there is no rule of the number " + std::to_string(index));
  }
  return rules()[static_cast<size_t>(index)];
}

}  // namespace fusedstep::ops
