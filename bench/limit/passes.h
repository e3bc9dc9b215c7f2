// The loops of the limit: what a step reads and writes, without its maths. Compiled once per instruction set.
#pragma once
#include <cstdint>

namespace fusedstep::limit {

// Streams of a step, in this order: weight, gradient, states.
enum Stream : int { kWeight, kGrad, kFirstState };
constexpr int kMaxStates = 4;
constexpr int kMaxStreams = kFirstState + kMaxStates;

// An elementwise step is one pass; a two-phase step is one of two pairs, as its update is kept in the
// gradient's memory between them or computed again.
enum PassId : int { kUpdate, kAccumulateStore, kApplyStored, kAccumulate, kApplyRecompute, kPasses };

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
    default:
      return {weight | moments, weight};
  }
}

// Goes over bytes [begin, end) of the streams; `begin` is a multiple of a cache line, `end` of two bytes.
// Every stream that is written becomes its exclusive or with all those that are only read: so no load can be
// left out, and what was touched can be read off. Prefetches `ahead` bytes ahead unless that is 0.
using Pass = void (*)(unsigned char* const* data, int64_t begin, int64_t end, int64_t ahead);

struct PassTable {
  const char* isa;
  Pass pass[kMaxStates + 1][kPasses];
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
