// A list of tensors and the rule that updates them, through the engine's own interface.
#pragma once
#include <string>
#include <vector>

#include "src/core/reduction.h"
#include "tests/cpp/cases.h"
#include "tests/cpp/operand.h"

namespace fusedstep::test {

// Forms in memory of a tensor's operands.
struct Forms {
  Form weight, grad;
  std::vector<Form> states;  // state k has states[k % states.size()]

  // All operands alike.
  static Forms all(const Form& form) { return {form, form, {form}}; }
};

struct Tensor {
  // Weights are filled from `seed`, states are zero.
  Tensor(const Case& test_case, const Sizes& sizes, const Forms& forms, uint64_t seed, int64_t margin = 0);

  TensorOperands operands();
  bool fill_untouched() const;

  Operand weight, grad;
  std::vector<Operand> states;
};

// Dense tensors of one dimension of these sizes.
std::vector<Tensor> dense_tensors(const Case& test_case, const Sizes& sizes);

// Tensors with weights whose squares are beyond a float, on either side; in fp16 as far as there are any.
std::vector<Tensor> tensors_beyond_squares(const Case& test_case);

class Model {
 public:
  Model(const Case& test_case, std::vector<Tensor> tensors);

  // A step with the gradients as they are, as step number `count` (none given: the next one).
  void step(const StepOptions& options);
  void step(double count, const StepOptions& options);
  void fill_grads(uint64_t seed);

  const RuleCase& rule() const { return rule_; }
  std::vector<Tensor>& tensors() { return tensors_; }
  Plan& plan() { return plan_; }
  // Returns the ratio that a two-phase step made of tensor i's norms.
  double ratio(size_t i) { return plan_.memory().ratios[i]; }

 private:
  RuleCase rule_;
  std::vector<Tensor> tensors_;
  Plan plan_;
  double count_ = 0;
};

// Forces an instruction set for the life of this object.
class ForcedIsa {
 public:
  explicit ForcedIsa(const std::string& name);
  ~ForcedIsa();
  ForcedIsa(const ForcedIsa&) = delete;
  ForcedIsa& operator=(const ForcedIsa&) = delete;
};

}  // namespace fusedstep::test
