#include "src/rows.h"

#include <algorithm>
#include <array>

namespace fusedstep {

void SparseRows::assign(const RowIndex& index, Dims sizes, std::span<const Dims> strides, void* entries,
                        int element_size) {
  index_ = index;
  entries_ = static_cast<std::byte*>(entries);
  row_elements_ = 1;
  for (const int64_t size : sizes.subspan(index.dims)) row_elements_ *= size;
  row_bytes_ = row_elements_ * element_size;
  strides_.clear();
  for (const Dims& operand : strides) {
    strides_.insert(strides_.end(), operand.begin(), operand.begin() + index.dims);
  }
  sorted_.resize(index.entries);
  for (int64_t entry = 0; entry < index.entries; ++entry) {
    int64_t row = 0;
    for (int d = 0; d < index.dims; ++d) row = row * sizes[d] + index.at(d, entry);
    sorted_[entry] = {static_cast<uint64_t>(row), entry};
  }
  sort();
  rows_.clear();
  sums_.clear();
  for (int64_t first = 0, last; first < index.entries; first = last) {
    const auto other = [&](const Entry& entry) { return entry.row != sorted_[first].row; };
    last = std::find_if(sorted_.begin() + first, sorted_.end(), other) - sorted_.begin();
    if (last - first > 1) sums_.push_back({count(), first, last});
    rows_.push_back({sorted_[first].entry, entries_ + sorted_[first].entry * row_bytes_});
  }
  sum_values_.resize(sums_.size() * row_bytes_);
  for (size_t i = 0; i < sums_.size(); ++i) rows_[sums_[i].row].grad = sum_values_.data() + i * row_bytes_;
}

// Sorts the entries by row and keeps the order of those for one row: a radix sort, the lowest byte first.
void SparseRows::sort() {
  if (std::ranges::is_sorted(sorted_, {}, &Entry::row)) return;
  const uint64_t largest = std::ranges::max(sorted_, {}, &Entry::row).row;
  scratch_.resize(sorted_.size());
  for (int shift = 0; shift < 64 && largest >> shift != 0; shift += 8) {
    const auto byte = [shift](const Entry& entry) { return entry.row >> shift & 0xff; };
    std::array<int64_t, 257> begin{};
    for (const Entry& entry : sorted_) ++begin[byte(entry) + 1];
    for (int i = 0; i < 256; ++i) begin[i + 1] += begin[i];
    for (const Entry& entry : sorted_) scratch_[begin[byte(entry)]++] = entry;
    sorted_.swap(scratch_);
  }
}

TensorTask SparseRows::task(const TensorTask& tensor, int64_t row) const {
  TensorTask task = tensor;
  for (int k = 0; k < task.operands; ++k) {
    int64_t offset = 0;
    for (int d = 0; d < index_.dims; ++d) {
      offset += index_.at(d, rows_[row].entry) * strides_[k * index_.dims + d];
    }
    task.data[k] = static_cast<std::byte*>(task.data[k]) + offset * task.element_size[k];
  }
  task.data[kGrad] = rows_[row].grad;
  // Beyond the end of the row are others, few of which have an entry.
  if (row_bytes_ < std::max(task.ahead.first, task.ahead.second)) task.ahead = {};
  return task;
}

}  // namespace fusedstep
