#include "bench/limit/passes.h"

#define FUSEDSTEP_TEXT_OF(name) #name
#define FUSEDSTEP_TEXT(name) FUSEDSTEP_TEXT_OF(name)

namespace fusedstep::limit::FUSEDSTEP_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kRegister = 64;
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif
constexpr int kLine = 64;

template <int kBytes>
struct Word {
  using Type [[gnu::vector_size(kBytes), gnu::may_alias, gnu::aligned(2)]] = uint16_t;
};

template <Streams kStreams, int kBytes>
inline __attribute__((always_inline)) void move(unsigned char* const (&data)[kMaxStreams], int64_t at) {
  using Type = typename Word<kBytes>::Type;
  Type loaded[kMaxStreams], key{};
  for (int i = 0; i < kMaxStreams; ++i) {
    if (kStreams.reads >> i & 1) loaded[i] = *reinterpret_cast<const Type*>(data[i] + at);
  }
  for (int i = 0; i < kMaxStreams; ++i) {
    if ((kStreams.reads & ~kStreams.writes) >> i & 1) key ^= loaded[i];
  }
  for (int i = 0; i < kMaxStreams; ++i) {
    if (kStreams.writes >> i & 1) *reinterpret_cast<Type*>(data[i] + at) = loaded[i] ^ key;
  }
}

template <Streams kStreams, bool kPrefetch>
inline __attribute__((always_inline)) void run(unsigned char* const* streams, int64_t begin, int64_t end,
                                               int64_t ahead) {
  unsigned char* data[kMaxStreams];
  for (int i = 0; i < kMaxStreams; ++i) data[i] = kStreams.reads >> i & 1 ? streams[i] : nullptr;
  int64_t at = begin;
  for (; at + kLine <= end; at += kLine) {
    if constexpr (kPrefetch) {
      for (int i = 0; i < kMaxStreams; ++i) {
        if (kStreams.reads >> i & 1) __builtin_prefetch(data[i] + at + ahead);
      }
    }
    for (int part = 0; part < kLine; part += kRegister) move<kStreams, kRegister>(data, at + part);
  }
  for (; at + 16 <= end; at += 16) move<kStreams, 16>(data, at);
  for (; at < end; at += 2) move<kStreams, 2>(data, at);
}

template <int kStates, int kPass>
void pass(unsigned char* const* streams, int64_t begin, int64_t end, int64_t ahead) {
  constexpr Streams kStreams = streams_of(static_cast<PassId>(kPass), kStates);
  if (ahead > 0) {
    run<kStreams, true>(streams, begin, end, ahead);
  } else {
    run<kStreams, false>(streams, begin, end, 0);
  }
}

#define FUSEDSTEP_PASSES(states)                                                       \
  {                                                                                    \
    pass<states, kUpdate>, pass<states, kAccumulateStore>, pass<states, kApplyStored>, \
        pass<states, kAccumulate>, pass<states, kApplyRecompute>                       \
  }

}  // namespace

const PassTable kTable = {FUSEDSTEP_TEXT(FUSEDSTEP_ISA),
                          {FUSEDSTEP_PASSES(0), FUSEDSTEP_PASSES(1), FUSEDSTEP_PASSES(2), FUSEDSTEP_PASSES(3),
                           FUSEDSTEP_PASSES(4)}};

}  // namespace fusedstep::limit::FUSEDSTEP_ISA
