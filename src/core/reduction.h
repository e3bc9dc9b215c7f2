// The order in which norms are summed. It is part of their result, and so the same on every instruction set,
// on a GPU, and for every number of threads.
//
// A tensor is worked on in chunks, a chunk in spans of elements, a span in segments:
//   1. of a segment, over kLanes lanes: element i of a span is in lane i % kLanes. A lane's sum is in float
//   where
//      a rule's norms are of floats, and in double for the norm of gradients, which a caller sees;
//   2. of a chunk, lane by lane: its segments in their order, in double as all that follows;
//   3. of the chunk's lanes: in a tree, the upper half onto the lower;
//   4. of a tensor's chunks: in groups of kPartialsGroup, each in order, and then the groups.
// Segments give a GPU short sums to share out, groups do the same for tensors of thousands of chunks.
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

// A sum with one more square. Of floats it has the range of a float.
template <class V>
FUSEDSTEP_FN V with_square(const V& sum, const V& x) {
  using rules::mul_add;
  if constexpr (std::is_same_v<typename NumberIn<V>::Type, float>) {
    return mul_add(x, x, sum);
  } else {
    return sum + x * x;
  }
}

// A sum of squares of floats has lost nothing that matters to the range of a float if it is between these: no
// square is infinite, and those that are zero or denormal are 2^-27 of it at most.
constexpr float kLeastSum = 0x1p-96f, kMostSum = std::numeric_limits<float>::max();
FUSEDSTEP_FN bool is_in_range(float sum) { return sum >= kLeastSum && sum <= kMostSum; }  // false for NaN
FUSEDSTEP_FN bool is_in_range(double) { return true; }

// The sum of the squares of a lane's elements in a segment, `count` elements that lie kLanes apart. In float,
// a fourth of the work for eight roundings at most, unless that has not the range; then in double.
template <class Sum, class T>
FUSEDSTEP_FN double sum_squares(const T* element, int count) {
  Sum sum = 0;
  for (int i = 0; i < count; ++i) sum = with_square(sum, static_cast<Sum>(element[i * kLanes]));
  if constexpr (!std::is_same_v<Sum, double>) {
    if (!is_in_range(sum)) return sum_squares<double>(element, count);
  }
  return sum;
}

// How many of the elements of a segment are in a lane.
FUSEDSTEP_FN int lane_elements(int count, int lane) { return (count - lane + kLanes - 1) / kLanes; }

}  // namespace fusedstep
