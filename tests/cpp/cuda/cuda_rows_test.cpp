// Sparse gradients on CUDA, by the emulator: the CPU's bits, and no byte of another row.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "src/run/backend.h"
#include "tests/cpp/sparse_grad.h"

namespace fusedstep::emulator {
extern int launches;
}

namespace fusedstep::test {
namespace {

constexpr int kDevice = 0;

class CudaRowsTest : public testing::TestWithParam<Case> {
 protected:
  Tensor tensor(const Table& table, uint64_t seed = 7) const {
    Forms forms = table.forms;
    if (forms.grad.strides.empty()) forms.grad = dense(table.sizes);
    return Tensor(GetParam(), table.sizes, forms, seed, /*margin=*/64);
  }
  Plan new_plan(size_t tensors, int device) {
    if (device == kDevice) device_ = new_device_plan(kDevice);
    return GetParam().plan(tensors, device);
  }
  SparseGrad grad(const Table& table, const std::vector<int64_t>& rows, uint64_t seed) const {
    return SparseGrad(GetParam().dtype, table.sizes, table.dims, rows, seed);
  }
  const BoundRule& rule() const { return GetParam().rule.bound; }

  static void bind_dense(Plan& plan, size_t i, Tensor& tensor) {
    TensorOperands operands = tensor.operands();
    operands.weight.device = operands.grad.device = plan.device();
    for (TensorView& state : operands.states) state.device = plan.device();
    plan.bind(i, operands);
  }
  static void expect_same(const Tensor& actual, const Tensor& expected) {
    ASSERT_TRUE(actual.fill_untouched());
    ASSERT_EQ(actual.weight.first_difference(expected.weight), -1);
    ASSERT_EQ(actual.grad.first_difference(expected.grad), -1);
    for (size_t k = 0; k < expected.states.size(); ++k) {
      ASSERT_EQ(actual.states[k].first_difference(expected.states[k]), -1) << "state " << k;
    }
  }

  std::unique_ptr<DevicePlan> device_;  // of the newest plan there
};

TEST_P(CudaRowsTest, SameBitsAsOnTheCpu) {
  for (const Table& table : tables()) {
    Tensor actual = tensor(table), expected = actual;
    Plan there = new_plan(1, kDevice), here = new_plan(1, kHost);
    double step = 0;
    for (const auto& rows : row_lists(rows_of(table))) {
      SCOPED_TRACE(testing::Message() << table.name << ", " << rows.size() << " entries");
      ++step;
      const StepOptions options{.threads = 2, .grad_factor = 0.75, .maximize = step == 2};
      SparseGrad gradient = grad(table, rows, static_cast<uint64_t>(step));
      gradient.bind(there, 0, actual.operands());
      device_->check_rows(there);
      std::vector<double> counts{step};
      device_->prepare(there, rule(), counts, options, {})->run({});
      gradient.bind(here, 0, expected.operands());
      sum_entries(here, options.threads);
      run_step(here, rule(), std::vector<double>{step}, options);
      expect_same(actual, expected);
      if (HasFatalFailure()) return;
    }
  }
}

// Rows that are in no order, and are said to need none.
TEST_P(CudaRowsTest, EntriesThatAreEachForARowNeedNoOrder) {
  const Table table = tables()[0];
  Tensor actual = tensor(table), expected = actual;
  Plan there = new_plan(1, kDevice), here = new_plan(1, kHost);
  SparseGrad gradient = grad(table, {3, 1, 259, 7}, /*seed=*/1);
  gradient.bind(here, 0, expected.operands());
  sum_entries(here, 1);
  run_step(here, rule(), std::vector<double>{1}, {});
  gradient.leave_order_out();
  gradient.bind(there, 0, actual.operands());
  device_->check_rows(there);
  std::vector<double> counts{1};
  device_->prepare(there, rule(), counts, {}, {})->run({});
  expect_same(actual, expected);
}

// Dense and sparse gradients take one launch together.
TEST_P(CudaRowsTest, OneLaunchForDenseAndSparseGradients) {
  const Table table{"words", {90, 64}, Forms::all(dense({90, 64}))};
  std::vector<Tensor> actual{tensor(table, 1), tensor(table, 2), tensor(table, 3)}, expected = actual;
  Plan there = new_plan(3, kDevice), here = new_plan(3, kHost);
  for (uint64_t step = 1; step < 3; ++step) {
    std::vector<SparseGrad> grads;
    for (const std::vector<int64_t>& rows : {std::vector<int64_t>{3, 1, 3}, {89, 0, 7, 7, 89}}) {
      grads.push_back(grad(table, rows, step));
    }
    for (auto [plan, tensors] : {std::pair{&there, &actual}, {&here, &expected}}) {
      (*tensors)[1].grad.fill(step);
      grads[0].bind(*plan, 0, (*tensors)[0].operands());
      bind_dense(*plan, 1, (*tensors)[1]);
      grads[1].bind(*plan, 2, (*tensors)[2].operands());
    }
    std::vector<double> counts(3, static_cast<double>(step));
    const StepOptions options{.grads = GradUse::kClear};
    const int before = emulator::launches;
    device_->prepare(there, rule(), counts, options, {})->run({});
    EXPECT_EQ(emulator::launches - before, 1);
    sum_entries(here, 1);
    run_step(here, rule(), counts, options);
    for (size_t i = 0; i < actual.size(); ++i) expect_same(actual[i], expected[i]);
  }
}

TEST_P(CudaRowsTest, AStepCanBeLeftOut) {
  const Table table = tables()[0];
  Tensor actual = tensor(table);
  const Tensor expected = actual;
  Plan plan = new_plan(1, kDevice);
  SparseGrad gradient = grad(table, {3, 1, 3}, /*seed=*/1);
  gradient.bind(plan, 0, actual.operands());
  float count = 5;
  const float found_inf = 1;
  device_
      ->prepare_counted(plan, rule(), std::vector<float*>{&count}, {.grads = GradUse::kClear},
                        {.found_inf = &found_inf})
      ->run({});
  expect_same(actual, expected);
  EXPECT_EQ(count, 5);
}

TEST_P(CudaRowsTest, TheNormIsThatOfTheSums) {
  for (const Table& table : tables()) {
    SCOPED_TRACE(table.name);
    Tensor actual = tensor(table), summed = actual;
    SparseGrad gradient = grad(table, row_lists(rows_of(table)).back(), /*seed=*/1);
    gradient.copy_to(summed.grad);
    double expected = 0.25;
    for (const double g : summed.grad.values()) expected += g * g;
    Plan plan = new_plan(1, kDevice);
    gradient.bind(plan, 0, actual.operands());
    double norm2 = 0.25;
    device_->add_grad_norm2(plan, &norm2);
    EXPECT_NEAR(norm2 / expected, 1, 1e-13);
  }
}

TEST_P(CudaRowsTest, RowsOutsideOfTheTensorAreRefused) {
  const Table table{"two dims", {50, 8, 4}, Forms::all(dense({50, 8, 4})), 2};
  for (const int64_t outside : {int64_t{-1}, int64_t{8}, int64_t{1} << 62}) {
    Tensor inside = tensor(table), actual = inside;
    Plan plan = new_plan(2, kDevice);
    SparseGrad first = grad(table, {1, 2}, /*seed=*/1), second = grad(table, {3, 1, 7}, /*seed=*/1);
    second.index()[3 + 1] = outside;  // of entry 1 in dimension 1
    first.bind(plan, 0, inside.operands());
    second.bind(plan, 1, actual.operands());
    try {
      device_->check_rows(plan);
      FAIL() << outside;
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), "tensor 1 of the list: the gradient's index " + std::to_string(outside) +
                                  " is out of range: dimension 1 of the weight has size 8");
    }
  }
}

std::vector<Case> cases_that_take_rows() {
  std::vector<Case> cases = all_cases();
  std::erase_if(
      cases, [](const Case& each) { return !each.rule.name.starts_with("Adagrad") || each.rule.flags != 0; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Rules, CudaRowsTest, testing::ValuesIn(cases_that_take_rows()),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace fusedstep::test
