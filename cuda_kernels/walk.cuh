// How a block of threads goes over a chunk: whole words where all operands form one flat range that is
// aligned for them, otherwise element by element, by the offsets that the layout gives.
#pragma once
#include <type_traits>

#include "cuda_kernels/launch.cuh"
#include "src/reduction.h"

namespace fusedstep::cuda {

// The words that a thread asks for of each stream before it waits, in a pass that reads `streams` of them.
constexpr int batch_of(int streams) { return streams > 2 ? 1 : 2; }

// The blocks of threads that share a chunk in a pass without sums: small ones, so that all of the GPU is at
// work to the end.
template <Access kAccess, class Body>
constexpr int kParts = kChunkElements /
                       (kThreads * (kAccess == kInWords ? Body::kWidth * batch_of(Body::kReads) : 4));

// The number of elements that are worked on together.
template <int N>
using Width = std::integral_constant<int, N>;

// Where an element is in each operand, in elements.
template <int kOperands>
struct Place {
  int64_t offset[kOperands];

  static __device__ __forceinline__ Place flat(int64_t i) {
    Place place;
#pragma unroll
    for (int k = 0; k < kOperands; ++k) place.offset[k] = i;
    return place;
  }
};

// The segments of a chunk, in the order of src/reduction.h.
template <int kOperands>
class Segments {
 public:
  __device__ Segments(const BlockLayout& layout, const Chunk& chunk) : layout_(layout), chunk_(chunk) {
    const int64_t units = chunk.end - chunk.begin;
    if (is_flat()) {
      spans_ = 1;
      span_elements_ = units;
    } else if (layout.long_rows) {
      spans_ = units * layout.extent[0];
      span_elements_ = layout.extent[1];
    } else {
      blocks_per_pack_ = layout.blocks_per_pack();
      spans_ = (units + blocks_per_pack_ - 1) / blocks_per_pack_;
      span_elements_ = blocks_per_pack_ * layout.extent[0] * layout.extent[1];
    }
    per_span_ = (span_elements_ + kSegmentElements - 1) / kSegmentElements;
  }

  // Some of them may be empty.
  __device__ int64_t count() const { return spans_ * per_span_; }

  // Elements [first, last) of a span.
  class Segment {
   public:
    int64_t first, last;

    __device__ Place<kOperands> place(int64_t i) const {
      if (segments_.is_flat()) return Place<kOperands>::flat(segments_.chunk_.begin + i);
      const BlockLayout& layout = segments_.layout_;
      if (layout.long_rows) return at(block_, row_, i);
      if (segments_.blocks_per_pack_ == 1) return at(block_, i / block_.columns, i % block_.columns);
      const int64_t block_elements = layout.extent[0] * layout.extent[1], rest = i % block_elements;
      const Block block = locate(layout, kOperands, first_block_ + i / block_elements);
      return at(block, rest / block.columns, rest % block.columns);
    }

   private:
    friend class Segments;
    __device__ explicit Segment(const Segments& segments) : segments_(segments) {}

    __device__ Place<kOperands> at(const Block& block, int64_t row, int64_t column) const {
      const BlockLayout& layout = segments_.layout_;
      Place<kOperands> place;
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        const int64_t* strides = layout.strides + (k + 1) * layout.dims - 2;
        place.offset[k] = block.offset[k] + row * strides[0] + column * strides[1];
      }
      return place;
    }

    const Segments& segments_;
    Block block_;  // of the span, or its first one
    int64_t row_ = 0, first_block_ = 0;
  };

  __device__ Segment operator[](int64_t s) const {
    Segment segment(*this);
    const int64_t span = s / per_span_, elements = enter(segment, span);
    segment.first = s % per_span_ * kSegmentElements;
    const int64_t last = segment.first + kSegmentElements;
    segment.last = last < elements ? last : elements;
    return segment;
  }

 private:
  __device__ bool is_flat() const { return layout_.sizes == nullptr; }

  // Returns the number of elements of the span.
  __device__ int64_t enter(Segment& segment, int64_t span) const {
    if (is_flat()) return span_elements_;
    if (layout_.long_rows) {
      segment.block_ = locate(layout_, kOperands, chunk_.begin + span / layout_.extent[0]);
      segment.row_ = span % layout_.extent[0];
      return segment.row_ < segment.block_.rows ? segment.block_.columns : 0;
    }
    const int64_t first = chunk_.begin + span * blocks_per_pack_, left = chunk_.end - first;
    segment.first_block_ = first;
    if (blocks_per_pack_ > 1) {
      return (left < blocks_per_pack_ ? left : blocks_per_pack_) * layout_.extent[0] * layout_.extent[1];
    }
    segment.block_ = locate(layout_, kOperands, first);
    return segment.block_.rows * segment.block_.columns;
  }

  const BlockLayout layout_;
  const Chunk chunk_;
  int64_t spans_, span_elements_, per_span_, blocks_per_pack_ = 1;
};

// Goes over one part of a chunk. `body.load(width, place)` reads elements, `body.finish(width, place, read)`
// does the rest: what a thread reads is asked for before it is waited for.
template <Access kAccess, class Body>
__device__ __forceinline__ void for_part(const Body& body, const BlockLayout& layout, const Chunk& chunk,
                                         int part) {
  const int thread = static_cast<int>(threadIdx.x);
  if constexpr (kAccess == kInWords) {
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
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (index(b) + kWidth <= end) body.finish(Width<kWidth>(), Body::At::flat(index(b)), read[b]);
    }
    if (const int64_t i = end - (end - begin) % kWidth + thread; i < end) {
      const auto at = Body::At::flat(i);
      body.finish(Width<1>(), at, body.load(Width<1>(), at));
    }
  } else {
    const Segments<Body::kOperands> segments(layout, chunk);
    constexpr int kOf = kParts<kAccess, Body>;
    const int64_t first = segments.count() * part / kOf, last = segments.count() * (part + 1) / kOf;
    for (int64_t s = first + thread / kLanes; s < last; s += kThreads / kLanes) {
      const auto segment = segments[s];
      for (int64_t i = segment.first + thread % kLanes; i < segment.last; i += kLanes) {
        const auto at = segment.place(i);
        body.finish(Width<1>(), at, body.load(Width<1>(), at));
      }
    }
  }
}

}  // namespace fusedstep::cuda
