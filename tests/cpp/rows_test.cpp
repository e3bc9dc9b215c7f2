// Sparse gradients: the rows that they have entries for are updated as a dense step updates them, and no byte
// of another row is written.
#include "src/plan/rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "fusedstep/isa.h"
#include "tests/cpp/sparse_grad.h"

namespace fusedstep::test {
namespace {

class RowsTest : public testing::TestWithParam<Case> {
 protected:
  // A step with each of these options over the rows of a table, each beside the dense step from the same
  // contents.
  void compare_with_dense(const Table& table, const std::vector<int64_t>& rows,
                          std::initializer_list<StepOptions> steps) {
    Forms forms = table.forms;
    if (forms.grad.strides.empty()) forms.grad = dense(table.sizes);
    Tensor sparse(GetParam(), table.sizes, forms, /*seed=*/7, /*margin=*/64);
    Plan plan = GetParam().plan(1), dense_plan = GetParam().plan(1);
    uint64_t step = 0;
    for (const StepOptions& options : steps) {
      ++step;
      SparseGrad grad(GetParam().dtype, table.sizes, table.dims, rows, /*seed=*/step);
      const Tensor before = sparse;
      Tensor expected = sparse;
      grad.copy_to(expected.grad);
      dense_plan.bind(0, expected.operands());
      run_step(dense_plan, GetParam().rule.bound, std::vector<double>{double(step)},
               {.grad_factor = options.grad_factor, .maximize = options.maximize});

      grad.bind(plan, 0, sparse.operands());
      sum_entries(plan, options.threads);
      run_step(plan, GetParam().rule.bound, std::vector<double>{double(step)}, options);

      ASSERT_TRUE(sparse.fill_untouched());
      const std::vector<bool> has_row = grad.has_row();
      const int64_t elements = grad.row_elements();
      for (int64_t row = 0; row < std::ssize(has_row); ++row) {
        if (has_row[row]) continue;
        const int64_t begin = row * elements, end = begin + elements;
        expected.weight.copy_elements(before.weight, begin, end);
        for (size_t k = 0; k < before.states.size(); ++k) {
          expected.states[k].copy_elements(before.states[k], begin, end);
        }
      }
      ASSERT_EQ(sparse.weight.first_difference(expected.weight), -1);
      for (size_t k = 0; k < sparse.states.size(); ++k) {
        ASSERT_EQ(sparse.states[k].first_difference(expected.states[k]), -1) << "state " << k;
      }
    }
  }
};

TEST_P(RowsTest, SameAsDenseWhereThereAreEntriesAndUnchangedElsewhere) {
  for (const Table& table : tables()) {
    for (const auto& rows : row_lists(rows_of(table))) {
      SCOPED_TRACE(testing::Message() << table.name << ", " << rows.size() << " entries");
      compare_with_dense(table, rows,
                         {{.threads = 1}, {.threads = 3, .grad_factor = 0.75, .maximize = true}});
    }
  }
}

TEST_P(RowsTest, SameOnEveryInstructionSet) {
  const Table table = tables()[0];
  for (const std::string& isa : isas()) {
    const ForcedIsa forced(isa);
    compare_with_dense(table, row_lists(table.sizes[0]).back(), {{.threads = 2}, {.threads = 2}});
  }
}

std::vector<Case> elementwise_cases() {
  std::vector<Case> cases = all_cases();
  std::erase_if(cases, [](const Case& test_case) { return test_case.rule.two_phase; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Rules, RowsTest, testing::ValuesIn(elementwise_cases()),
                         [](const auto& info) { return name(info.param); });

// ---- Plans ----------------------------------------------------------------------------------------------

const Sizes kTable = {50, 8};

Tensor table_tensor(uint64_t seed = 1) {
  return Tensor(elementwise_cases()[0], kTable, Forms::all(dense(kTable)), seed);
}

void step(Plan& plan) {
  sum_entries(plan, 1);
  run_step(plan, elementwise_cases()[0].rule.bound, std::vector<double>(plan.tensors(), 1), {});
}

// One plan over gradients of every kind and number of rows in turn, beside a new plan for each.
TEST(RowsPlanTest, GradientsMayBeSparseAtOneStepAndDenseAtTheNext) {
  Tensor reused = table_tensor(), fresh = table_tensor();
  Plan plan = elementwise_cases()[0].plan(1);
  const std::vector<std::vector<int64_t>> steps = {{3, 1, 3}, {},   {0, 1, 2, 3}, {-1},
                                                   {9},       {-1}, {},           {4, 4, 5}};
  for (size_t i = 0; i < steps.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "step " << i);
    Plan new_plan = elementwise_cases()[0].plan(1);
    const bool is_dense = steps[i] == std::vector<int64_t>{-1};
    for (auto [tensor, its_plan] : {std::pair{&reused, &plan}, {&fresh, &new_plan}}) {
      SparseGrad grad(DType::kFloat, kTable, 1, is_dense ? std::vector<int64_t>{} : steps[i], /*seed=*/i);
      tensor->grad.fill(i);
      if (is_dense) {
        its_plan->bind(0, tensor->operands());
      } else {
        grad.bind(*its_plan, 0, tensor->operands());
      }
      step(*its_plan);
    }
    ASSERT_EQ(reused.weight.first_difference(fresh.weight), -1);
    ASSERT_EQ(reused.states[0].first_difference(fresh.states[0]), -1);
  }
}

// A dense gradient expanded over the rows has the strides that the engine gives a sparse one.
TEST(RowsPlanTest, AnExpandedGradientIsNotTakenForASparseOne) {
  Tensor tensor(elementwise_cases()[0], kTable, {dense(kTable), expanded(kTable, {0}), {dense(kTable)}}, 1);
  Tensor expected = tensor;
  Plan plan = elementwise_cases()[0].plan(1), new_plan = elementwise_cases()[0].plan(1);
  SparseGrad none(DType::kFloat, kTable, 1, {}, /*seed=*/1);
  none.bind(plan, 0, tensor.operands());
  step(plan);
  tensor.grad.fill(2);
  expected.grad.fill(2);
  plan.bind(0, tensor.operands());
  new_plan.bind(0, expected.operands());
  step(plan);
  step(new_plan);
  EXPECT_EQ(tensor.weight.first_difference(expected.weight), -1);
}

TEST(RowsPlanTest, TheNormIsThatOfTheSums) {
  Tensor tensor = table_tensor(), other = table_tensor();
  SparseGrad grad(DType::kFloat, kTable, 1, {3, 1, 3, 40, 3}, /*seed=*/1);
  grad.copy_to(other.grad);
  Plan plan = elementwise_cases()[0].plan(1);
  grad.bind(plan, 0, tensor.operands());
  sum_entries(plan, 1);
  double sum = 0;
  for (const double g : other.grad.values()) sum += g * g;
  EXPECT_NEAR(grad_norm2(plan, 1) / sum, 1, 1e-13);
}

TEST(RowsPlanTest, SparseGradientsAreNotWritten) {
  for (const GradUse use : {GradUse::kScale, GradUse::kClear, GradUse::kScratch}) {
    Tensor tensor = table_tensor(), other = table_tensor();
    SparseGrad grad(DType::kFloat, kTable, 1, {3, 1}, /*seed=*/1);
    grad.copy_to(other.grad);
    Plan plan = elementwise_cases()[0].plan(1);
    grad.bind(plan, 0, tensor.operands());
    run_step(plan, elementwise_cases()[0].rule.bound, std::vector<double>{1},
             {.grad_factor = 0.5, .grads = use});
    grad.copy_to(tensor.grad);
    EXPECT_EQ(tensor.grad.first_difference(other.grad), -1);
    EXPECT_FALSE(plan.grad_is_writable(0));
  }
}

// Beyond a short row is another one, which the step does not touch.
TEST(RowsPlanTest, NothingBeyondAShortRowIsPrefetched) {
  for (const auto& [columns, prefetches] : {std::pair{int64_t{64}, false}, {int64_t{10000}, true}}) {
    const Sizes sizes = {50, columns};
    Tensor tensor(elementwise_cases()[0], sizes, Forms::all(dense(sizes)), /*seed=*/1);
    SparseGrad grad(DType::kFloat, sizes, 1, {3, 1}, /*seed=*/1);
    Plan plan = elementwise_cases()[0].plan(1);
    grad.bind(plan, 0, tensor.operands());
    plan.refresh(/*wave_bytes=*/0);
    const PrefetchDistance ahead = plan.task(0).ahead;
    EXPECT_GT(ahead.first, 0);
    int parts = 0;
    for (const Chunk& chunk : plan.chunks()) {
      plan.run_parts(chunk, [&](const TensorTask& task, int64_t, int64_t) {
        EXPECT_EQ(task.ahead.first, prefetches ? ahead.first : 0);
        EXPECT_EQ(task.ahead.second, prefetches ? ahead.second : 0);
        ++parts;
      });
    }
    EXPECT_GE(parts, 2);
  }
}

TEST(RowsPlanTest, RowsOutsideOfTheTensorAreRefused) {
  for (const int64_t outside : {int64_t{-1}, int64_t{50}, int64_t{1} << 62}) {
    Tensor tensor = table_tensor();
    const Tensor before = tensor;
    SparseGrad grad(DType::kFloat, kTable, 1, {3, 1, 7}, /*seed=*/1);
    Plan plan = elementwise_cases()[0].plan(1);
    grad.bind(plan, 0, tensor.operands());
    grad.index()[1] = outside;
    try {
      grad.bind(plan, 0, tensor.operands());
      FAIL() << outside;
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), "tensor 0 of the list: the gradient's index " + std::to_string(outside) +
                                  " is out of range: dimension 0 of the weight has size 50");
    }
    EXPECT_EQ(tensor.weight.bytes(), before.weight.bytes());
  }
}

}  // namespace
}  // namespace fusedstep::test
