#include "tests/cpp/sparse_grad.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace fusedstep::test {
namespace {

int64_t product(Dims sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace

SparseGrad::SparseGrad(DType dtype, Sizes sizes, int dims, const std::vector<int64_t>& rows, uint64_t seed)
    : sizes_(std::move(sizes)),
      dims_(dims),
      rows_(rows),
      strides_(dims, 0),
      index_(dims * rows.size()),
      order_(rows.size()),
      entries_(dtype, entry_sizes(), dense(entry_sizes())) {
  entries_.fill(seed);
  const Form form = dense(entry_sizes());
  strides_.insert(strides_.end(), form.strides.begin() + 1, form.strides.end());
  for (size_t entry = 0; entry < rows.size(); ++entry) {
    int64_t rest = rows[entry];
    for (int d = dims; d-- > 0; rest /= sizes_[d]) index_[d * rows.size() + entry] = rest % sizes_[d];
  }
  std::iota(order_.begin(), order_.end(), 0);
  std::ranges::stable_sort(order_, {}, [&](int64_t entry) { return rows_[entry]; });
}

void SparseGrad::bind(Plan& plan, size_t i, TensorOperands operands) {
  const TensorView entries = entries_.view();
  const auto count = static_cast<int64_t>(rows_.size());
  const bool is_host = plan.device() == kHost;
  operands.grad = {entries.data, entries.dtype, sizes_, strides_, plan.device()};
  operands.rows = RowIndex{index_.data(),
                           dims_,
                           count,
                           /*dim_stride=*/count,
                           /*entry_stride=*/1,
                           is_host || order_.empty() ? nullptr : order_.data()};
  operands.weight.device = plan.device();
  for (TensorView& state : operands.states) state.device = plan.device();
  plan.bind(i, operands);
}

void SparseGrad::copy_to(Operand& grad) const {
  grad.clear();
  const int64_t elements = row_elements();
  for (size_t entry = 0; entry < rows_.size(); ++entry) {
    for (int64_t k = 0; k < elements; ++k) {
      const int64_t at = rows_[entry] * elements + k;
      grad.set(at, grad.get(at) + entries_.get(static_cast<int64_t>(entry) * elements + k));
    }
  }
}

std::vector<bool> SparseGrad::has_row() const {
  std::vector<bool> has(product(Dims(sizes_).first(dims_)));
  for (const int64_t row : rows_) has[row] = true;
  return has;
}

int64_t SparseGrad::row_elements() const { return product(Dims(sizes_).subspan(dims_)); }

Sizes SparseGrad::entry_sizes() const {
  Sizes sizes{static_cast<int64_t>(rows_.size())};
  sizes.insert(sizes.end(), sizes_.begin() + dims_, sizes_.end());
  return sizes;
}

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

int64_t rows_of(const Table& table) { return product(Dims(table.sizes).first(table.dims)); }

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

}  // namespace fusedstep::test
