// The order in which norms are summed. It is part of their result, and so the same on every instruction set,
// on a GPU, and for every number of threads.
//
// A tensor is worked on in chunks, a chunk in spans of elements, a span in segments. Sums are in double:
//   1. of a segment, over kLanes lanes: element i of a span is in lane i % kLanes;
//   2. of a chunk, lane by lane: its segments in their order;
//   3. of the chunk's lanes: in a tree, the upper half onto the lower;
//   4. of a tensor's chunks: in groups of kPartialsGroup, each in order, and then the groups.
// Segments give a GPU short sums to share out, groups do the same for tensors of thousands of chunks.
//
// The square of a float is exact in double: a lane's sum is the same with and without a fused multiply-add.
#pragma once
#include <cstdint>

namespace fusedstep {

constexpr int64_t kChunkElements = 4096;
constexpr int64_t kSegmentElements = 128;
constexpr int kLanes = 16;
constexpr int kPartialsGroup = 16;

}  // namespace fusedstep
