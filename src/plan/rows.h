// The rows of a tensor that a sparse gradient has values for.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "src/core/task.h"
#include "src/plan/layout.h"

namespace fusedstep {

// The entries that are added up one after another. The sums of so many entries of a row are added in their
// order.
constexpr int64_t kEntriesOfSum = 512;

// The rows in ascending order, each once. Entries for the same row are added in their order, as
// torch.Tensor.coalesce() does, up to kEntriesOfSum of them.
class SparseRows {
 public:
  // Takes a gradient whose entries lie one behind another. `sizes` are the tensor's, `strides[k]` those of
  // its operand k in elements. Sorts on up to `threads` threads; what it finds does not depend on them.
  void assign(const RowIndex& index, Dims sizes, std::span<const Dims> strides, void* entries,
              int element_size, int threads);

  int64_t count() const { return static_cast<int64_t>(rows_.size()); }
  // Returns the task of a row, from the task of its tensor. A row with several entries has no gradient before
  // make_sum() and make_join().
  TensorTask task(const TensorTask& tensor, int64_t row) const;
  // The index of a row in a dimension, and its gradient.
  int64_t at(int64_t row, int dim) const { return index_.at(dim, rows_[row].entry); }
  std::byte* grad(int64_t row) const { return rows_[row].grad; }

  // The sums to be made, and the cost of one. They may be made in any order.
  int64_t sums() const { return static_cast<int64_t>(sums_.size()); }
  int64_t sum_cost(int64_t i) const { return (sums_[i].last - sums_[i].first) * row_elements_; }
  // Adds up the entries of one. add(to, entry, elements) adds an entry to a sum.
  template <class Add>
  void make_sum(int64_t i, Add add) const {
    constexpr int64_t kAhead = 4;
    const Sum& sum = sums_[i];
    std::memcpy(sum.to, entry(sum.first), row_bytes_);
    for (int64_t k = sum.first + 1; k < sum.last; ++k) {
      if (k + kAhead < sum.last) __builtin_prefetch(entry(k + kAhead));
      add(sum.to, entry(k), row_elements_);
    }
  }

  // The rows that have several sums, which are added to the first when all are there.
  int64_t joins() const { return static_cast<int64_t>(joins_.size()); }
  int64_t join_cost(int64_t i) const { return joins_[i].count * row_elements_; }
  template <class Add>
  void make_join(int64_t i, Add add) const {
    const Join& join = joins_[i];
    for (int64_t k = 0; k < join.count; ++k) add(join.to, join.others + k * row_bytes_, row_elements_);
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
    std::byte* to;
    int64_t first, last;  // of sorted_
  };
  struct Join {
    std::byte *to, *others;
    int64_t count;  // of the others
  };
  // Memory that is not cleared, as a vector's would be each time it grows.
  class Values {
   public:
    std::byte* of(int64_t bytes) {
      if (bytes > bytes_) {
        memory_.reset();
        memory_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
        bytes_ = bytes;
      }
      return memory_.get();
    }

   private:
    std::unique_ptr<std::byte[]> memory_;
    int64_t bytes_ = 0;
  };

  std::byte* entry(int64_t sorted) const { return entries_ + sorted_[sorted].entry * row_bytes_; }
  int64_t part_begin(int64_t part) const { return index_.entries * part / parts_; }
  template <class Work>
  void in_parts(Work work);
  void list_entries(Dims sizes);
  void sort();
  void find_rows();
  void split_sums();

  RowIndex index_{};
  std::byte* entries_ = nullptr;
  int64_t row_elements_ = 0, row_bytes_ = 0;
  std::vector<int64_t> strides_;  // [operands][dims]
  std::vector<Entry> sorted_, scratch_;
  std::vector<Row> rows_;
  std::vector<Sum> sums_;
  std::vector<Join> joins_;
  Values sum_values_, other_values_;  // of the first sums of rows, and of their others

  // The entries are cut into parts, which threads take.
  int threads_ = 1;
  int64_t parts_ = 1;
  struct Part {
    uint64_t largest = 0;
    bool is_sorted = true;
    int64_t rows = 0, sums = 0;  // that begin in it, and in those before it
  };
  std::vector<Part> part_;
  std::vector<int64_t> places_;  // [parts][digits]
};

}  // namespace fusedstep
