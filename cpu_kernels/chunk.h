// Runs a span kernel over a chunk of one tensor: in place where its operands lie side by side, otherwise
// through a tile on the stack: gather, kernel, scatter. Nothing outside of the tensor's own elements is read
// or written.
#pragma once
#include <algorithm>
#include <cstring>

#include "cpu_kernels/coded.h"
#include "cpu_kernels/elementwise.h"
#include "cpu_kernels/tiles.h"
#include "cpu_kernels/weight_codes.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

template <bool kGather>
void copy_operand(const TensorTask& task, int operand, const Block& block, char* tile) {
  const BlockLayout& layout = *task.layout;
  const int64_t* strides = layout.strides + operand * layout.dims + layout.dims - 2;
  const int size = task.element_size[operand];
  char* array = static_cast<char*>(task.data[operand]) + block.offset[operand] * size;
  const auto run = [&]<class Word>(Word) {
    copy_block<Word, kGather>(reinterpret_cast<Word*>(array), reinterpret_cast<Word*>(tile), block.rows,
                              block.columns, strides[0], strides[1]);
  };
  if (size == 2) run(uint16_t{});
  if (size == 4) run(uint32_t{});
  if (size == 8) run(uint64_t{});
}

// Rows of a tensor: the address of the first in each operand, and the distance to the next.
struct RowAddresses {
  explicit RowAddresses(const TensorTask& task) : ahead(task.ahead) {}

  void* operand[kMaxOperands] = {};
  int64_t bytes[kMaxOperands] = {};
  PrefetchDistance ahead;
  const CodedState* coded = nullptr;  // Span::coded
  int64_t first = 0;

  void go_to_next() {
    for (int k = 0; k < kMaxOperands; ++k) operand[k] = static_cast<char*>(operand[k]) + bytes[k];
  }
};

// A kernel, and the treatment of the gradient before and after it.
struct TreatedKernel {
  const SpanKernel& kernel;
  const GradTreatment& treatment;
  const TensorTask& task;
  double* norms;

  bool reads(int operand) const { return ((kernel.reads | (scales() ? kGradBit : 0)) >> operand & 1) != 0; }
  bool writes(int operand) const {
    return ((kernel.writes | (scales() || treatment.clear ? kGradBit : 0)) >> operand & 1) != 0;
  }

  // Over rows of `count` elements that lie side by side in every operand.
  void run(const RowAddresses& where, int64_t rows, int64_t count) const {
    if (treats()) {  // row by row, so that each meets its gradient in the cache
      RowAddresses row = where;
      for (; rows > 1; --rows) {
        run_treated(row, count);
        row.go_to_next();
      }
      return run_treated(row, count);
    }
    Span span = span_of(where, rows, count);
    span.grad_factor = treatment.factor;
    run_kernel(span);
  }

  // True if the kernel takes states and weights as they are stored. It takes no other weights of 16 bits than
  // those in a code.
  bool takes_stored() const {
    return kernel.run_as_stored != nullptr &&
           (task.weight_code != WeightCode::kPlain || task.element_size[kWeight] == sizeof(float));
  }

  // True if the gradient is scaled or cleared besides. The kernel should then meet it in the cache.
  bool treats() const { return scales() || treatment.clear; }

 private:
  bool scales() const { return treatment.scale != nullptr; }
  void run_kernel(const Span& span) const { (span.coded ? kernel.run_as_stored : kernel.run)(span); }

  Span span_of(const RowAddresses& where, int64_t rows, int64_t count) const {
    Span span;
    span.writes = kernel.writes;
    std::copy_n(where.operand, kMaxOperands, span.operand);
    std::copy_n(where.bytes, kMaxOperands, span.row_bytes);
    span.rows = rows;
    span.ahead = where.ahead;
    span.count = count;
    span.scalars = task.scalars;
    span.ratio = task.ratio;
    span.norms = norms;
    span.coded = where.coded;
    span.first = where.first;
    span.rounding = task.rounding;
    span.weight_code = task.weight_code;
    span.draws = task.draws;
    return span;
  }
  void run_treated(const RowAddresses& row, int64_t count) const {
    Span span = span_of(row, 1, count);
    if (scales()) {
      span.grad_factor = treatment.scale_factor;
      treatment.scale->run(span);
    }
    span.grad_factor = treatment.factor;
    run_kernel(span);
    if (treatment.clear) std::memset(span.operand[kGrad], 0, count * task.element_size[kGrad]);
  }
};

inline void run_dense(const TreatedKernel& kernel, int64_t begin, int64_t end) {
  const int64_t step = kernel.treats() ? kTileElements : end - begin;
  RowAddresses row(kernel.task);
  for (; begin < end; begin += step) {
    for (int k = 0; k < kernel.task.operands; ++k) {
      row.operand[k] = static_cast<char*>(kernel.task.data[k]) + begin * kernel.task.element_size[k];
    }
    kernel.run(row, 1, std::min(step, end - begin));
  }
}

// Blocks of rows, in place in those operands in which a row is contiguous. The others go through a tile
// of the whole block.
inline void run_rows(const TreatedKernel& kernel, int64_t begin, int64_t end) {
  const TensorTask& task = kernel.task;
  const BlockLayout& layout = *task.layout;
  alignas(64) Tile tiles[kMaxOperands];
  RowAddresses rows(task);
  if (layout.extent[0] > 1) {
    // The next block has each row's next elements, and the block after it those after them; what lies further
    // on would wait for too long.
    const int largest = *std::max_element(task.element_size, task.element_size + task.operands);
    rows.ahead.first = layout.extent[1] * largest;
    rows.ahead.second = kBlocksAhead * rows.ahead.first;
  }
  BlockWalk walk(layout, task.operands, begin);
  while (begin < end) {
    const Block& block = walk.block();
    for (int k = 0; k < task.operands; ++k) {
      const int64_t* strides = layout.strides + (k + 1) * layout.dims - 2;
      const int64_t size = task.element_size[k];
      const bool in_place = strides[1] == 1;
      rows.operand[k] = in_place ? static_cast<char*>(task.data[k]) + block.offset[k] * size : tiles[k];
      rows.bytes[k] = (in_place ? strides[0] : block.columns) * size;
      if (!in_place && kernel.reads(k)) copy_operand<true>(task, k, block, tiles[k]);
    }
    kernel.run(rows, block.rows, block.columns);
    for (int k = 0; k < task.operands; ++k) {
      if (rows.operand[k] == tiles[k] && kernel.writes(k)) copy_operand<false>(task, k, block, tiles[k]);
    }
    if (++begin < end) walk.go_to(begin);
  }
}

// Blocks of short rows that fill a tile: in place in those operands in which a block is one run.
inline void run_blocks(const TreatedKernel& kernel, int64_t begin, int64_t end) {
  const TensorTask& task = kernel.task;
  const BlockLayout& layout = *task.layout;
  alignas(64) Tile tiles[kMaxOperands];
  RowAddresses row(task);
  BlockWalk walk(layout, task.operands, begin);
  while (begin < end) {
    const Block& block = walk.block();
    for (int k = 0; k < task.operands; ++k) {
      const int64_t* strides = layout.strides + (k + 1) * layout.dims - 2;
      const bool in_place = strides[1] == 1 && (strides[0] == block.columns || block.rows == 1);
      row.operand[k] =
          in_place ? static_cast<char*>(task.data[k]) + block.offset[k] * task.element_size[k] : tiles[k];
      if (!in_place && kernel.reads(k)) copy_operand<true>(task, k, block, tiles[k]);
    }
    kernel.run(row, 1, block.rows * block.columns);
    for (int k = 0; k < task.operands; ++k) {
      if (row.operand[k] == tiles[k] && kernel.writes(k)) copy_operand<false>(task, k, block, tiles[k]);
    }
    if (++begin < end) walk.go_to(begin);
  }
}

// Copies elements [begin, begin + count), by rows and columns, between an operand in any layout and a tile.
template <bool kGather>
void copy_in_order(const TensorTask& task, int operand, int64_t begin, int64_t count, char* tile) {
  const BlockLayout& layout = *task.layout;
  const int64_t* const strides = layout.strides + operand * layout.dims;
  const int64_t columns = layout.sizes[layout.dims - 1], stride = strides[layout.dims - 1];
  const int size = task.element_size[operand];
  int64_t column = begin % columns;
  for (int64_t row = begin / columns; count > 0; ++row) {
    int64_t offset = column * stride, rest = row;
    for (int d = layout.dims - 2; d >= 0; --d) {
      offset += rest % layout.sizes[d] * strides[d];
      rest /= layout.sizes[d];
    }
    const int64_t run = std::min(columns - column, count);
    char* const array = static_cast<char*>(task.data[operand]) + offset * size;
    const auto copy = [&]<class Word>(Word) {
      copy_line<kGather>(reinterpret_cast<Word*>(array), stride, reinterpret_cast<Word*>(tile), run);
    };
    if (size == 2) copy(uint16_t{});
    if (size == 4) copy(uint32_t{});
    tile += run * size;
    count -= run;
    column = 0;
  }
}

// States in codes, and weights whose value is kept in another way than in float32. A kernel takes them as
// they are stored, or they are decoded to tiles and encoded from there. The other operands are in place if
// all have one order without a gap, in units that are elements.
inline void run_coded(const TreatedKernel& kernel, int64_t begin, int64_t end) {
  const TensorTask& task = kernel.task;
  alignas(64) Tile tiles[kMaxOperands];
  alignas(64) uint16_t stored[2][kTileElements];  // the weight, and what is kept beside it
  const int beside = task.operands - 1;
  const bool is_dense = task.layout == nullptr;
  const bool as_stored = kernel.takes_stored();
  const bool has_beside = task.weight_code != WeightCode::kRandom;
  const auto address = [&](int operand, int64_t element) {
    return static_cast<char*>(task.data[operand]) + element * task.element_size[operand];
  };
  const auto is_decoded = [&](int k) { return !as_stored && task.is_coded(k); };
  const auto is_value = [&](int k) { return !as_stored && task.keeps_value(k); };
  const int64_t step = as_stored && is_dense && !kernel.treats() ? end - begin : kTileElements;
  RowAddresses row(task);
  if (as_stored) row.coded = task.coded;
  for (; begin < end; begin += step) {
    const int64_t count = std::min(step, end - begin);
    row.first = begin;
    for (int k = 0; k < task.operands; ++k) {
      if (as_stored && task.is_coded(k)) {
        row.operand[k] = static_cast<char*>(task.data[k]) + task.coded[k - kFirstState].map->bytes_of(begin);
        continue;
      }
      const bool in_place = is_dense && !is_decoded(k) && !is_value(k);
      row.operand[k] = in_place ? address(k, begin) : tiles[k];
      if (in_place || is_value(k) || !kernel.reads(k)) continue;
      if (is_decoded(k)) {
        decode(task.coded[k - kFirstState], task.data[k], begin, count, reinterpret_cast<float*>(tiles[k]));
      } else {
        copy_in_order<true>(task, k, begin, count, tiles[k]);
      }
    }
    CodedWeight weight{};
    if (is_value(kWeight)) {
      weight = {is_dense ? address(kWeight, begin) : static_cast<void*>(stored[0]),
                is_dense ? address(beside, begin) : static_cast<void*>(stored[1]),
                key_of_range(task.draws, static_cast<uint64_t>(begin)), static_cast<uint32_t>(begin)};
      if (kernel.reads(kWeight)) {
        if (!is_dense) copy_in_order<true>(task, kWeight, begin, count, reinterpret_cast<char*>(stored[0]));
        if (!is_dense && has_beside) {
          copy_in_order<true>(task, beside, begin, count, reinterpret_cast<char*>(stored[1]));
        }
        decode_weight(task.weight_code, weight, count, reinterpret_cast<float*>(tiles[beside]),
                      tiles[kWeight]);
      }
    }
    kernel.run(row, 1, count);
    if (is_value(kWeight) && kernel.writes(kWeight)) {
      encode_weight(task.weight_code, weight, count, reinterpret_cast<const float*>(tiles[beside]));
      if (!is_dense) copy_in_order<false>(task, kWeight, begin, count, reinterpret_cast<char*>(stored[0]));
      if (!is_dense && has_beside) {
        copy_in_order<false>(task, beside, begin, count, reinterpret_cast<char*>(stored[1]));
      }
    }
    for (int k = 0; k < task.operands; ++k) {
      if (row.operand[k] != tiles[k] || is_value(k) || !kernel.writes(k)) continue;
      if (is_decoded(k)) {
        encode(task.coded[k - kFirstState], task.rounding, reinterpret_cast<const float*>(tiles[k]), begin,
               count, task.data[k]);
      } else {
        copy_in_order<false>(task, k, begin, count, tiles[k]);
      }
    }
  }
}

// Small blocks: as many as fill a tile of every operand are worked on together.
inline void run_packed(const TreatedKernel& kernel, int64_t begin, int64_t end) {
  const TensorTask& task = kernel.task;
  const int64_t blocks = task.layout->blocks_per_tile;
  if (blocks == 1) return run_blocks(kernel, begin, end);
  alignas(64) Tile tiles[kMaxOperands];
  RowAddresses row(task);
  for (int k = 0; k < task.operands; ++k) row.operand[k] = tiles[k];
  while (begin < end) {
    const int64_t last = std::min(begin + blocks, end);
    int64_t packed = 0;
    for (int64_t index = begin; index < last; ++index) {
      const Block block = locate(*task.layout, task.operands, index);
      for (int k = 0; k < task.operands; ++k) {
        if (kernel.reads(k)) copy_operand<true>(task, k, block, tiles[k] + packed * task.element_size[k]);
      }
      packed += block.rows * block.columns;
    }
    kernel.run(row, 1, packed);
    int64_t done = 0;
    for (; begin < last; ++begin) {
      const Block block = locate(*task.layout, task.operands, begin);
      for (int k = 0; k < task.operands; ++k) {
        if (kernel.writes(k)) copy_operand<false>(task, k, block, tiles[k] + done * task.element_size[k]);
      }
      done += block.rows * block.columns;
    }
  }
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
