// The engine against the rule's own formula in double, element by element. Both sides start each step from
// the same operands, so that what is measured is the error of one step.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "tests/cpp/model.h"

namespace fusedstep::test {
namespace {

// Half a unit in the last place of 1: what one rounding costs at most.
double rounding(DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return 0x1p-24;
    case DType::kDouble:
      return 0x1p-53;
    case DType::kBFloat16:
      return 0x1p-8;
    case DType::kHalf:
      return 0x1p-11;
    case DType::kInt16:
    case DType::kUInt8:
    case DType::kFloat8:
      break;  // a weight has none of these
  }
  return 0;
}

// Half the smallest positive number of the dtypes that a step's results can come near to.
double smallest(DType dtype) { return dtype == DType::kHalf ? 0x1p-25 : 0; }

// With the master copy for the weight where there is one that rounds to it.
Values values_of(const Tensor& tensor, bool has_master) {
  Values values{tensor.weight.values(), tensor.grad.values(), {}, {}, 1};
  for (const Operand& state : tensor.states) values.states.push_back(state.values());
  if (!has_master) return values;
  Operand rounded = tensor.weight;
  for (int64_t i = 0; i < rounded.elements(); ++i) {
    const double master = values.states.back()[i];
    rounded.set(i, master);
    if (rounded.get(i) == values.weight[i]) values.weight[i] = master;
  }
  return values;
}

// The terms that a new value is summed from are no larger than the old value and the tensor's largest change;
// about eight roundings in the precision of the maths happen to them, and one in the precision of the storage
// to the result.
void expect_close(const char* what, DType dtype, const Operand& now, const std::vector<double>& before,
                  const std::vector<double>& expected) {
  const double maths = 8 * rounding(dtype == DType::kDouble ? DType::kDouble : DType::kFloat);
  const double storage = dtype == DType::kBFloat16 || dtype == DType::kHalf ? rounding(dtype) : 0;
  double change = 0;
  for (size_t i = 0; i < expected.size(); ++i) change = std::max(change, std::abs(expected[i] - before[i]));
  for (size_t i = 0; i < expected.size(); ++i) {
    const double terms = std::abs(before[i]) + std::abs(expected[i]) + change;
    const double error = now.get(static_cast<int64_t>(i)) - expected[i];
    const double allowed = maths * terms + storage * std::abs(expected[i]) + smallest(dtype);
    ASSERT_TRUE(std::abs(error) <= allowed) << what << "[" << i << "] of " << expected.size() << " should be "
                                            << expected[i] << ": off by " << error << ", allowed " << allowed;
  }
}

class OracleTest : public testing::TestWithParam<Case> {
 protected:
  // Takes the model a step forward and compares.
  void step_and_compare(Model& model, double count, GradUse grads) {
    std::vector<Values> before, expected;
    for (const Tensor& tensor : model.tensors()) {
      before.push_back(values_of(tensor, GetParam().has_master));
      expected.push_back(before.back());
      GetParam().rule.oracle(count, expected.back());
    }
    model.step(count, {.threads = 2, .grads = grads});
    for (size_t t = 0; t < expected.size(); ++t) {
      const Tensor& tensor = model.tensors()[t];
      const DType dtype = GetParam().dtype;
      SCOPED_TRACE(testing::Message() << "step " << count << ", gradients " << static_cast<int>(grads));
      for (int k = 0; k < GetParam().rule.states; ++k) {
        expect_close("state", GetParam().state_dtype, tensor.states[k], before[t].states[k],
                     expected[t].states[k]);
      }
      if (GetParam().has_master) {
        expect_close("master", GetParam().state_dtype, tensor.states.back(), before[t].weight,
                     expected[t].weight);
      }
      expect_close("weight", dtype, tensor.weight, before[t].weight, expected[t].weight);
      const bool stored = grads == GradUse::kScratch && model.plan().grad_can_store(t);
      expect_close("gradient", dtype, tensor.grad, before[t].grad,
                   stored ? expected[t].update : before[t].grad);
      if (GetParam().rule.two_phase && tensor.weight.elements() >= 16) {
        EXPECT_NEAR(model.ratio(t) / expected[t].ratio, 1, 8 * rounding(DType::kFloat));
      }
    }
  }
};

TEST_P(OracleTest, StepsAgreeWithTheFormulaInDouble) {
  for (const GradUse grads : {GradUse::kLeave, GradUse::kScratch}) {
    if (grads == GradUse::kScratch && !GetParam().rule.two_phase) break;
    Model model(GetParam(), dense_tensors(GetParam(), {0, 1, 5, 16, 33, 1000, 40000}));
    for (const double count : {1.0, 2.0, 3.0, 1000.0}) {
      model.fill_grads(static_cast<uint64_t>(count));
      step_and_compare(model, count, grads);
    }
  }
}

// Second moments of such gradients are denormal or zero in float16.
TEST_P(OracleTest, SmallGradientsGiveNoLargeUpdates) {
  for (const double scale : {0x1p-8, 0x1p-11, 0x1p-14}) {
    Model model(GetParam(), dense_tensors(GetParam(), {1000}));
    for (const double count : {1.0, 2.0, 3.0}) {
      Operand& grad = model.tensors()[0].grad;
      for (int64_t i = 0; i < grad.elements(); ++i)
        grad.set(i, scale * number(static_cast<uint64_t>(count), i));
      step_and_compare(model, count, GradUse::kLeave);
    }
  }
}

TEST_P(OracleTest, ZeroGradientsAndZeroWeights) {
  Model model(GetParam(), dense_tensors(GetParam(), {100, 100}));
  model.tensors()[1].weight.clear();
  for (Tensor& tensor : model.tensors()) tensor.grad.clear();
  step_and_compare(model, 1, GradUse::kLeave);
  model.fill_grads(1);
  step_and_compare(model, 2, GradUse::kLeave);
}

// Somebody else than the step changes a weight: a master copy does not bring back the older value.
TEST_P(OracleTest, AWeightThatHasBeenChangedIsTakenAsItIs) {
  Model model(GetParam(), dense_tensors(GetParam(), {1000}));
  model.fill_grads(1);
  step_and_compare(model, 1, GradUse::kLeave);
  Operand& weight = model.tensors()[0].weight;
  for (int64_t i = 0; i < weight.elements(); i += 3) weight.set(i, 1.5 * weight.get(i) + 1);
  step_and_compare(model, 2, GradUse::kLeave);
}

// Each tensor of a list has a step count of its own.
TEST_P(OracleTest, StepCountsOfTheirOwn) {
  Model model(GetParam(), dense_tensors(GetParam(), {50, 50, 50}));
  model.fill_grads(1);
  const std::vector<double> counts = {3, 1, 3};
  std::vector<Values> before, expected;
  for (size_t t = 0; t < counts.size(); ++t) {
    Tensor& tensor = model.tensors()[t];
    model.plan().bind(t, tensor.operands());
    before.push_back(values_of(tensor, GetParam().has_master));
    expected.push_back(before.back());
    GetParam().rule.oracle(counts[t], expected.back());
  }
  run_step(model.plan(), GetParam().rule.bound, counts, {});
  for (size_t t = 0; t < counts.size(); ++t) {
    expect_close("weight", GetParam().dtype, model.tensors()[t].weight, before[t].weight, expected[t].weight);
  }
}

class PhasesTest : public testing::TestWithParam<Case> {
 protected:
  static constexpr StepOptions kOptions{.threads = 2, .grads = GradUse::kScratch};
  // No gradient may hold an update.
  static constexpr StepOptions kLeaves{.threads = 2, .grad_factor = 0.5};

  Model model() const {
    Model model(GetParam(), dense_tensors(GetParam(), {0, 1, 33, 1000, 40000}));
    model.fill_grads(1);
    for (size_t i = 0; i < model.tensors().size(); ++i) model.plan().bind(i, model.tensors()[i].operands());
    return model;
  }
  void expect_step(const StepOptions& options) const;
};

// The trust ratio in between, as a step has it: the same bits.
TEST_P(PhasesTest, ApartTheyAreAStep) {
  for (const StepOptions& options : {kOptions, kLeaves}) expect_step(options);
}

void PhasesTest::expect_step(const StepOptions& options) const {
  const BoundRule& rule = GetParam().rule.bound;
  Model whole = model(), apart = model();
  const size_t count = whole.tensors().size();
  const std::vector<double> counts(count, 3);
  run_step(whole.plan(), rule, counts, options);
  std::vector<double> numbers = counts, norms2(2 * count);
  const auto step = prepare_step(apart.plan(), rule, numbers, options);
  step->run_direction(norms2.data());
  for (size_t t = 0; t < count; ++t) {  // weights have not moved
    EXPECT_EQ(apart.tensors()[t].weight.values(), model().tensors()[t].weight.values());
  }
  step->run_apply(norms2.data());
  for (size_t t = 0; t < count; ++t) {
    EXPECT_EQ(apart.tensors()[t].weight.values(), whole.tensors()[t].weight.values());
    EXPECT_EQ(apart.tensors()[t].grad.values(), whole.tensors()[t].grad.values());
    for (size_t k = 0; k < whole.tensors()[t].states.size(); ++k) {
      EXPECT_EQ(apart.tensors()[t].states[k].values(), whole.tensors()[t].states[k].values());
    }
    if (whole.tensors()[t].weight.elements() > 0) {
      EXPECT_EQ(apart.ratio(t), whole.ratio(t));
    }
  }
}

// The ratios follow from the norms that are given, not from those that were found.
TEST_P(PhasesTest, OtherNormsAreTaken) {
  const BoundRule& rule = GetParam().rule.bound;
  Model model = this->model();
  const size_t count = model.tensors().size();
  std::vector<double> numbers(count, 3), norms2(2 * count);
  const auto step = prepare_step(model.plan(), rule, numbers, kOptions);
  step->run_direction(norms2.data());
  for (size_t i = 0; i < norms2.size(); ++i) norms2[i] = i % 2 == 0 ? 4.0 : 9.0;
  step->run_apply(norms2.data());
  for (size_t t = 1; t < count; ++t) EXPECT_EQ(model.ratio(t), rule.trust_ratio(rule, 4.0, 9.0));
}

TEST(Phases, OfRulesWithoutNormsAreOne) {
  for (const Case& each : all_cases()) {
    if (each.rule.two_phase) continue;
    Model model(each, dense_tensors(each, {5}));
    model.fill_grads(1);
    model.plan().bind(0, model.tensors()[0].operands());
    std::vector<double> numbers = with_first_numbers(each.rule.bound, std::vector<double>{1}), norms2(2);
    const auto step = prepare_step(model.plan(), each.rule.bound, numbers, {});
    EXPECT_THROW(step->run_direction(norms2.data()), std::runtime_error);
    EXPECT_THROW(step->run_apply(norms2.data()), std::runtime_error);
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, PhasesTest, testing::ValuesIn(two_phase_cases()),
                         [](const auto& info) { return name(info.param); });

INSTANTIATE_TEST_SUITE_P(Rules, OracleTest, testing::ValuesIn(all_cases()),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace fusedstep::test
