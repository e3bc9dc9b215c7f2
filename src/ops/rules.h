// The rules by name, with what each tells of itself: the one place where names and numbers become a rule.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/ops/direct.h"
#include "src/step.h"

namespace fusedstep::ops {

struct Rule {
  std::string name;                  // as in the list of rules, in lower case
  std::vector<std::string> options;  // names of its hyper-parameters, in order
  std::vector<double> defaults;      // their values
  std::span<const rules::StateSpec> states;
  // As many as there are names. Null for the rule over rows: row-wise Adagrad.
  BoundRule (*bind)(std::span<const double> options);
};

// Every rule, in the order of the list.
const std::vector<Rule>& rules();

// The rule of a name. Throws std::runtime_error if there is none.
const Rule& rule_named(std::string_view name);

}  // namespace fusedstep::ops
