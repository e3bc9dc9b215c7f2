// Walks a chunk by a block of threads: in whole words where all operands form one flat range that is aligned
// for them, otherwise element by element.
#pragma once
#include <type_traits>

#include "cuda_kernels/tiles.cuh"
#include "src/core/reduction.h"

namespace fusedstep::cuda {

// The words that a thread asks for of each stream before it waits, in a pass that reads `streams` of them.
constexpr int batch_of(int streams) { return streams > 2 ? 1 : 2; }

// The blocks of threads that share a chunk in a pass without sums: small ones, so that all of the GPU is at
// work to the end. In tiles it makes no difference: the fewer blocks.
constexpr int kTilesOfPart = 4;
template <Access kAccess, class Body>
constexpr int kParts = kChunkElements / (kAccess == kInWords
                                             ? kThreads * Body::kWidth * batch_of(Body::kReads)
                                             : kTileElements * kTilesOfPart);

// The number of elements that are worked on together.
template <int N>
using Width = std::integral_constant<int, N>;

// Goes over one part of a chunk in words. `body.load(width, place)` reads elements, `body.finish(width,
// place, read)` does the rest: what a thread reads is asked for before it is waited for. Calls between() when
// the first elements are on their way.
struct NothingMore {
  __device__ __forceinline__ void operator()() const {}
};
template <class Body, class Between = NothingMore>
__device__ __forceinline__ void for_words(const Body& body, const Chunk& chunk, int part,
                                          const Between& between = {}) {
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kWidth = Body::kWidth, kBatch = batch_of(Body::kReads);
  constexpr int64_t kPartElements = kThreads * kWidth * kBatch;
  using Read = decltype(body.load(Width<kWidth>(), Body::At::flat(0)));
  const int64_t begin = chunk.begin + part * kPartElements, last = begin + kPartElements;
  const int64_t end = last < chunk.end ? last : chunk.end;
  if (begin >= end) return;
  const auto index = [&](int b) { return begin + (b * kThreads + thread) * kWidth; };
  Read read[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    if (index(b) + kWidth <= end) read[b] = body.load(Width<kWidth>(), Body::At::flat(index(b)));
  }
  between();
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    if (index(b) + kWidth <= end) body.finish(Width<kWidth>(), Body::At::flat(index(b)), read[b]);
  }
  if (const int64_t i = end - (end - begin) % kWidth + thread; i < end) {
    const auto at = Body::At::flat(i);
    body.finish(Width<1>(), at, body.load(Width<1>(), at));
  }
}

template <class Body, class Tiles, class Batch>
__device__ __forceinline__ void go_over_tile(const Body& body, const Tiles& tiles, const Batch& batch,
                                             bool clears_only) {
  if (!clears_only) {
    typename Body::template Read<1> read[kTileBatch];
    read_tile(body, tiles, batch, read);
    batch.each([&](int b, int element) { body.work(batch.place(b, element), read[b]); });
  }
  if (body.clears) {
    batch.each([&](int b, int element) { body.template clear_grad<1>(batch.place(b, element)); });
  }
}

// Walks a chunk tile by tile: reads the gradient, calls `body.work(place, read)`, then clears the gradient if
// asked. With `clears_only` the walk does nothing but clear.
template <class Body>
__device__ __forceinline__ void for_tiles(const Launch& launch, const Chunk& chunk, int part,
                                          bool clears_only) {
  __shared__ typename Tiles<Body>::Memory memory;
  Tiles<Body> tiles(launch, chunk, memory);
  const Body of_tensor(launch, chunk);
  for (int tile = part; tiles.has(tile); tile += kParts<kByElement, Body>) {
    if (tile != part) __syncthreads();
    tiles.enter(tile);
    Body body = of_tensor;
    body.start_at(tiles.data());
    if (tiles.is_regular()) {
      go_over_tile(body, tiles, RegularBatch(tiles), clears_only);
    } else {
      go_over_tile(body, tiles, AnyBatch(tiles), clears_only);
    }
  }
}

// The place of an element by rows and columns.
__device__ __forceinline__ int64_t offset_in_order(const BlockLayout& layout, int operand, int64_t element) {
  const int64_t* const strides = layout.strides + operand * layout.dims;
  int64_t offset = 0;
#pragma unroll 1
  for (int d = layout.dims - 1; d >= 0; --d) {
    offset += element % layout.sizes[d] * strides[d];
    element /= layout.sizes[d];
  }
  return offset;
}

// Calls run(j, offset) for `count` elements from `first` on.
template <class Run>
__device__ __forceinline__ void for_in_order(const BlockLayout& layout, int operand, int64_t first, int count,
                                             const Run& run) {
  int64_t offset = first, stride = 1, left = count;
  if (layout.sizes != nullptr) {
    stride = layout.strides[(operand + 1) * layout.dims - 1];
    left = 0;
  }
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    if (left == 0) {  // of this row
      const int64_t columns = layout.sizes[layout.dims - 1];
      offset = offset_in_order(layout, operand, first + j);
      left = columns - (first + j) % columns;
    }
    run(j, offset);
    offset += stride;
    --left;
  }
}

}  // namespace fusedstep::cuda
