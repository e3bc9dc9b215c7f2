#include "src/plan/rows.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "src/run/session.h"

namespace fusedstep {
namespace {

// A part has at least so many entries: fewer are not worth a thread. An entry costs as much as some elements
// of a step.
constexpr int64_t kEntriesOfPart = 8192, kEntryCost = 8;

// A digit of a sort has up to so many bits: the places of its values fit in the first-level cache.
constexpr int kMostDigitBits = 11;

}  // namespace

void SparseRows::assign(const RowIndex& index, Dims sizes, std::span<const Dims> strides, void* entries,
                        int element_size, int threads) {
  index_ = index;
  entries_ = static_cast<std::byte*>(entries);
  row_elements_ = 1;
  for (const int64_t size : sizes.subspan(index.dims)) row_elements_ *= size;
  row_bytes_ = row_elements_ * element_size;
  strides_.clear();
  for (const Dims& operand : strides) {
    strides_.insert(strides_.end(), operand.begin(), operand.begin() + index.dims);
  }
  rows_.clear();
  sums_.clear();
  joins_.clear();
  if (row_elements_ == 0) return;  // such rows need no memory, and may be more than can be counted
  threads_ = threads;
  parts_ = std::clamp<int64_t>(index.entries / kEntriesOfPart, 1, std::max(threads, 1));
  part_.assign(parts_, {});
  list_entries(sizes);
  sort();
  find_rows();
  split_sums();
}

// Calls work(part, begin, end) for the entries of each part. It must not throw.
template <class Work>
void SparseRows::in_parts(Work work) {
  if (parts_ == 1) return work(0, int64_t{0}, index_.entries);
  std::vector<int64_t> cost(parts_ + 1);
  for (int64_t part = 0; part <= parts_; ++part) cost[part] = part_begin(part) * kEntryCost;
  auto of_parts = [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) work(part, part_begin(part), part_begin(part + 1));
  };
  run_session(threads_, cost, of_parts);
}

void SparseRows::list_entries(Dims sizes) {
  sorted_.resize(index_.entries);
  in_parts([&](int64_t part, int64_t begin, int64_t end) {
    Part& found = part_[part];
    uint64_t before = 0;
    for (int64_t entry = begin; entry < end; ++entry) {
      int64_t at = 0;
      for (int d = 0; d < index_.dims; ++d) at = at * sizes[d] + index_.at(d, entry);
      const auto row = static_cast<uint64_t>(at);
      sorted_[entry] = {row, entry};
      found.largest = std::max(found.largest, row);
      if (row < before) found.is_sorted = false;
      before = row;
    }
  });
}

// Sorts the entries by row and keeps the order of those for one row: a radix sort, the lowest digit first.
// Each part counts its digits, and then has a place for each.
void SparseRows::sort() {
  bool is_sorted = true;
  uint64_t largest = 0;
  for (int64_t part = 0; part < parts_; ++part) {
    const int64_t begin = part_begin(part);
    is_sorted &= part_[part].is_sorted && (part == 0 || sorted_[begin - 1].row <= sorted_[begin].row);
    largest = std::max(largest, part_[part].largest);
  }
  if (is_sorted) return;
  const int bits = std::bit_width(largest), digits = (bits + kMostDigitBits - 1) / kMostDigitBits;
  const int digit_bits = (bits + digits - 1) / digits;
  const int64_t values = int64_t{1} << digit_bits;
  scratch_.resize(sorted_.size());
  for (int digit = 0; digit < digits; ++digit) {
    const auto value = [&](const Entry& entry) {
      return static_cast<int64_t>(entry.row >> (digit * digit_bits)) & (values - 1);
    };
    places_.assign(parts_ * values, 0);
    in_parts([&](int64_t part, int64_t begin, int64_t end) {
      int64_t* const count = places_.data() + part * values;
      for (int64_t i = begin; i < end; ++i) ++count[value(sorted_[i])];
    });
    int64_t next = 0;
    for (int64_t v = 0; v < values; ++v) {
      for (int64_t part = 0; part < parts_; ++part) {
        int64_t& place = places_[part * values + v];
        const int64_t count = place;
        place = next;
        next += count;
      }
    }
    in_parts([&](int64_t part, int64_t begin, int64_t end) {
      int64_t* const place = places_.data() + part * values;
      for (int64_t i = begin; i < end; ++i) scratch_[place[value(sorted_[i])]++] = sorted_[i];
    });
    sorted_.swap(scratch_);
  }
}

// Finds where rows begin. Those of the parts before a part are counted first.
void SparseRows::find_rows() {
  const int64_t entries = index_.entries;
  const auto begins = [&](int64_t i) { return i == 0 || sorted_[i].row != sorted_[i - 1].row; };
  const auto goes_on = [&](int64_t i) { return i + 1 < entries && sorted_[i + 1].row == sorted_[i].row; };
  in_parts([&](int64_t part, int64_t begin, int64_t end) {
    int64_t rows = 0, sums = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (!begins(i)) continue;
      ++rows;
      if (goes_on(i)) ++sums;
    }
    part_[part].rows = rows;
    part_[part].sums = sums;
  });
  int64_t rows = 0, sums = 0;
  for (Part& part : part_) {
    rows += std::exchange(part.rows, rows);
    sums += std::exchange(part.sums, sums);
  }
  rows_.resize(rows);
  sums_.resize(sums);
  std::byte* const values = sum_values_.of(sums * row_bytes_);
  in_parts([&](int64_t part, int64_t begin, int64_t end) {
    int64_t row = part_[part].rows, sum = part_[part].sums;
    for (int64_t i = begin; i < end; ++i) {
      if (!begins(i)) continue;
      std::byte* grad = entry(i);
      if (goes_on(i)) {
        int64_t last = i + 2;
        while (last < entries && sorted_[last].row == sorted_[i].row) ++last;
        grad = values + sum * row_bytes_;
        sums_[sum++] = {grad, i, last};
      }
      rows_[row++] = {sorted_[i].entry, grad};
    }
  });
}

// Cuts sums of many entries, so that one row does not keep a thread while the others wait.
void SparseRows::split_sums() {
  int64_t others = 0;
  for (const Sum& sum : sums_) others += (sum.last - sum.first - 1) / kEntriesOfSum;
  if (others == 0) return;
  std::byte* values = other_values_.of(others * row_bytes_);
  const int64_t rows = sums();
  sums_.reserve(rows + others);
  for (int64_t i = 0; i < rows; ++i) {
    const Sum sum = sums_[i];
    const int64_t count = (sum.last - sum.first - 1) / kEntriesOfSum;
    if (count == 0) continue;
    joins_.push_back({sum.to, values, count});
    sums_[i].last = sum.first + kEntriesOfSum;
    for (int64_t first = sums_[i].last; first < sum.last; first += kEntriesOfSum) {
      sums_.push_back({values, first, std::min(first + kEntriesOfSum, sum.last)});
      values += row_bytes_;
    }
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
