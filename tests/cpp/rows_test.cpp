// Sparse gradients: the rows that they have entries for are updated as a dense step updates them, and no byte
// of another row is written.
#include "src/rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fusedstep/isa.h"
#include "tests/cpp/model.h"

namespace fusedstep::test {
namespace {

int64_t product(Dims sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// A gradient of a tensor with these sizes: entries for rows given by their number in row-major order.
class SparseGrad {
 public:
  SparseGrad(DType dtype, Sizes sizes, int dims, const std::vector<int64_t>& rows, uint64_t seed)
      : sizes_(std::move(sizes)),
        dims_(dims),
        rows_(rows),
        strides_(dims, 0),
        entries_(dtype, entry_sizes(), dense(entry_sizes())) {
    entries_.fill(seed);
    const Form form = dense(entry_sizes());
    strides_.insert(strides_.end(), form.strides.begin() + 1, form.strides.end());
    index_.resize(dims * rows.size());
    for (size_t entry = 0; entry < rows.size(); ++entry) {
      int64_t rest = rows[entry];
      for (int d = dims; d-- > 0; rest /= sizes_[d]) index_[d * rows.size() + entry] = rest % sizes_[d];
    }
  }

  void bind(Plan& plan, size_t i, TensorOperands operands) {
    const TensorView entries = entries_.view();
    const auto count = static_cast<int64_t>(rows_.size());
    operands.grad = {entries.data, entries.dtype, sizes_, strides_};
    operands.rows = RowIndex{index_.data(), dims_, count, /*dim_stride=*/count, /*entry_stride=*/1};
    plan.bind(i, operands);
  }

  // What the gradient is as a dense one: entries for the same row are added in their order.
  void copy_to(Operand& grad) const {
    for (int64_t i = 0; i < grad.elements(); ++i) grad.set(i, 0);
    const int64_t elements = row_elements();
    for (size_t entry = 0; entry < rows_.size(); ++entry) {
      for (int64_t k = 0; k < elements; ++k) {
        const int64_t at = rows_[entry] * elements + k;
        grad.set(at, grad.get(at) + entries_.get(static_cast<int64_t>(entry) * elements + k));
      }
    }
  }

  // Whether there is an entry for each row of the tensor.
  std::vector<bool> has_row() const {
    std::vector<bool> has(product(Dims(sizes_).first(dims_)));
    for (const int64_t row : rows_) has[row] = true;
    return has;
  }
  int64_t row_elements() const { return product(Dims(sizes_).subspan(dims_)); }
  std::vector<int64_t>& index() { return index_; }

 private:
  Sizes entry_sizes() const {
    Sizes sizes{static_cast<int64_t>(rows_.size())};
    sizes.insert(sizes.end(), sizes_.begin() + dims_, sizes_.end());
    return sizes;
  }

  Sizes sizes_;
  int dims_;
  std::vector<int64_t> rows_, strides_, index_;
  Operand entries_;
};

struct Table {
  const char* name;
  Sizes sizes;
  Forms forms;
  int dims = 1;  // those that the rows are indexed by
};

// Three are large enough for a team of threads.
std::vector<Table> tables() {
  return {
      {"contiguous", {260, 128}, Forms::all(dense({260, 128}))},
      {"short_rows", {600, 3}, Forms::all(dense({600, 3}))},
      {"rows_longer_than_a_chunk", {2, 17000}, Forms::all(dense({2, 17000}))},
      {"transposed", {220, 150}, Forms::all(dense({220, 150}, {1, 0}))},
      {"sliced_rows", {200, 40}, Forms::all(slice({500, 40}, {3, 0}, {2, 1}))},
      {"sliced_columns", {200, 40}, Forms::all(slice({200, 70}, {0, 5}, {1, 1}))},
      {"every_second_column", {30, 300}, Forms::all(slice({30, 601}, {0, 1}, {1, 2}))},
      {"sliced_weight_dense_states", {200, 40}, {slice({200, 70}, {0, 5}, {1, 1}), {}, {dense({200, 40})}}},
      {"three_dims", {30, 6, 50}, Forms::all(dense({30, 6, 50}, {2, 0, 1}))},
      {"two_indexed_dims", {30, 8, 50}, Forms::all(slice({30, 9, 50}, {0, 1, 0}, {1, 1, 1}, {1, 0, 2})), 2},
      {"every_dim_indexed", {30, 20}, Forms::all(dense({30, 20}, {1, 0})), 2},
      {"no_dim_indexed", {30, 20}, Forms::all(dense({30, 20})), 0},
      {"rows_of_one", {900}, Forms::all(slice({2000}, {1}, {2}))},
      {"empty_rows", {5, 0}, Forms::all(dense({5, 0}))},
      {"no_rows", {0, 5}, Forms::all(dense({0, 5}))},
  };
}

// Lists of rows for a table: none, one, all, some in disorder, and some of them several times.
std::vector<std::vector<int64_t>> row_lists(int64_t rows) {
  if (rows == 0) return {{}};
  std::vector<int64_t> all(rows), some, repeated;
  std::iota(all.begin(), all.end(), 0);
  for (int64_t i = 0; i < (rows + 1) / 2; ++i) some.push_back((7919 * i + 3) % rows);
  for (int64_t i = 0; i < 2 * rows; ++i) repeated.push_back(i * i % rows);
  std::ranges::sort(some);
  some.erase(std::ranges::unique(some).begin(), some.end());
  std::ranges::reverse(some);
  return {{}, {rows - 1}, all, some, repeated};
}

class RowsTest : public testing::TestWithParam<Case> {
 protected:
  // A step with each of these options over the rows of a table, each beside the dense step from the same
  // contents.
  void compare_with_dense(const Table& table, const std::vector<int64_t>& rows,
                          std::initializer_list<StepOptions> steps) {
    Forms forms = table.forms;
    if (forms.grad.strides.empty()) forms.grad = dense(table.sizes);
    Tensor sparse(GetParam(), table.sizes, forms, /*seed=*/7, /*margin=*/64);
    Plan plan(1, GetParam().rule.states), dense_plan(1, GetParam().rule.states);
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
        for (int64_t i = row * elements; i < (row + 1) * elements; ++i) {
          expected.weight.set(i, before.weight.get(i));
          for (size_t k = 0; k < before.states.size(); ++k)
            expected.states[k].set(i, before.states[k].get(i));
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
    for (const auto& rows : row_lists(product(Dims(table.sizes).first(table.dims)))) {
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
  Plan plan(1, elementwise_cases()[0].rule.states);
  const std::vector<std::vector<int64_t>> steps = {{3, 1, 3}, {},   {0, 1, 2, 3}, {-1},
                                                   {9},       {-1}, {},           {4, 4, 5}};
  for (size_t i = 0; i < steps.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "step " << i);
    Plan new_plan(1, elementwise_cases()[0].rule.states);
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
  Plan plan(1, elementwise_cases()[0].rule.states), new_plan(1, elementwise_cases()[0].rule.states);
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
  Plan plan(1, elementwise_cases()[0].rule.states);
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
    Plan plan(1, elementwise_cases()[0].rule.states);
    grad.bind(plan, 0, tensor.operands());
    run_step(plan, elementwise_cases()[0].rule.bound, std::vector<double>{1},
             {.grad_factor = 0.5, .grads = use});
    grad.copy_to(tensor.grad);
    EXPECT_EQ(tensor.grad.first_difference(other.grad), -1);
    EXPECT_FALSE(plan.grad_is_own(0));
  }
}

TEST(RowsPlanTest, RowsOutsideOfTheTensorAreRefused) {
  for (const int64_t outside : {int64_t{-1}, int64_t{50}, int64_t{1} << 62}) {
    Tensor tensor = table_tensor();
    const Tensor before = tensor;
    SparseGrad grad(DType::kFloat, kTable, 1, {3, 1, 7}, /*seed=*/1);
    Plan plan(1, elementwise_cases()[0].rule.states);
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
