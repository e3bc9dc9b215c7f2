// The walk over a tensor: chunk by chunk and, where its operands do not form one flat range, in blocks of its
// last two dimensions.
#pragma once
#include <cstdint>

#include "fusedstep/vocabulary.h"
#include "src/core/operands.h"

namespace fusedstep {

// A part of a tensor: units [begin, end) of its walk, elements of a flat range or blocks. With a sparse
// gradient units are counted on from row to row, on a device from entry to entry.
struct Chunk {
  uint32_t tensor;
  int64_t begin, end;
};

// The rows that the entries of a sparse gradient are for: the row of entry e has index at(d, e) in dimension
// d, for each of the tensor's first `dims` dimensions. The memory is borrowed.
struct RowIndex {
  const int64_t* data;
  int dims;
  int64_t entries;
  int64_t dim_stride, entry_stride;
  // For a device: a permutation after which entries for the same row follow one another. Null: they do so
  // already, and the host knows of no index that is out of range.
  const int64_t* order = nullptr;

  FUSEDSTEP_FN int64_t at(int dim, int64_t entry) const {
    return data[dim * dim_stride + entry * entry_stride];
  }
};

// The most elements, and the most blocks, of a tile. A kernel works on several small blocks together.
constexpr int64_t kTileElements = 1024, kTileBlocks = 256;

// The side of a block where operands have different orders: two cache lines of floats, which processors fetch
// together, in every operand.
constexpr int64_t kSquareSide = 32;
static_assert(kSquareSide * kSquareSide == kTileElements);

// Blocks have up to extent[0] by extent[1] elements (the last dimension is the weight's fastest). Within a
// block, and within those of a tile, offsets differ by less than 2^31.
struct BlockLayout {
  int dims;                // at least 2
  const int64_t* sizes;    // [dims]
  const int64_t* strides;  // [kMaxOperands][dims], in elements
  int64_t extent[2];       // rows, columns of a block
  int64_t blocks[2];       // along the rows, along the columns
  int blocks_per_tile;     // blocks that are worked on together: all of them whole if there are several
  bool long_rows;          // rows are long enough to be worked on one by one, in place
};

// A block: its first element in each operand, and its size.
struct Block {
  int64_t offset[kMaxOperands];
  int64_t rows, columns;
};

struct BlockSize {
  int64_t rows, columns;
};

// Returns the size of block `index`, and calls advance(dim, position) for the position in each dimension that
// it starts at.
template <class Advance>
FUSEDSTEP_FN BlockSize seek(const BlockLayout& layout, int64_t index, Advance advance) {
  const int row_dim = layout.dims - 2;
  auto number = static_cast<uint64_t>(index);
  const auto digit = [&](int64_t base) {
    const uint64_t rest = number / static_cast<uint64_t>(base);
    const auto found = static_cast<int64_t>(number - rest * static_cast<uint64_t>(base));
    number = rest;
    return found;
  };
  const auto cut = [&](int which) {
    const int64_t extent = layout.extent[which], start = digit(layout.blocks[which]) * extent;
    advance(row_dim + which, start);
    const int64_t left = layout.sizes[row_dim + which] - start;
    return left < extent ? left : extent;
  };
  const int64_t columns = cut(1), rows = cut(0);
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int dim = row_dim - 1; dim >= 0; --dim) advance(dim, digit(layout.sizes[dim]));
  return {rows, columns};
}

FUSEDSTEP_FN Block locate(const BlockLayout& layout, int operands, int64_t index) {
  Block block{};
  const BlockSize size = seek(layout, index, [&](int dim, int64_t position) {
    for (int k = 0; k < operands; ++k) block.offset[k] += position * layout.strides[k * layout.dims + dim];
  });
  block.rows = size.rows;
  block.columns = size.columns;
  return block;
}

// Walks from block to block. It calls locate(), which divides, only at the end of a row of blocks.
class BlockWalk {
 public:
  BlockWalk(const BlockLayout& layout, int operands, int64_t index)
      : layout_(layout),
        operands_(operands),
        column_(index % layout.blocks[1]),
        block_(locate(layout, operands, index)) {}

  const Block& block() const { return block_; }

  // Goes to the next block, which is block `index`.
  void go_to(int64_t index) {
    const int64_t extent = layout_.extent[1];
    if (++column_ == layout_.blocks[1]) {
      column_ = 0;
      block_ = locate(layout_, operands_, index);
      return;
    }
    for (int k = 0; k < operands_; ++k) {
      block_.offset[k] += extent * layout_.strides[(k + 1) * layout_.dims - 1];
    }
    const int64_t left = layout_.sizes[layout_.dims - 1] - column_ * extent;
    block_.columns = left < extent ? left : extent;
  }

 private:
  const BlockLayout& layout_;
  int operands_;
  int64_t column_;
  Block block_;
};

}  // namespace fusedstep
