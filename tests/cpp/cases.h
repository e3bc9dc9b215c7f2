// Every rule of the list with every combination of its flags, and the same algorithm in double as an oracle.
#pragma once
#include <iosfwd>
#include <string>
#include <vector>

#include "src/steps/step.h"

namespace fusedstep::test {

// One tensor's operands as the oracle sees them.
struct Values {
  std::vector<double> weight, grad;
  std::vector<std::vector<double>> states;
  std::vector<double> update;  // two-phase rules: what the weight is moved along
  double ratio = 1;            // two-phase rules: the trust ratio
};

struct RuleCase {
  std::string name;
  int states;
  bool two_phase;
  BoundRule bound;
  void (*oracle)(double step, Values& values);
  unsigned flags = 0, flag_combinations = 1;
};

// A rule for weights and states of given dtypes: what most tests are parameters of.
struct Case {
  RuleCase rule;
  DType dtype;
  DType state_dtype = dtype;
  bool has_master = false;  // or what a weight keeps beside itself otherwise
  WeightCode weight_code = WeightCode::kPlain;

  int states() const { return rule.states + (has_master ? 1 : 0); }
  DType dtype_of_state(int k) const;
  Plan plan(size_t tensors, int device = kHost) const;
};

inline constexpr DType kDTypes[] = {DType::kFloat, DType::kDouble, DType::kBFloat16, DType::kHalf};
std::string name(DType dtype);

// Memory is gone over in the same way whatever is computed from it. Under a sanitizer, where all takes
// several times as long, each rule has each format once, and each of its flags in one format or another.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
std::vector<Case> all_cases();

// Uses of the gradient: all of them for a rule without flags. The engine's treatment is the same for any
// flags, which have one of them each, in turn.
std::vector<GradUse> grad_uses(const Case& test_case);
std::vector<Case> two_phase_cases();

std::string name(const Case& test_case);
void PrintTo(const Case& test_case, std::ostream* out);  // found by GoogleTest

}  // namespace fusedstep::test
