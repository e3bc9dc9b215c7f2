// The loops of the limit: what a step reads and writes, without its maths. Compiled once per instruction set.
#pragma once
#include <cstdint>

namespace fusedstep::limit {

// Streams of a step, in this order: weight, gradient, states.
enum Stream : int { kWeight, kGrad, kFirstState };
constexpr int kMaxStates = 4;
constexpr int kMaxStreams = kFirstState + kMaxStates;

// An elementwise step is one pass. A two-phase step is two, in one of three ways: the update is kept in the
// gradient's memory between them (store, stored); or computed again from moments that the first has written;
// or the first only reads, and the second does all.
enum PassId : int { kUpdate, kAccumulateStore, kApplyStored, kAccumulate, kApplyRecompute, kRead, kPasses };

// Bit i stands for stream i.
struct Streams {
  uint32_t reads, writes;
};

constexpr Streams streams_of(PassId pass, int states) {
  constexpr uint32_t weight = 1u << kWeight, grad = 1u << kGrad;
  const uint32_t moments = ((1u << states) - 1) << kFirstState;
  const uint32_t all = weight | grad | moments;
  switch (pass) {
    case kUpdate:
      return {all, weight | moments};
    case kAccumulateStore:
      return {all, grad | moments};
    case kApplyStored:
      return {weight | grad, weight};
    case kAccumulate:
      return {all, moments};
    case kApplyRecompute:
      return {weight | moments, weight};
    default:
      return {all, 0};
  }
}

// Bytes of a stream for each byte of the gradient's: one or two. Two are for states of a wider type than the
// gradient's, and for a weight of which every second element is updated: its lines are moved whole.
struct Strides {
  int weight, state;
};
constexpr int kStrideCombinations = 4;
constexpr int index_of(Strides strides) { return (strides.weight - 1) + 2 * (strides.state - 1); }
constexpr Strides strides_at(int index) { return {index % 2 + 1, index / 2 + 1}; }
constexpr int stride_of(Strides strides, int stream) {
  return stream == kWeight ? strides.weight : stream == kGrad ? 1 : strides.state;
}

// Goes over bytes [begin, end) of the gradient and what belongs to them in the other streams; `begin` is a
// multiple of a cache line, `end` of two bytes. Each word that is written becomes its exclusive or with all
// those at its place in streams that are only read: so no load can be left out, and what was touched can be
// read off. A pass that writes nothing returns the exclusive or of all it has read, in words of two bytes.
// Prefetches `ahead` bytes of the gradient ahead unless that is 0.
using Pass = uint16_t (*)(unsigned char* const* data, int64_t begin, int64_t end, int64_t ahead);

struct PassTable {
  const char* isa;
  Pass pass[kStrideCombinations][kMaxStates + 1][kPasses];
};

namespace base {
extern const PassTable kTable;
}
namespace avx2 {
extern const PassTable kTable;
}
namespace avx512 {
extern const PassTable kTable;
}

}  // namespace fusedstep::limit
