// Runs an elementwise rule where its states are codes, or the weight keeps its value in a code: both are
// decoded in registers. The new states of a block stay in the first-level cache until their absolute maximum
// is known. With AVX-512 a loop steps a block and encodes the block before it, so that no loop waits for a
// maximum.
#pragma once
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>

#include "cpu_kernels/coded.h"
#include "cpu_kernels/elementwise.h"
#include "cpu_kernels/weight_codes.h"
#include "fusedstep/rules/specs.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

#if defined(__AVX2__)  // and with it AVX-512

// Tells if the k-th state that a rule has with its flags may be negative.
template <class Rule>
struct SignOf;
template <template <unsigned> class Rule, unsigned kFlags>
struct SignOf<Rule<kFlags>> {
  static constexpr bool is_signed(int k) {
    for (const rules::StateSpec& state : Rule<kFlags>::kAllStates) {
      if (state.flag != 0 && (kFlags & state.flag) == 0) continue;
      if (k-- == 0) return state.sign == rules::Sign::kAny;
    }
    return true;
  }
};

// A state, and TensorTask::rounding.
struct StateOfStep {
  const CodedState& state;
  float rounding;
};

// A state's elements of one block.
template <Storage kStorage, bool kSigned>
struct StateBlock {
  static constexpr int kMost = 256;  // elements
  static constexpr int64_t kPerByte = kStorage == Storage::kInt4 ? 2 : 1;

  CodeMap map;
  CodeTables<kStorage, kSigned> tables;
  uint8_t* codes;
  float* absmax;
  float scale;
  uint8_t* closed_codes;  // and `inverse`: of the block before
  float inverse;
  typename CodeRegister::Bits largest;
  alignas(64) float fresh[kMost];

  explicit StateBlock(const StateOfStep& of) : map(rounding_by(*of.state.map, of.rounding)), tables(map) {}

  void go_to(const Span& span, int k, int64_t begin) {
    codes = static_cast<uint8_t*>(span.operand[kFirstState + k]) + begin / kPerByte;
    absmax = span.coded[k].absmax + ((span.first + begin) >> map.block_shift);
    scale = *absmax / map.top;
    largest = typename CodeRegister::Bits{};
  }
  // Prefetches a line of codes at a time, as many elements ahead as in an array of floats. Where kernels do
  // not prefetch into the second level, the processor's own prefetchers follow codes better alone.
  template <class V>
  FUSEDSTEP_FN void prefetch(int64_t i, const PrefetchDistance& ahead) const {
    constexpr int64_t kSmaller = sizeof(float) * kPerByte;
    if (i % (kLine * kPerByte) != 0 || ahead.second == 0) return;
    prefetch_ahead<Reach::kFar>(codes, i / kPerByte, 1, {ahead.first / kSmaller, ahead.second / kSmaller});
  }
  // The number of element i, or those from there on.
  template <class V>
  FUSEDSTEP_FN V decode(int64_t i) const {
    if constexpr (requires(V group) { group.part; }) {
      return V::of([&](int k) { return decode<Pack<float>>(i + k * Pack<float>::size()); });
    } else if constexpr (requires { V::size(); }) {
      return V(CodeRegister::times(CodeRegister::decode(tables, codes + i / kPerByte), scale));
    } else {
      return value_of<kStorage>(map, code_at<kStorage>(codes, i)) * scale;
    }
  }
  template <class V>
  FUSEDSTEP_FN void keep(int64_t i, const V& x) {
    store(fresh, i, x);
    if constexpr (requires { x.part; }) {
#pragma GCC unroll 4
      for (const auto& part : x.part) note(part);
    } else if constexpr (requires { V::size(); }) {
      note(x);
    }
  }
  // Finds the block's absolute maximum. The block's numbers are encoded while the numbers of the next block
  // take their place.
  void close(int64_t count, int64_t in_registers) {
    int32_t most = CodeRegister::largest_of<kSigned>(largest);
    if (!kSigned && most < 0) most = largest_magnitude(fresh, in_registers);  // a NaN or a zero has a sign
    for (int64_t i = in_registers; i < count; ++i) most = std::max(most, bits_of(fresh[i]) & kMagnitudeBits);
    const BlockScale found = scale_of(most, map.top);
    *absmax = found.absmax;
    inverse = found.inverse;
    closed_codes = codes;
    if (inverse == 0) std::fill_n(fresh, count, 0.0f);  // every code is that of zero
  }
  // Numbers of the closed block, as codes: a group from the i-th on, or all in [from, to).
  FUSEDSTEP_FN void encode_closed_group(int64_t i) const {
    encode_group<kStorage, kSigned>(tables, fresh, i, inverse, closed_codes);
  }
  void encode_closed(int64_t from, int64_t to) const {
    encode_shares<kStorage, kSigned>(map, tables, fresh + from, to - from, inverse,
                                     closed_codes + from / kPerByte);
  }

 private:
  FUSEDSTEP_FN void note(const Pack<float>& x) { largest = CodeRegister::larger<kSigned>(largest, x.v); }
};

// The elements of a state that is not in codes.
template <bool kSigned>
struct StateBlock<Storage::kPlain, kSigned> {
  float* first;

  explicit StateBlock(const StateOfStep&) {}

  void go_to(const Span& span, int k, int64_t begin) {
    first = static_cast<float*>(span.operand[kFirstState + k]) + begin;
  }
  template <class V>
  FUSEDSTEP_FN void prefetch(int64_t i, const PrefetchDistance& ahead) const {
    prefetch_ahead<Reach::kFar>(first, i, V::size(), ahead);
  }
  template <class V>
  FUSEDSTEP_FN V decode(int64_t i) const {
    return load<V>(first, i);
  }
  template <class V>
  FUSEDSTEP_FN void keep(int64_t i, const V& x) {
    store(first, i, x);
  }
  void close(int64_t, int64_t) {}
  void encode_closed_group(int64_t) const {}
  void encode_closed(int64_t, int64_t) const {}
};

// Float32 weights, whose values are read and kept as those in a code are.
struct PlainWeight {
  using Stored = float;
  static constexpr bool kHasBeside = false;

  template <class V>
  FUSEDSTEP_FN static V value(const CodedWeight& from, int64_t i) {
    return load<V>(static_cast<const float*>(from.weight), i);
  }
  template <class V>
  FUSEDSTEP_FN static void keep(const CodedWeight& to, int64_t i, const V& value) {
    store(static_cast<float*>(to.weight), i, value);
  }
};

// Calls run(form) with the weight's form. Forms are told apart as a kernel runs: a branch for each group of
// registers costs little, and a loop for each form would be compiled for minutes.
template <Storage kStorage, class Run>
FUSEDSTEP_FN void by_form(WeightCode code, Run run) {
  if (kStorage == Storage::kPlain || code != WeightCode::kPlain) {
    by_weight_code(code, run);
  } else {
    run(PlainWeight());
  }
}

template <class Rule, Storage kStorage, size_t... kState>
void update_blocks(const Span& span, std::index_sequence<kState...>) {
  // Conversions leave the divider time for all roots.
  constexpr int kRegisters = registers_at_once<Rule>(Reach::kNear);
  using Of = Groups<float, float>;
  using Group = std::conditional_t<kStorage == Storage::kPlain, typename Of::template Type<kRegisters>,
                                   typename Of::template Divided<kRegisters>>;
  constexpr bool kAlong = kRegisterBytes == 64;  // with AVX2 registers do not suffice for both
  constexpr int kTogether = kAlong ? CodeRegister::kGroup * CodeRegister::kSize : Group::size();
  const auto scalars = *static_cast<const typename Rule::template Scalars<float>*>(span.scalars);
  const auto grad_factor = static_cast<float>(span.grad_factor);
  const void* const grad = span.operand[kGrad];
  const PrefetchDistance ahead = span.ahead;
  const WeightCode code = span.weight_code;
  CodedWeight weight{span.operand[kWeight], span.operand[kFirstState + sizeof...(kState)], 0, 0};
  std::tuple<StateBlock<kStorage, SignOf<Rule>::is_signed(kState)>...> states(
      StateOfStep{span.coded[kState], span.rounding}...);
  const auto update_at = [&]<class V>(V*, int64_t at, int64_t i) __attribute__((always_inline)) {
    V p, g;
    by_form<kStorage>(
        code, [&]<class F>(F) __attribute__((always_inline)) {
          p = F::template value<V>(weight, at + i);
          g = load<V>(static_cast<const typename F::Stored*>(grad), at + i);
        });
    rules::States<V, Rule::kStates> s{std::get<kState>(states).template decode<V>(i)...};
    update<Rule>(scalars, p, g * V(grad_factor), s);
    by_form<kStorage>(
        code, [&]<class F>(F) __attribute__((always_inline)) { F::keep(weight, at + i, p); });
    (std::get<kState>(states).keep(i, s[kState]), ...);
  };
  const auto prefetch = [&](int64_t at, int64_t i) __attribute__((always_inline)) {
    by_form<kStorage>(
        code, [&]<class F>(F) __attribute__((always_inline)) {
          using Stored = typename F::Stored;
          prefetch_ahead<Reach::kFar>(static_cast<const Stored*>(weight.weight), at + i, Group::size(),
                                      ahead);
          prefetch_ahead<Reach::kFar>(static_cast<const Stored*>(grad), at + i, Group::size(), ahead);
          if constexpr (F::kHasBeside) {
            prefetch_ahead<Reach::kFar>(static_cast<const Stored*>(weight.beside), at + i, Group::size(),
                                        ahead);
          }
        });
    (std::get<kState>(states).template prefetch<Group>(i, ahead), ...);
  };
  const int64_t block = kStorage == Storage::kPlain ? kTileElements : span.coded[0].map->block,
                groups_until = kStorage != Storage::kPlain || Of::are_exact() ? block : 0;
  bool waits = false;  // a closed block, to be encoded
  int64_t count = 0;
  for (int64_t begin = 0; begin < span.count; begin += block) {
    count = std::min(block, span.count - begin);
    const int64_t end = std::min(count, groups_until);
    (std::get<kState>(states).go_to(span, kState, begin), ...);
    weight.range = key_of_range(span.draws, static_cast<uint64_t>(span.first + begin));
    weight.first = static_cast<uint32_t>(span.first);
    int64_t i = 0;
    for (; i + kTogether <= end; i += kTogether) {
      if (waits) (std::get<kState>(states).encode_closed_group(i), ...);
#pragma GCC unroll 4
      for (int k = 0; k < kTogether; k += Group::size()) {
        prefetch(begin, i + k);
        update_at(static_cast<Group*>(nullptr), begin, i + k);
      }
    }
    if (waits && i < block) (std::get<kState>(states).encode_closed(i, block), ...);
    for (; i + Pack<float>::size() <= count; i += Pack<float>::size()) {
      update_at(static_cast<Pack<float>*>(nullptr), begin, i);
    }
    [[maybe_unused]] const int64_t in_registers = i;
    for (; i < count; ++i) update_at(static_cast<float*>(nullptr), begin, i);
    (std::get<kState>(states).close(count, in_registers), ...);
    if constexpr (kAlong) {
      waits = true;
    } else {
      (std::get<kState>(states).encode_closed(0, count), ...);
    }
  }
  if (waits) (std::get<kState>(states).encode_closed(0, count), ...);
}

// Steps states in codes, and weights that keep their value in a code.
template <class Rule>
void update_as_stored(const Span& span) {
  constexpr std::make_index_sequence<Rule::kStates> kAll{};
  if constexpr (Rule::kStates != 0) {
    if (span.coded[0].map != nullptr) {
      return by_storage(span.coded[0].map->storage, [&]<Storage kStorage>(StorageIs<kStorage>) {
        update_blocks<Rule, kStorage>(span, kAll);
      });
    }
  }
  update_blocks<Rule, Storage::kPlain>(span, kAll);
}

template <class Rule, class Weight, class State>
constexpr auto update_as_stored_of() -> void (*)(const Span&) {
  constexpr bool kMayHaveCode = StoredOf<Weight>::kHasMaster;
  if constexpr (std::is_same_v<Weight, float> || kMayHaveCode) return update_as_stored<Rule>;
  return nullptr;
}

#else

template <class Rule, class Weight, class State>
constexpr auto update_as_stored_of() -> void (*)(const Span&) {
  return nullptr;
}

#endif

template <class Rule, class Weight, class State>
constexpr RuleKernels elementwise_kernels() {
  constexpr uint32_t written = kWeightBits<Rule, Weight> | kStateBits<Rule>;
  RuleKernels kernels{};
  kernels.phase[kUpdate] = {update_span<Rule, Weight, State>, written | kGradBit, written,
                            update_as_stored_of<Rule, Weight, State>()};
  return kernels;
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
