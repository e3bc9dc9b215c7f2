// Every rule over every layout that an operand can have: the same result as on dense operands, and not one
// byte written outside of the elements.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "fusedstep/isa.h"
#include "tests/cpp/model.h"

namespace fusedstep::test {
namespace {

struct LayoutCase {
  const char* name;
  Sizes sizes;
  Forms forms;
};

// A rectangle cut out of a matrix, and one with gaps in both directions.
Form cut(int64_t parent_rows, int64_t parent_columns, int64_t row, int64_t column) {
  return slice({parent_rows, parent_columns}, {row, column}, {1, 1});
}

std::vector<LayoutCase> layout_cases() {
  const Form five_dims = slice({3, 4, 6, 5, 9}, {1, 0, 1, 0, 2}, {1, 1, 1, 1, 1}, {3, 0, 4, 2, 1});
  const std::vector<int> channels_last = {0, 2, 3, 1};
  return {
      // All operands alike.
      {"scalar", {}, Forms::all(dense({}))},
      {"empty", {0, 5}, Forms::all(slice({4, 9}, {0, 2}, {1, 1}))},
      {"one_element", {1, 1}, Forms::all(slice({4, 9}, {2, 3}, {1, 1}))},
      {"offset", {1000}, Forms::all(slice({1100}, {13}, {1}))},
      {"transposed", {70, 130}, Forms::all(dense({70, 130}, {1, 0}))},
      {"channels_last", {3, 5, 7, 11}, Forms::all(dense({3, 5, 7, 11}, channels_last))},
      {"sliced_rows", {40, 37}, Forms::all(slice({100, 37}, {3, 0}, {2, 1}))},
      {"sliced_rows_many_chunks", {60, 700}, Forms::all(slice({200, 700}, {3, 0}, {2, 1}))},
      {"sliced_columns_long", {9, 300}, Forms::all(cut(9, 321, 0, 5))},
      {"sliced_columns_very_long", {3, 2500}, Forms::all(cut(3, 2600, 0, 9))},
      {"sliced_columns_short", {200, 20}, Forms::all(cut(200, 27, 0, 4))},
      {"sliced_columns_transposed", {20, 200}, Forms::all(slice({27, 200}, {4, 0}, {1, 1}, {1, 0}))},
      {"every_second_column", {60, 50}, Forms::all(slice({60, 100}, {0, 1}, {1, 2}))},
      {"every_second_column_long", {7, 400}, Forms::all(slice({7, 801}, {0, 1}, {1, 2}))},
      {"inner_run_1", {700, 1}, Forms::all(cut(700, 3, 0, 1))},
      {"inner_run_3", {500, 3}, Forms::all(cut(500, 5, 0, 1))},
      {"inner_run_7", {300, 7}, Forms::all(cut(300, 8, 0, 0))},
      {"inner_run_7_many_chunks", {5001, 7}, Forms::all(cut(5001, 8, 0, 0))},
      {"five_dims", {2, 4, 5, 3, 7}, Forms::all(five_dims)},
      // Each operand in its own way.
      {"gradient_transposed", {150, 70}, {dense({150, 70}), dense({150, 70}, {1, 0}), {dense({150, 70})}}},
      {"gradient_transposed_many_chunks",
       {200, 211},
       {dense({200, 211}), dense({200, 211}, {1, 0}), {dense({200, 211})}}},
      {"gradient_channels_last",
       {4, 6, 10, 9},
       {dense({4, 6, 10, 9}), dense({4, 6, 10, 9}, channels_last), {dense({4, 6, 10, 9})}}},
      {"weight_and_states_channels_last",
       {4, 6, 10, 9},
       {dense({4, 6, 10, 9}, channels_last), dense({4, 6, 10, 9}), {dense({4, 6, 10, 9}, channels_last)}}},
      {"gradient_expanded_rows", {90, 33}, {dense({90, 33}), expanded({90, 33}, {0}), {dense({90, 33})}}},
      {"gradient_expanded_columns", {33, 90}, {dense({33, 90}), expanded({33, 90}, {1}), {dense({33, 90})}}},
      {"gradient_expanded_long_rows",
       {5, 900},
       {dense({5, 900}), expanded({5, 900}, {0}), {dense({5, 900})}}},
      {"gradient_of_one_number", {5, 900}, {dense({5, 900}), expanded({5, 900}, {0, 1}), {dense({5, 900})}}},
      {"gradient_every_second_column",
       {7, 400},
       {dense({7, 400}), slice({7, 801}, {0, 1}, {1, 2}), {dense({7, 400})}}},
      {"weight_sliced_states_dense", {50, 60}, {cut(50, 70, 0, 3), dense({50, 60}), {dense({50, 60})}}},
      {"states_transposed", {90, 140}, {dense({90, 140}), dense({90, 140}), {dense({90, 140}, {1, 0})}}},
      {"every_operand_differs",
       {6, 40, 50},
       {slice({6, 45, 50}, {0, 5, 0}, {1, 1, 1}),
        dense({6, 40, 50}, {2, 1, 0}),
        {dense({6, 40, 50}, {1, 0, 2}), slice({8, 40, 101}, {1, 0, 1}, {1, 1, 2}, {2, 0, 1})}}},
  };
}

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
                 .grads = strided.plan().grad_is_own(0) ? options.grads : GradUse::kLeave});
      ASSERT_TRUE(tensor.fill_untouched());

      const bool writes = options.grads == GradUse::kScratch
                              ? two_phase() && strided.plan().grad_can_store(0)
                              : options.grads != GradUse::kLeave && strided.plan().grad_is_own(0);
      if (!writes) {
        ASSERT_EQ(tensor.grad.bytes(), grad.bytes());
      } else if (options.grads != GradUse::kScratch || twin.plan().grad_can_store(0)) {
        ASSERT_EQ(tensor.grad.first_difference(dense_tensor.grad), -1);
      }
      for (size_t k = 0; k < tensor.states.size(); ++k) {
        ASSERT_EQ(tensor.states[k].first_difference(dense_tensor.states[k]), -1) << "state " << k;
      }
      if (two_phase() && tensor.weight.elements() > 0) {
        ASSERT_LE(float_steps(strided.ratio(0), twin.ratio(0)), 1);
        if (strided.ratio(0) == twin.ratio(0)) {
          ASSERT_EQ(tensor.weight.first_difference(dense_tensor.weight), -1);
        }
        // The next step starts from the same weights again.
        tensor.weight.copy_elements(dense_tensor.weight);
      } else {
        ASSERT_EQ(tensor.weight.first_difference(dense_tensor.weight), -1);
      }
    }
  }
};

// Without a margin the buffers end with the last element: for sanitizers to see a read beyond.
TEST_P(StridedTest, SameAsDense) {
  for (const LayoutCase& layout : layout_cases()) {
    for (const GradUse grads : {GradUse::kLeave, GradUse::kScale, GradUse::kScratch, GradUse::kClear}) {
      SCOPED_TRACE(testing::Message() << layout.name << ", gradients " << static_cast<int>(grads));
      compare_with_dense(layout, {.threads = 1, .grad_factor = 0.75, .grads = grads}, /*margin=*/0);
      compare_with_dense(layout, {.threads = 3, .grad_factor = 0.75, .grads = grads}, /*margin=*/64);
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
