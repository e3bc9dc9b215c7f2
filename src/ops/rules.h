// The rules by name, with what each tells of itself: the one place where names and numbers become a rule.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/ops/direct.h"
#include "src/plan/tensor_view.h"
#include "src/steps/step.h"

namespace fusedstep::ops {

struct Rule {
  std::string name;                  // as in the list of rules, in lower case
  std::vector<std::string> options;  // names of its hyper-parameters, in order
  std::vector<double> defaults;      // their values
  std::span<const rules::StateSpec> states;
  std::span<const Role> roles;  // of the states; none: each has a number for each element
  BoundRule (*bind)(std::span<const double> options);  // as many as there are names
};

// Every rule, in the order of the list.
const std::vector<Rule>& rules();

// The rule at a place in the list. Throws std::runtime_error if there is none.
//
// Operators of a step take a number in place of a name: torch 2.11 leaks 32 bytes for each text that an
// operator of its stable ABI is given.
const Rule& rule_at(int64_t index);

}  // namespace fusedstep::ops
