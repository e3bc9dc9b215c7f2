// The order in which norms are summed. It decides their last bits, so it is the same on every instruction
// set, on a GPU, and for every number of threads.
//
// A tensor consists of chunks, a chunk of spans of elements, a span of segments. Squares are added up
//   1. in each lane of a segment: element i of a span is in lane i % kLanes. The sum is a float for norms
//      that a rule takes of floats, and a double for the norm of gradients, which a caller sees;
//   2. in each lane of a chunk, segment by segment, in double like all that follows;
//   3. over a chunk's lanes, in a tree: the upper half is added to the lower;
//   4. over a tensor's chunks: in order within groups of kPartialsGroup, then group by group.
// Segments give a GPU short sums to share out. Groups do the same for tensors of thousands of chunks.
#pragma once
#include <cstdint>
#include <limits>
#include <type_traits>

#include "fusedstep/vocabulary.h"

namespace fusedstep {

constexpr int64_t kChunkElements = 4096;
constexpr int64_t kSegmentElements = 128;
constexpr int kLanes = 16;
constexpr int kPartialsGroup = 16;

// The type of a number, or of those in a register.
template <class V>
struct NumberIn {
  using Type = V;
};
template <class V>
requires requires { typename V::Number; }
struct NumberIn<V> {
  using Type = typename V::Number;
};

// The sum of a chunk's lanes. It is in the first of them, too.
FUSEDSTEP_FN double sum_lanes(double (&lanes)[kLanes]) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// Adds a square to a sum. A sum of floats has the range of a float.
template <class V>
FUSEDSTEP_FN V with_square(const V& sum, const V& x) {
  using rules::mul_add;
  if constexpr (std::is_same_v<typename NumberIn<V>::Type, float>) {
    return mul_add(x, x, sum);
  } else {
    return sum + x * x;
  }
}

// A sum of squares of floats between these has lost nothing that matters to the range of a float: no square
// has become infinite, and those that have become zero or denormal are at most 2^-27 of the sum.
constexpr float kLeastSum = 0x1p-96f, kMostSum = std::numeric_limits<float>::max();
FUSEDSTEP_FN bool is_in_range(float sum) { return sum >= kLeastSum && sum <= kMostSum; }  // false for NaN
FUSEDSTEP_FN bool is_in_range(double) { return true; }

// Sums the squares of a lane's elements in a segment: `count` elements that lie kLanes apart. A sum in float
// is a fourth of the work and rounds eight times at most; where it leaves the range, the sum is done in
// double.
template <class Sum, class T>
FUSEDSTEP_FN double sum_squares(const T* element, int count) {
  Sum sum = 0;
  for (int i = 0; i < count; ++i) sum = with_square(sum, static_cast<Sum>(element[i * kLanes]));
  if constexpr (!std::is_same_v<Sum, double>) {
    if (!is_in_range(sum)) return sum_squares<double>(element, count);
  }
  return sum;
}

// The number of elements that a lane has in a segment of `count`.
FUSEDSTEP_FN int lane_elements(int count, int lane) { return (count - lane + kLanes - 1) / kLanes; }

}  // namespace fusedstep
