// How a block of threads goes over a chunk element by element, in any layout: a tile at a time.
//
// The elements of a tile are numbered block by block and row by row, as the weight lies, and threads side by
// side take elements side by side. A gradient that lies the other way is numbered column by column. It is
// read and written so, and goes through shared memory from one numbering to the other.
#pragma once
#include "cuda_kernels/launch.cuh"
#include "src/walk.h"

namespace fusedstep::cuda {

// Where an element is in each operand, in elements.
template <int kOperands, class Offset = int64_t>
struct Place {
  Offset offset[kOperands];

  static __device__ __forceinline__ Place flat(int64_t i) {
    Place place;
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

// What the threads of a block share about a tile.
template <int kOperands, class T>
struct TileMemory {
  void* data[kOperands];                          // its first element
  alignas(16) int shift[kTileBlocks][kOperands];  // from where its rows would be if it were one block
  int stride[kOperands][2];                       // to the next row, to the next column
  int rows, columns, elements;                    // of all its blocks
  Divisor by_rows, by_columns, by_block_rows;
  bool grad_crosses;
  T grad[kTileElements * 3 / 2];  // column by column, an odd number of places for each: in banks of their own
};

template <class Body>
class Tiles {
 public:
  static constexpr int kOperands = Body::kOperands;
  using At = Place<kOperands, int>;
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
      describe_operand(k, first, 0, 1);
      if (k == 0) describe(1, 1, units);
    }
    __syncthreads();
  }

  __device__ __forceinline__ int elements() const { return memory_.elements; }
  __device__ __forceinline__ int columns() const { return memory_.columns; }
  // Where the tile starts in each operand: places are from there.
  __device__ __forceinline__ void* const* data() const { return memory_.data; }

  // That of the gradient is by its own numbering.
  __device__ __forceinline__ At place(int element) const {
    const Position position = by_row(element);
    At at;
#pragma unroll
    for (int k = 0; k < kOperands; ++k) at.offset[k] = offset(k, position);
    if (grad_crosses()) at.offset[kGrad] = offset(kGrad, by_column(element));
    return at;
  }

  // Whether the gradient has a numbering of its own, and its elements in shared memory: by that numbering,
  // and by the others'.
  __device__ __forceinline__ bool grad_crosses() const { return memory_.grad_crosses; }
  __device__ __forceinline__ T& own_grad(int element) const { return staged(by_column(element)); }
  __device__ __forceinline__ T& grad(int element) const { return staged(by_row(element)); }

 private:
  struct Position {
    int row, column;
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
  __device__ __forceinline__ T& staged(const Position& at) const {
    return memory_.grad[at.column * (memory_.rows | 1) + at.row];
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
      describe_operand(k, offset, down, strides[layout_.dims - 1]);
      if (k == 0) describe(blocks, static_cast<int>(size.rows), static_cast<int>(size.columns));
    }
  }
  __device__ void describe_operand(int k, int64_t start, int64_t down, int64_t along) {
    void* const data =
        k == kGrad ? launch_.grads[chunk_.tensor].data : launch_.tensors[chunk_.tensor].data[k];
    memory_.data[k] = static_cast<char*>(data) + start * Body::element_size(k);
    memory_.shift[0][k] = 0;
    memory_.stride[k][0] = static_cast<int>(down);
    memory_.stride[k][1] = static_cast<int>(along);
    const auto magnitude = [](int64_t stride) { return stride < 0 ? -stride : stride; };
    if (k == kGrad) memory_.grad_crosses = down != 0 && magnitude(down) < magnitude(along);
  }
  __device__ void describe(int blocks, int rows, int columns) {
    memory_.rows = blocks * rows;
    memory_.columns = columns;
    memory_.elements = blocks * rows * columns;
    memory_.by_rows = Divisor(blocks * rows);
    memory_.by_columns = Divisor(columns);
    memory_.by_block_rows = Divisor(rows);
  }

  const Launch& launch_;
  const Chunk& chunk_;
  const BlockLayout& layout_;
  Memory& memory_;
};

// Calls run(b, element) for the elements of a tile that a thread has.
template <class Tiles, class Run>
__device__ __forceinline__ void for_batch(const Tiles& tiles, Run run) {
#pragma unroll
  for (int b = 0; b < kTileBatch; ++b) {
    const int element = b * kThreads + static_cast<int>(threadIdx.x);
    if (element < tiles.elements()) run(b, element);
  }
}

// The same with the last element where there is none: without branches, for what may be done twice.
template <class Tiles, class Run>
__device__ __forceinline__ void for_whole_batch(const Tiles& tiles, Run run) {
  const int last = tiles.elements() - 1;
#pragma unroll
  for (int b = 0; b < kTileBatch; ++b) {
    const int element = b * kThreads + static_cast<int>(threadIdx.x);
    run(b, element < last ? element : last);
  }
}

// Has the places that are worked out after it worked out anew. To keep those of a batch while it is on its
// way from memory takes registers, and with them threads that would wait meanwhile for other batches.
__device__ __forceinline__ void forget_places() { asm volatile("" ::: "memory"); }

// Reads a thread's elements, and multiplies the gradient in memory where that is asked for. What a thread
// reads is asked for before it is waited for.
template <class Body, class Tiles, class Read>
__device__ __forceinline__ void read_tile(const Body& body, const Tiles& tiles, Read (&read)[kTileBatch]) {
  for_whole_batch(tiles, [&](int b, int element) {
    const auto at = tiles.place(element);
    body.load_rest(at, read[b]);
    body.load_grad(at, read[b]);
  });
  forget_places();
  if (body.scales) {
    for_batch(tiles, [&](int b, int element) { body.scale_grad(tiles.place(element), read[b].grad); });
  }
  if (!tiles.grad_crosses()) return;
  for_batch(tiles, [&](int b, int element) { tiles.own_grad(element) = read[b].grad[0]; });
  __syncthreads();
  // The last element alone is its owner's, who may already write it.
  for_batch(tiles, [&](int b, int element) { read[b].grad[0] = tiles.grad(element); });
}

// Writes the gradient, where `body` stores any, and waits for all threads of the block.
template <class Body, class Tiles, class Read>
__device__ __forceinline__ void write_tile(const Body& body, const Tiles& tiles, Read (&read)[kTileBatch]) {
  const bool crosses = tiles.grad_crosses() && body.stores;
  if (crosses) for_batch(tiles, [&](int b, int element) { tiles.grad(element) = read[b].grad[0]; });
  __syncthreads();
  if (crosses) for_batch(tiles, [&](int b, int element) { read[b].grad[0] = tiles.own_grad(element); });
  if (body.stores) {
    for_batch(tiles, [&](int b, int element) { body.store_grad(tiles.place(element), read[b]); });
  }
}

}  // namespace fusedstep::cuda
