#include "src/plan/layout.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>

namespace fusedstep {
namespace {

int64_t product(Dims sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// Returns the dimensions longer than one, in order or sorted by the weight's strides, the largest first.
// Neighbours are merged where every operand steps from one to the next without a gap.
std::vector<Dim> coalesce(Dims sizes, std::span<const Dims> strides, bool in_order) {
  std::vector<Dim> dims;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1) continue;
    Dim dim{sizes[d], {}};
    for (const Dims& operand : strides) dim.stride.push_back(operand[d]);
    dims.push_back(std::move(dim));
  }
  if (!in_order) {
    std::stable_sort(dims.begin(), dims.end(),
                     [](const Dim& a, const Dim& b) { return a.stride[0] > b.stride[0]; });
  }
  std::vector<Dim> merged;
  for (Dim& dim : dims) {
    const auto continues = [&](const Dim& outer) {
      for (size_t k = 0; k < dim.stride.size(); ++k) {
        if (outer.stride[k] != dim.size * dim.stride[k]) return false;
      }
      return true;
    };
    if (!merged.empty() && continues(merged.back())) {
      dim.size *= merged.back().size;
      merged.back() = std::move(dim);
    } else {
      merged.push_back(std::move(dim));
    }
  }
  return merged;
}

// The least elements of a row that is worked on in place, where all operands agree on the order of
// dimensions. Shorter rows are packed into tiles.
constexpr int64_t kLongRow = 128;

int64_t blocks_along(int64_t size, int64_t extent) { return (size + extent - 1) / extent; }

// Returns the fastest dimension of the first operand whose fastest dimension is not the last; -1 if there is
// none.
int other_order(const std::vector<Dim>& dims, size_t operands) {
  const int last = static_cast<int>(dims.size()) - 1;
  for (size_t k = 1; k < operands; ++k) {
    int best = last;
    for (int d = 0; d < last; ++d) {
      const int64_t stride = std::abs(dims[d].stride[k]);
      if (stride != 0 && stride < std::abs(dims[best].stride[k])) best = d;
    }
    if (best != last) return best;
  }
  return -1;
}

// The most by which offsets may differ within a block, and within the blocks of a tile.
constexpr int64_t kMostReach = std::numeric_limits<int32_t>::max();

// Makes a block small enough for that. Returns whether it had to.
bool keep_near(const Dim& columns, const Dim& rows, int64_t (&extent)[2]) {
  bool cut = false;
  for (size_t k = 0; k < columns.stride.size(); ++k) {
    for (;;) {
      const int64_t down = (extent[0] - 1) * std::abs(rows.stride[k]);
      const int64_t along = (extent[1] - 1) * std::abs(columns.stride[k]);
      if (down + along <= kMostReach) break;
      int64_t& larger = extent[down > along ? 0 : 1];
      larger = (larger + 1) / 2;
      cut = true;
    }
  }
  return cut;
}

// Returns how many small blocks are worked on together: several only if all have one size.
int64_t blocks_per_tile(const std::vector<Dim>& dims, const int64_t (&extent)[2]) {
  const Dim &columns = dims.back(), &rows = dims[dims.size() - 2];
  const int64_t blocks = std::min(kTileElements / (extent[0] * extent[1]), kTileBlocks);
  if (blocks <= 1 || rows.size % extent[0] != 0 || columns.size != extent[1]) return 1;
  for (size_t k = 0; k < columns.stride.size(); ++k) {
    int64_t reach = (columns.size - 1) * std::abs(columns.stride[k]);
    if (dims.size() == 2) {
      reach += (std::min(rows.size, blocks * extent[0]) - 1) * std::abs(rows.stride[k]);
    } else {
      for (size_t d = 0; d + 1 < dims.size(); ++d) reach += (dims[d].size - 1) * std::abs(dims[d].stride[k]);
    }
    if (reach > kMostReach) return 1;
  }
  return blocks;
}

}  // namespace

void Layout::describe(const std::vector<Dim>& dims, size_t operands) {
  for (const Dim& dim : dims) sizes_.push_back(dim.size);
  for (size_t k = 0; k < operands; ++k) {
    for (const Dim& dim : dims) strides_.push_back(dim.stride[k]);
  }
  blocks_.dims = static_cast<int>(dims.size());
  blocks_.sizes = sizes_.data();
  blocks_.strides = strides_.data();
}

Layout::Layout(Dims sizes, std::span<const Dims> strides, bool in_order) {
  const int64_t elements = product(sizes);
  if (elements == 0) {
    dense_ = true;
    return;
  }
  std::vector<Dim> dims = coalesce(sizes, strides, in_order);
  const auto contiguous = [](const Dim& dim) {
    return std::all_of(dim.stride.begin(), dim.stride.end(), [](int64_t stride) { return stride == 1; });
  };
  if (dims.empty() || (dims.size() == 1 && contiguous(dims[0]))) {
    dense_ = true;
    units_ = elements;
    return;
  }
  const size_t operands = strides.size();
  if (in_order) {
    describe(dims, operands);
    blocks_.extent[0] = blocks_.extent[1] = 1;
    units_ = elements;
    return;
  }
  const int other = other_order(dims, operands);
  if (other >= 0) std::rotate(dims.begin() + other, dims.begin() + other + 1, dims.end() - 1);
  while (dims.size() < 2) dims.insert(dims.begin(), Dim{1, std::vector<int64_t>(operands, 0)});

  describe(dims, operands);
  const int64_t rows = sizes_[dims.size() - 2], columns = sizes_.back();
  // A square, or half as many rows twice as long.
  const int64_t rows_of_tile = rows >= kSquareSide ? kSquareSide : kSquareSide / 2;
  const int64_t columns_of_tile = kTileElements / rows_of_tile;
  if (other >= 0 && rows >= rows_of_tile && columns >= columns_of_tile) {
    blocks_.long_rows = true;
    blocks_.extent[0] = rows_of_tile;
    blocks_.extent[1] = columns_of_tile;
  } else if (other < 0 && columns >= kLongRow) {
    blocks_.long_rows = true;
    blocks_.extent[0] = 1;
    blocks_.extent[1] = std::min(columns, kTileElements);
  } else {
    blocks_.extent[1] = other >= 0 ? std::min(columns, std::max(kSquareSide, kTileElements / rows)) : columns;
    blocks_.extent[0] = std::min(rows, kTileElements / blocks_.extent[1]);
  }
  blocks_.blocks_per_tile = 1;
  if (!keep_near(dims.back(), dims[dims.size() - 2], blocks_.extent)) {
    blocks_.blocks_per_tile = static_cast<int>(blocks_per_tile(dims, blocks_.extent));
  }
  blocks_.blocks[0] = blocks_along(rows, blocks_.extent[0]);
  blocks_.blocks[1] = blocks_along(columns, blocks_.extent[1]);
  units_ = blocks_.blocks[0] * blocks_.blocks[1] * product(Dims(sizes_).first(sizes_.size() - 2));
}

}  // namespace fusedstep
