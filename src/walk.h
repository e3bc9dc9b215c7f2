// How a tensor is walked: chunk by chunk and, where its operands do not form one flat range, in blocks of its
// last two dimensions.
#pragma once
#include <cstdint>

#include "fusedstep/vocabulary.h"
#include "src/operands.h"

namespace fusedstep {

// A part of a tensor: units [begin, end) of its walk, elements of a flat range or blocks. With a sparse
// gradient units are counted on from row to row.
struct Chunk {
  uint32_t tensor;
  int64_t begin, end;
};

// Elements that are packed together where blocks are small.
constexpr int64_t kTileElements = 1024;

// Blocks have up to extent[0] by extent[1] elements (the last dimension is the weight's fastest).
struct BlockLayout {
  int dims;                // at least 2
  const int64_t* sizes;    // [dims]
  const int64_t* strides;  // [kMaxOperands][dims], in elements
  int64_t extent[2];       // rows, columns of a block
  bool long_rows;          // rows are long enough to be worked on one by one, in place

  // Blocks that are worked on together where rows are not long: all of them whole if there are several.
  FUSEDSTEP_FN int64_t blocks_per_pack() const {
    const int64_t blocks = kTileElements / (extent[0] * extent[1]);
    return blocks > 1 ? blocks : 1;
  }
};

// Where a block of a tensor starts in each operand, in elements, and its size.
struct Block {
  int64_t offset[kMaxOperands];
  int64_t rows, columns;
};

FUSEDSTEP_FN Block locate(const BlockLayout& layout, int operands, int64_t index) {
  const int row_dim = layout.dims - 2, column_dim = layout.dims - 1;
  Block block{};
  const auto advance = [&](int dim, int64_t position) {
    for (int k = 0; k < operands; ++k) block.offset[k] += position * layout.strides[k * layout.dims + dim];
  };
  const auto cut = [&](int dim, int64_t extent) {
    const int64_t blocks = (layout.sizes[dim] + extent - 1) / extent, start = index % blocks * extent;
    index /= blocks;
    advance(dim, start);
    const int64_t left = layout.sizes[dim] - start;
    return left < extent ? left : extent;
  };
  block.columns = cut(column_dim, layout.extent[1]);
  block.rows = cut(row_dim, layout.extent[0]);
  for (int dim = row_dim - 1; dim >= 0; --dim) {
    advance(dim, index % layout.sizes[dim]);
    index /= layout.sizes[dim];
  }
  return block;
}

}  // namespace fusedstep
