// Walks a chunk element by element, in any layout: a block of threads takes a tile at a time.
//
// The elements of a tile are numbered block by block and row by row, as the weight lies, and threads side by
// side take elements side by side. A gradient that lies the other way is numbered column by column. It is
// read and written so, and goes through shared memory from one numbering to the other.
#pragma once
#include "cuda_kernels/launch.cuh"
#include "src/core/walk.h"

namespace fusedstep::cuda {

// The offsets of an element in each operand, in elements.
template <int kOperands, class Offset = int64_t>
struct Offsets {
  Offset offset[kOperands];

  static __device__ __forceinline__ Offsets flat(int64_t i) {
    Offsets place;
#pragma unroll
    for (int k = 0; k < kOperands; ++k) place.offset[k] = i;
    return place;
  }
};

// The elements of a tile that each thread has.
constexpr int kTileBatch = kTileElements / kThreads;

// Blocks of threads that a multiprocessor is to hold: as many as the registers of a batch allow.
template <class Body>
constexpr int kTileResident = Body::kOperands * sizeof(typename Body::T) <= 16 ? 4 : 2;

// Divides numbers below kTileElements by one up to kTileElements: a product instead.
class Divisor {
 public:
  Divisor() = default;
  explicit __device__ Divisor(int by) : factor_((kOne + by - 1) / by) {}
  __device__ __forceinline__ int operator()(int x) const {
    return static_cast<int>(static_cast<unsigned>(x) * factor_ / kOne);
  }

 private:
  static constexpr unsigned kOne = kTileElements * kTileElements;
  static_assert(kTileElements <= 1 << 10);
  unsigned factor_;
};

// From an element that a thread has to its next, in each operand, and in what is shared of the gradient, by
// its own numbering and by the others'.
template <int kOperands>
struct TileSteps {
  int of[kOperands];
  int own_grad, grad;
};

// Tile as the threads of a block share it.
template <int kOperands, class T>
struct TileMemory {
  void* data[kOperands];                          // its first element
  alignas(16) int shift[kTileBlocks][kOperands];  // from where its rows would be if it were one block
  int stride[kOperands][2];                       // to the next row, to the next column
  int rows, columns, elements;                    // of all its blocks
  Divisor by_rows, by_columns, by_block_rows;
  bool grad_crosses, regular;
  TileSteps<kOperands> steps;     // if it is regular
  T grad[kTileElements * 3 / 2];  // column by column, an odd number of places for each: in banks of their own
};

template <class Body>
class Tiles {
 public:
  static constexpr int kOperands = Body::kOperands;
  using At = Offsets<kOperands, int>;
  using T = typename Body::T;
  using Memory = TileMemory<kOperands, T>;

  // Borrows all three: what a thread keeps in registers should be its elements.
  __device__ Tiles(const Launch& launch, const Chunk& chunk, Memory& memory)
      : launch_(launch), chunk_(chunk), layout_(launch.tensors[chunk.tensor].layout), memory_(memory) {}

  __device__ bool has(int tile) const { return first_unit(tile) < chunk_.end; }

  // For all threads of the block, when none is at a tile any more.
  __device__ void enter(int tile) {
    const int64_t first = first_unit(tile), left = chunk_.end - first;
    const int units = left < units_per_tile() ? static_cast<int>(left) : units_per_tile();
    if (!is_flat()) {
      describe_blocks(first, units);
    } else if (const int k = static_cast<int>(threadIdx.x); k < kOperands) {
      describe_operand(k, first, 0, 1, {1, 1, units});
    }
    __syncthreads();
  }

  __device__ __forceinline__ int elements() const { return memory_.elements; }
  __device__ __forceinline__ int columns() const { return memory_.columns; }
  // The tile's start in each operand: offsets count from there.
  __device__ __forceinline__ void* const* data() const { return memory_.data; }

  // True if the tile is whole and of one block, so that threads go along its rows and columns in step.
  __device__ __forceinline__ bool is_regular() const { return memory_.regular; }
  __device__ __forceinline__ const TileSteps<kOperands>& steps() const { return memory_.steps; }

  // Returns an element's place in each operand. The gradient's place is by its own numbering.
  __device__ __forceinline__ At place(int element) const {
    const Position position = by_row(element);
    At at;
#pragma unroll
    for (int k = 0; k < kOperands; ++k) at.offset[k] = offset(k, position);
    if (grad_crosses()) at.offset[kGrad] = offset(kGrad, by_column(element));
    return at;
  }

  // True if the gradient has a numbering of its own. Its elements are then in shared memory: own_grad() finds
  // them by that numbering, grad() by the others'.
  __device__ __forceinline__ bool grad_crosses() const { return memory_.grad_crosses; }
  __device__ __forceinline__ T& own_grad(int element) const { return staged(by_column(element)); }
  __device__ __forceinline__ T& grad(int element) const { return staged(by_row(element)); }

 private:
  struct Position {
    int row, column;
  };
  struct Extent {
    int blocks, rows, columns;
  };

  __device__ bool is_flat() const { return layout_.sizes == nullptr; }
  __device__ int units_per_tile() const {
    return is_flat() ? static_cast<int>(kTileElements) : layout_.blocks_per_tile;
  }
  __device__ int64_t first_unit(int tile) const {
    return chunk_.begin + static_cast<int64_t>(tile) * units_per_tile();
  }

  __device__ __forceinline__ Position by_row(int element) const {
    const int row = memory_.by_columns(element);
    return {row, element - row * memory_.columns};
  }
  __device__ __forceinline__ Position by_column(int element) const {
    const int column = memory_.by_rows(element);
    return {element - column * memory_.rows, column};
  }
  __device__ __forceinline__ int offset(int k, const Position& at) const {
    return memory_.shift[memory_.by_block_rows(at.row)][k] + at.row * memory_.stride[k][0] +
           at.column * memory_.stride[k][1];
  }
  // Places of a column in shared memory: an odd number.
  __device__ __forceinline__ int pitch() const { return memory_.rows | 1; }
  __device__ __forceinline__ T& staged(const Position& at) const {
    return memory_.grad[at.column * pitch() + at.row];
  }

  __device__ void describe_blocks(int64_t first, int blocks) {
    for (int i = static_cast<int>(threadIdx.x); i < blocks * kOperands; i += kThreads) {
      const int block = i / kOperands, k = i % kOperands;
      const int64_t* const strides = layout_.strides + k * layout_.dims;
      int64_t offset = 0, of_first = 0;
      BlockSize size{};
      // First the tile's first block, then this one.
#pragma unroll 1
      for (int64_t at = first; at <= first + block; at += block > 0 ? block : 1) {
        of_first = offset;
        offset = 0;
        size = seek(layout_, at, [&](int dim, int64_t position) { offset += position * strides[dim]; });
      }
      const int64_t down = strides[layout_.dims - 2];
      memory_.shift[block][k] =
          block == 0 ? 0 : static_cast<int>(offset - of_first - block * size.rows * down);
      if (block != 0) continue;
      describe_operand(k, offset, down, strides[layout_.dims - 1],
                       {blocks, static_cast<int>(size.rows), static_cast<int>(size.columns)});
    }
  }
  __device__ void describe_operand(int k, int64_t start, int64_t down, int64_t along, const Extent& extent) {
    void* const data =
        k == kGrad ? launch_.grads[chunk_.tensor].data : launch_.tensors[chunk_.tensor].data[k];
    memory_.data[k] = static_cast<char*>(data) + start * Body::element_size(k);
    memory_.shift[0][k] = 0;
    memory_.stride[k][0] = static_cast<int>(down);
    memory_.stride[k][1] = static_cast<int>(along);
    const auto magnitude = [](int64_t stride) { return stride < 0 ? -stride : stride; };
    const bool crosses = k == kGrad && down != 0 && magnitude(down) < magnitude(along);
    const auto [blocks, rows, columns] = extent;
    const int64_t to_row = rows == 1 ? kThreads * along : kThreads / columns * down;
    memory_.steps.of[k] = static_cast<int>(crosses ? kThreads / rows * along : to_row);
    if (k == kGrad) describe(extent, crosses);
  }
  __device__ void describe(const Extent& extent, bool crosses) {
    const auto [blocks, rows, columns] = extent;
    memory_.grad_crosses = crosses;
    memory_.rows = blocks * rows;
    memory_.columns = columns;
    memory_.elements = blocks * rows * columns;
    memory_.by_rows = Divisor(blocks * rows);
    memory_.by_columns = Divisor(columns);
    memory_.by_block_rows = Divisor(rows);
    const bool along_rows = rows == 1 || kThreads % columns == 0;
    const bool along_columns = !crosses || kThreads % rows == 0;
    memory_.regular = blocks == 1 && rows * columns == kTileElements && along_rows && along_columns;
    memory_.steps.own_grad = kThreads / rows * pitch();
    memory_.steps.grad = rows == 1 ? kThreads : kThreads / columns;
  }

  const Launch& launch_;
  const Chunk& chunk_;
  const BlockLayout& layout_;
  Memory& memory_;
};

// The elements of a tile that a thread has. Calls run(b, element) for each of them,
template <class Tiles>
struct AnyBatch {
  using At = typename Tiles::At;
  using T = typename Tiles::T;

  const Tiles& tiles;

  __device__ __forceinline__ explicit AnyBatch(const Tiles& tiles_) : tiles(tiles_) {}

  __device__ __forceinline__ At place(int, int element) const { return tiles.place(element); }
  __device__ __forceinline__ T& own_grad(int, int element) const { return tiles.own_grad(element); }
  __device__ __forceinline__ T& grad(int, int element) const { return tiles.grad(element); }

  template <class Run>
  __device__ __forceinline__ void each(Run run) const {
#pragma unroll
    for (int b = 0; b < kTileBatch; ++b) {
      const int element = b * kThreads + static_cast<int>(threadIdx.x);
      if (element < tiles.elements()) run(b, element);
    }
  }
  // and with the last element where there is none: without branches, for what may be done twice.
  template <class Run>
  __device__ __forceinline__ void each_whole(Run run) const {
    const int last = tiles.elements() - 1;
#pragma unroll
    for (int b = 0; b < kTileBatch; ++b) {
      const int element = b * kThreads + static_cast<int>(threadIdx.x);
      run(b, element < last ? element : last);
    }
  }
  // Has places worked out anew after it. To keep those of a batch while it is on its way from memory takes
  // registers, and with them threads that would wait meanwhile for other batches.
  __device__ __forceinline__ void forget_places() const { asm volatile("" ::: "memory"); }
};

// The same in a regular tile: from each element to the thread's next it is the same step.
template <class Tiles>
class RegularBatch {
 public:
  using At = typename Tiles::At;
  using T = typename Tiles::T;

  __device__ __forceinline__ explicit RegularBatch(const Tiles& tiles)
      : first_(tiles.place(static_cast<int>(threadIdx.x))),
        own_(&tiles.own_grad(static_cast<int>(threadIdx.x))),
        grad_(&tiles.grad(static_cast<int>(threadIdx.x))),
        steps_(tiles.steps()) {}

  __device__ __forceinline__ At place(int b, int) const {
    At at = first_;
#pragma unroll
    for (int k = 0; k < Tiles::kOperands; ++k) at.offset[k] += b * steps_.of[k];
    return at;
  }
  __device__ __forceinline__ T& own_grad(int b, int) const { return own_[b * steps_.own_grad]; }
  __device__ __forceinline__ T& grad(int b, int) const { return grad_[b * steps_.grad]; }

  template <class Run>
  __device__ __forceinline__ void each(Run run) const {
#pragma unroll
    for (int b = 0; b < kTileBatch; ++b) run(b, b * kThreads + static_cast<int>(threadIdx.x));
  }
  template <class Run>
  __device__ __forceinline__ void each_whole(Run run) const {
    each(run);
  }
  __device__ __forceinline__ void forget_places() const {}

 private:
  At first_;
  T *own_, *grad_;
  TileSteps<Tiles::kOperands> steps_;
};

// Reads a thread's elements, and multiplies the gradient in memory where that is asked for. What a thread
// reads is asked for before it is waited for.
template <class Body, class Tiles, class Batch, class Read>
__device__ __forceinline__ void read_tile(const Body& body, const Tiles& tiles, const Batch& batch,
                                          Read (&read)[kTileBatch]) {
  batch.each_whole([&](int b, int element) {
    const auto at = batch.place(b, element);
    body.load_rest(at, read[b]);
    body.load_grad(at, read[b]);
  });
  batch.forget_places();
  if (body.scales) {
    batch.each([&](int b, int element) { body.scale_grad(batch.place(b, element), read[b].grad); });
  }
  if (!tiles.grad_crosses()) return;
  batch.each([&](int b, int element) { batch.own_grad(b, element) = read[b].grad[0]; });
  __syncthreads();
  // The last element alone is its owner's, who may already write it.
  batch.each([&](int b, int element) { read[b].grad[0] = batch.grad(b, element); });
}

// Writes the gradient, where `body` stores any, and waits for all threads of the block.
template <class Body, class Tiles, class Batch, class Read>
__device__ __forceinline__ void write_tile(const Body& body, const Tiles& tiles, const Batch& batch,
                                           Read (&read)[kTileBatch]) {
  const bool crosses = tiles.grad_crosses() && body.stores;
  if (crosses) batch.each([&](int b, int element) { batch.grad(b, element) = read[b].grad[0]; });
  __syncthreads();
  if (crosses) batch.each([&](int b, int element) { read[b].grad[0] = batch.own_grad(b, element); });
  if (body.stores) {
    batch.each([&](int b, int element) { body.store_grad(batch.place(b, element), read[b]); });
  }
}

}  // namespace fusedstep::cuda
