// Every rule over every layout that an operand can have: the same result as on dense operands, and not one
// byte written outside of the elements.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "fusedstep/isa.h"
#include "tests/cpp/layouts.h"
#include "tests/cpp/model.h"

namespace fusedstep::test {
namespace {

// Units in the last place of a float between two ratios.
double float_steps(double a, double b) {
  const auto from = static_cast<float>(a), to = static_cast<float>(b);
  if (from == to) return 0;
  return std::abs(to - from) / std::abs(std::nextafter(from, to) - from);
}

class StridedTest : public testing::TestWithParam<Case> {
 protected:
  bool two_phase() const { return GetParam().rule.two_phase; }

  // A few steps of a strided tensor and of its dense twin, compared after each.
  void compare_with_dense(const LayoutCase& layout, const StepOptions& options, int64_t margin) {
    Model strided(GetParam(), {Tensor(GetParam(), layout.sizes, layout.forms, /*seed=*/7, margin)});
    Model twin(GetParam(), {Tensor(GetParam(), layout.sizes, Forms::all(dense(layout.sizes)), /*seed=*/7)});
    Tensor& tensor = strided.tensors()[0];
    Tensor& dense_tensor = twin.tensors()[0];
    for (uint64_t step = 0; step < 2; ++step) {
      // A gradient with several elements in one place has the last number written to it in all of them.
      strided.fill_grads(step);
      dense_tensor.grad.copy_elements(tensor.grad);
      const Operand grad = tensor.grad;
      strided.step(options);
      twin.step({.threads = 1,
                 .grad_factor = options.grad_factor,
                 .grads = strided.plan().grad_is_writable(0) ? options.grads : GradUse::kLeave});
      ASSERT_TRUE(tensor.fill_untouched());

      const bool writes = options.grads == GradUse::kScratch
                              ? two_phase() && strided.plan().grad_can_store(0)
                              : options.grads != GradUse::kLeave && strided.plan().grad_is_writable(0);
      if (!writes) {
        ASSERT_EQ(tensor.grad.bytes(), grad.bytes());
      } else if (options.grads != GradUse::kScratch || twin.plan().grad_can_store(0)) {
        ASSERT_EQ(tensor.grad.first_difference(dense_tensor.grad), -1);
      }
      const bool has_ratio = two_phase() && tensor.weight.elements() > 0;
      if (has_ratio) {
        ASSERT_LE(float_steps(strided.ratio(0), twin.ratio(0)), 1);
      }
      const auto states = static_cast<size_t>(GetParam().rule.states);
      for (size_t k = 0; k < states; ++k) {
        ASSERT_EQ(tensor.states[k].first_difference(dense_tensor.states[k]), -1) << "state " << k;
      }
      if (!has_ratio || strided.ratio(0) == twin.ratio(0)) {
        ASSERT_EQ(tensor.weight.first_difference(dense_tensor.weight), -1);
        if (GetParam().has_master) {
          ASSERT_EQ(tensor.states[states].first_difference(dense_tensor.states[states]), -1);
        }
      }
      // The next step starts from the same weights again.
      tensor.weight.copy_elements(dense_tensor.weight);
      if (GetParam().has_master) tensor.states[states].copy_elements(dense_tensor.states[states]);
    }
  }
};

// Without a margin the buffers end with the last element: for sanitizers to see a read beyond. A rule has
// each layout and use of gradients without one in half of its dtypes, and with one in the others.
TEST_P(StridedTest, SameAsDense) {
  int number = static_cast<int>(GetParam().dtype);
  for (const LayoutCase& layout : layout_cases()) {
    ++number;
    for (const GradUse grads : grad_uses(GetParam())) {
      SCOPED_TRACE(testing::Message() << layout.name << ", gradients " << static_cast<int>(grads));
      const bool has_margin = ++number % 2 == 0;
      compare_with_dense(layout, {.threads = has_margin ? 3 : 1, .grad_factor = 0.75, .grads = grads},
                         has_margin ? 64 : 0);
    }
  }
}

// All layouts in one list, with norms: the order of a sum must depend on nothing but the layout.
TEST_P(StridedTest, SameBitsForAllInstructionSetsAndThreads) {
  std::vector<Tensor> start;
  for (const LayoutCase& layout : layout_cases()) {
    start.emplace_back(GetParam(), layout.sizes, layout.forms, /*seed=*/start.size());
  }
  const auto run = [&](const std::string& isa, int threads) {
    const ForcedIsa forced(isa);
    auto model = std::make_unique<Model>(GetParam(), start);
    for (uint64_t step = 0; step < 2; ++step) {
      model->fill_grads(step);
      model->step({.threads = threads, .grads = GradUse::kScratch});
    }
    return model;
  };
  const auto expected = run("base", 1);
  for (const std::string& isa : isas()) {
    SCOPED_TRACE(isa);
    const auto model = run(isa, 3);
    for (size_t t = 0; t < start.size(); ++t) {
      const Tensor &tensor = model->tensors()[t], &other = expected->tensors()[t];
      ASSERT_EQ(model->ratio(t), expected->ratio(t)) << "tensor " << t;
      ASSERT_EQ(tensor.weight.bytes(), other.weight.bytes()) << "tensor " << t;
      ASSERT_EQ(tensor.grad.bytes(), other.grad.bytes()) << "tensor " << t;
      for (size_t k = 0; k < tensor.states.size(); ++k) {
        ASSERT_EQ(tensor.states[k].bytes(), other.states[k].bytes()) << "tensor " << t << ", state " << k;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, StridedTest, testing::ValuesIn(all_cases()),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace fusedstep::test
