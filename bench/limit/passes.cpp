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
constexpr int kMaxStride = 2;

template <int kBytes>
struct Word {
  using Type [[gnu::vector_size(kBytes), gnu::may_alias, gnu::aligned(2)]] = uint16_t;
};

template <class Type>
uint16_t fold(const Type& word) {
  uint16_t folded = 0;
  for (unsigned i = 0; i < sizeof(Type) / sizeof(uint16_t); ++i) folded ^= word[i];
  return folded;
}

// The word `at` bytes from a line of the gradient that begins at `line`. A stream with a stride of two has
// another one `apart` bytes behind. What is read and not written is added to `sum`.
template <Streams kStreams, Strides kStrides, int kBytes, class Sum>
inline __attribute__((always_inline)) void move(unsigned char* const (&data)[kMaxStreams], int64_t line,
                                                int64_t at, int64_t apart, Sum& sum) {
  using Type = typename Word<kBytes>::Type;
  Type loaded[kMaxStreams][kMaxStride], key{};
  for (int i = 0; i < kMaxStreams; ++i) {
    const int stride = stride_of(kStrides, i);
    for (int k = 0; k < stride; ++k) {
      if (kStreams.reads >> i & 1) {
        loaded[i][k] = *reinterpret_cast<const Type*>(data[i] + line * stride + at + k * apart);
      }
      if ((kStreams.reads & ~kStreams.writes) >> i & 1) key ^= loaded[i][k];
    }
  }
  for (int i = 0; i < kMaxStreams; ++i) {
    const int stride = stride_of(kStrides, i);
    for (int k = 0; k < stride; ++k) {
      if (kStreams.writes >> i & 1) {
        *reinterpret_cast<Type*>(data[i] + line * stride + at + k * apart) = loaded[i][k] ^ key;
      }
    }
  }
  if constexpr (kStreams.writes == 0) sum ^= key;
}

template <Streams kStreams, Strides kStrides, bool kPrefetch>
inline __attribute__((always_inline)) uint16_t run(unsigned char* const* streams, int64_t begin, int64_t end,
                                                   int64_t ahead) {
  unsigned char* data[kMaxStreams];
  for (int i = 0; i < kMaxStreams; ++i) data[i] = kStreams.reads >> i & 1 ? streams[i] : nullptr;
  typename Word<kRegister>::Type sum{};
  int64_t line = begin;
  for (; line + kLine <= end; line += kLine) {
    if constexpr (kPrefetch) {
      for (int i = 0; i < kMaxStreams; ++i) {
        const int stride = stride_of(kStrides, i);
        for (int k = 0; k < stride; ++k) {
          if (kStreams.reads >> i & 1) __builtin_prefetch(data[i] + (line + ahead) * stride + k * kLine);
        }
      }
    }
    for (int at = 0; at < kLine; at += kRegister) {
      move<kStreams, kStrides, kRegister>(data, line, at, kLine, sum);
    }
  }
  const int64_t rest = end - line;
  typename Word<16>::Type sum_of_words{};
  typename Word<2>::Type sum_of_rest{};
  int64_t at = 0;
  for (; at + 16 <= rest; at += 16) move<kStreams, kStrides, 16>(data, line, at, rest, sum_of_words);
  for (; at < rest; at += 2) move<kStreams, kStrides, 2>(data, line, at, rest, sum_of_rest);
  return kStreams.writes == 0 ? fold(sum) ^ fold(sum_of_words) ^ fold(sum_of_rest) : 0;
}

template <int kStridesIndex, int kStates, int kPass>
uint16_t pass(unsigned char* const* streams, int64_t begin, int64_t end, int64_t ahead) {
  constexpr Streams kStreams = streams_of(static_cast<PassId>(kPass), kStates);
  constexpr Strides kStrides = strides_at(kStridesIndex);
  return ahead > 0 ? run<kStreams, kStrides, true>(streams, begin, end, ahead)
                   : run<kStreams, kStrides, false>(streams, begin, end, 0);
}

#define FUSEDSTEP_PASSES(strides, states)                                        \
  {                                                                              \
    pass<strides, states, kUpdate>, pass<strides, states, kAccumulateStore>,     \
        pass<strides, states, kApplyStored>, pass<strides, states, kAccumulate>, \
        pass<strides, states, kApplyRecompute>, pass<strides, states, kRead>     \
  }
#define FUSEDSTEP_STATES(strides)                                                             \
  {                                                                                           \
    FUSEDSTEP_PASSES(strides, 0), FUSEDSTEP_PASSES(strides, 1), FUSEDSTEP_PASSES(strides, 2), \
        FUSEDSTEP_PASSES(strides, 3), FUSEDSTEP_PASSES(strides, 4)                            \
  }

}  // namespace

const PassTable kTable = {
    FUSEDSTEP_TEXT(FUSEDSTEP_ISA),
    {FUSEDSTEP_STATES(0), FUSEDSTEP_STATES(1), FUSEDSTEP_STATES(2), FUSEDSTEP_STATES(3)}};

}  // namespace fusedstep::limit::FUSEDSTEP_ISA
