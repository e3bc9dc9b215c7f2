// The rows of a tensor that a sparse gradient has values for.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "src/core/task.h"
#include "src/layout.h"

namespace fusedstep {

// The rows in ascending order, each once. Entries for the same row are added in their order, as
// torch.Tensor.coalesce() does.
class SparseRows {
 public:
  // Takes a gradient whose entries lie one behind another. `sizes` are the tensor's, `strides[k]` those of
  // its operand k in elements.
  void assign(const RowIndex& index, Dims sizes, std::span<const Dims> strides, void* entries,
              int element_size);

  int64_t count() const { return static_cast<int64_t>(rows_.size()); }
  // Returns the task of a row, from the task of its tensor. A row with several entries has no gradient before
  // make_sum().
  TensorTask task(const TensorTask& tensor, int64_t row) const;

  // The rows with several entries, and the cost of adding up the entries of one.
  int64_t sums() const { return static_cast<int64_t>(sums_.size()); }
  int64_t sum_cost(int64_t i) const { return (sums_[i].last - sums_[i].first) * row_elements_; }
  // Adds up the entries of one. add(to, entry, elements) adds an entry to a sum.
  template <class Add>
  void make_sum(int64_t i, Add add) {
    if (row_bytes_ == 0) return;  // rows without elements need no memory, and may have none
    const Sum& sum = sums_[i];
    std::byte* const to = rows_[sum.row].grad;
    std::memcpy(to, entries_ + sorted_[sum.first].entry * row_bytes_, row_bytes_);
    for (int64_t k = sum.first + 1; k < sum.last; ++k) {
      add(to, entries_ + sorted_[k].entry * row_bytes_, row_elements_);
    }
  }

 private:
  struct Entry {
    uint64_t row;  // in row-major order
    int64_t entry;
  };
  struct Row {
    int64_t entry;  // an entry for this row
    std::byte* grad;
  };
  struct Sum {
    int64_t row, first, last;  // of sorted_
  };
  void sort();

  RowIndex index_{};
  std::byte* entries_ = nullptr;
  int64_t row_elements_ = 0, row_bytes_ = 0;
  std::vector<int64_t> strides_;  // [operands][dims]
  std::vector<Entry> sorted_, scratch_;
  std::vector<Row> rows_;
  std::vector<Sum> sums_;
  std::vector<std::byte> sum_values_;
};

}  // namespace fusedstep
