// Gradients in a step: it takes them times a factor, up or down, and leaves, scales or clears them. The steps
// are compared bit for bit with those of gradients that were multiplied beforehand.
#include <gtest/gtest.h>

#include "fusedstep/isa.h"
#include "tests/cpp/model.h"

namespace fusedstep::test {
namespace {

const Sizes kSizes = {0, 1, 15, 16, 33, 1024, 1025, 40000};

class GradientTest : public testing::TestWithParam<Case> {
 protected:
  std::vector<Tensor> start() const {
    std::vector<Tensor> tensors = dense_tensors(GetParam(), kSizes);
    for (size_t t = 0; t < tensors.size(); ++t) tensors[t].grad.fill(t);
    return tensors;
  }

  void expect_same_updates(Model& actual, Model& expected) {
    for (size_t t = 0; t < kSizes.size(); ++t) {
      SCOPED_TRACE(testing::Message() << kSizes[t] << " elements");
      EXPECT_EQ(actual.tensors()[t].weight.first_difference(expected.tensors()[t].weight), -1);
      for (size_t k = 0; k < actual.tensors()[t].states.size(); ++k) {
        EXPECT_EQ(actual.tensors()[t].states[k].first_difference(expected.tensors()[t].states[k]), -1);
      }
    }
  }
};

void multiply(std::vector<Tensor>& tensors, double factor) {
  for (Tensor& tensor : tensors) {
    for (int64_t i = 0; i < tensor.grad.elements(); ++i) tensor.grad.set(i, factor * tensor.grad.get(i));
  }
}

void expect_grads(Model& model, const std::vector<Tensor>& expected) {
  for (size_t t = 0; t < expected.size(); ++t) {
    EXPECT_EQ(model.tensors()[t].grad.first_difference(expected[t].grad), -1) << kSizes[t] << " elements";
  }
}

// Powers of two and signs are exact in every dtype.
TEST_P(GradientTest, AFactorIsAMultiplicationBeforehand) {
  for (const double factor : {0.5, -2.0}) {
    std::vector<Tensor> multiplied = start();
    multiply(multiplied, factor);
    Model expected(GetParam(), multiplied);
    expected.step({});
    for (const GradUse grads : {GradUse::kLeave, GradUse::kScale, GradUse::kScratch, GradUse::kClear}) {
      SCOPED_TRACE(testing::Message() << "factor " << factor << ", gradients " << static_cast<int>(grads));
      Model actual(GetParam(), start());
      actual.step({.threads = 3, .grad_factor = factor, .grads = grads});
      expect_same_updates(actual, expected);
    }
  }
}

TEST_P(GradientTest, MaximizingGoesUpTheGradient) {
  std::vector<Tensor> negated = start();
  multiply(negated, -1);
  Model expected(GetParam(), negated), actual(GetParam(), start());
  expected.step({});
  actual.step({.threads = 2, .maximize = true});
  expect_same_updates(actual, expected);
}

TEST_P(GradientTest, LeavesScalesAndClearsGradients) {
  std::vector<Tensor> scaled = start(), cleared = start();
  multiply(scaled, 0.5);
  for (Tensor& tensor : cleared) tensor.grad.clear();
  for (const auto& [grads, expected] :
       {std::pair{GradUse::kLeave, start()}, {GradUse::kScale, scaled}, {GradUse::kClear, cleared}}) {
    SCOPED_TRACE(testing::Message() << "gradients " << static_cast<int>(grads));
    Model model(GetParam(), start());
    // The sign of maximizing is the step's own.
    model.step({.threads = 2, .grad_factor = 0.5, .maximize = true, .grads = grads});
    expect_grads(model, expected);
  }
}

// A gradient that two weights have is read by both and written by neither.
TEST_P(GradientTest, SharedGradientsAreNotWritten) {
  for (const GradUse grads : {GradUse::kScale, GradUse::kScratch, GradUse::kClear}) {
    std::vector<Tensor> tensors = dense_tensors(GetParam(), {1000, 1000});
    tensors[0].grad.fill(3);
    tensors[1].grad.fill(3);
    Model separate(GetParam(), tensors);
    separate.step({.grad_factor = 0.5});
    Plan plan = GetParam().plan(2);
    TensorOperands second = tensors[1].operands();
    second.grad = tensors[0].grad.view();
    plan.bind(0, tensors[0].operands());
    plan.bind(1, second);
    run_step(plan, GetParam().rule.bound, std::vector<double>{1, 1}, {.grad_factor = 0.5, .grads = grads});
    for (size_t t = 0; t < 2; ++t) {
      EXPECT_EQ(tensors[t].weight.first_difference(separate.tensors()[t].weight), -1);
    }
    EXPECT_EQ(tensors[0].grad.first_difference(separate.tensors()[0].grad), -1);
  }
}

TEST_P(GradientTest, NormIsTheRootOfTheSumOfSquares) {
  Model model(GetParam(), start());
  for (size_t t = 0; t < kSizes.size(); ++t) model.plan().bind(t, model.tensors()[t].operands());
  long double sum = 0;
  for (const Tensor& tensor : model.tensors()) {
    for (const double g : tensor.grad.values()) sum += static_cast<long double>(g) * g;
  }
  const double expected = grad_norm2(model.plan(), 1);
  EXPECT_NEAR(expected / static_cast<double>(sum), 1, 1e-13);
  for (const std::string& isa : isas()) {
    const ForcedIsa forced(isa);
    for (const int threads : {1, 2, 7}) EXPECT_EQ(grad_norm2(model.plan(), threads), expected) << isa;
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, GradientTest, testing::ValuesIn(all_cases()),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace fusedstep::test
