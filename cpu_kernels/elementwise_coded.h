// Runs an elementwise rule where its states are codes: they are decoded in registers, and the new states of a
// block stay in the first-level cache until their absolute maximum is known. The loop's divisions hide the
// decoding.
#pragma once
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>

#include "cpu_kernels/coded.h"
#include "cpu_kernels/elementwise.h"
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

// A state's elements of one block.
template <Storage kStorage, bool kSigned>
struct CodedBlock {
  static constexpr int kMost = 256;  // elements

  CodeMap map;
  CodeTables<kStorage, kSigned> tables;
  uint8_t* codes;
  float* absmax;
  float scale;
  typename CodeRegister::Bits largest;
  alignas(64) float fresh[kMost];

  explicit CodedBlock(const CodeMap& map) : map(map), tables(map) {}

  void go_to(uint8_t* first_code, float* first_absmax) {
    codes = first_code;
    absmax = first_absmax;
    scale = *absmax / map.top;
    largest = typename CodeRegister::Bits{};
  }
  // The number of element i, or those from there on.
  template <class V>
  FUSEDSTEP_FN V decode(int64_t i) const {
    if constexpr (requires(V group) { group.part; }) {
      return V::of([&](int k) { return decode<Pack<float>>(i + k * Pack<float>::size()); });
    } else if constexpr (requires { V::size(); }) {
      const uint8_t* const at = codes + (kStorage == Storage::kInt4 ? i / 2 : i);
      return V(CodeRegister::times(CodeRegister::decode(tables, at), scale));
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
  void encode(int64_t count, int64_t in_registers) {
    int32_t most = CodeRegister::largest_of(largest);
    for (int64_t i = in_registers; i < count; ++i) most = std::max(most, bits_of(fresh[i]) & kMagnitudeBits);
    encode_block<kStorage, kSigned>(map, tables, fresh, count, most, codes, *absmax);
  }

 private:
  FUSEDSTEP_FN void note(const Pack<float>& x) {
    largest = CodeRegister::maximum(largest, CodeRegister::magnitudes(x.v));
  }
};

template <class Rule, Storage kStorage, size_t... kState>
void update_coded_blocks(const Span& span, std::index_sequence<kState...>) {
  using Group = typename Groups<float, float>::template Type<registers_at_once<Rule>(Reach::kNear)>;
  using Row = Arrays<Rule, float, float>;
  const Row row(span);
  constexpr bool kAllSigned = kStorage == Storage::kFloat8;  // its codes have a sign, whatever the state
  std::tuple<CodedBlock<kStorage, kAllSigned || SignOf<Rule>::is_signed(kState)>...> states(
      *span.coded[kState].map...);
  const auto update_at = [&]<class V>(V*, int64_t weight, int64_t i) __attribute__((always_inline)) {
    V p = load<V>(row.weight, weight + i);
    const V g = row.template load_grad<V>(weight + i);
    typename Row::template States<V> s{std::get<kState>(states).template decode<V>(i)...};
    update<Rule>(row.scalars, p, g, s);
    store(row.weight, weight + i, p);
    (std::get<kState>(states).keep(i, s[kState]), ...);
  };
  const int64_t block = span.coded[0].map->block,
                groups_until = Groups<float, float>::are_exact() ? block : 0;
  for (int64_t begin = 0; begin < span.count; begin += block) {
    const int64_t count = std::min(block, span.count - begin), end = std::min(count, groups_until);
    (std::get<kState>(states).go_to(
         static_cast<uint8_t*>(span.operand[kFirstState + kState]) + span.coded[kState].map->bytes_of(begin),
         span.coded[kState].absmax + (span.first + begin) / block),
     ...);
    int64_t i = 0;
    for (; i + Group::size() <= end; i += Group::size()) {
      prefetch_ahead<Reach::kFar>(row.weight, begin + i, Group::size(), row.ahead);
      prefetch_ahead<Reach::kFar>(row.grad, begin + i, Group::size(), row.ahead);
      update_at(static_cast<Group*>(nullptr), begin, i);
    }
    for (; i + Pack<float>::size() <= count; i += Pack<float>::size()) {
      update_at(static_cast<Pack<float>*>(nullptr), begin, i);
    }
    const int64_t in_registers = i;
    for (; i < count; ++i) update_at(static_cast<float*>(nullptr), begin, i);
    (std::get<kState>(states).encode(count, in_registers), ...);
  }
}

// Steps float32 weights.
template <class Rule>
void update_coded(const Span& span) {
  by_storage(span.coded[0].map->storage, [&]<Storage kStorage>(StorageIs<kStorage>) {
    update_coded_blocks<Rule, kStorage>(span, std::make_index_sequence<Rule::kStates>());
  });
}

template <class Rule, class Weight>
constexpr auto coded_update_of() -> void (*)(const Span&) {
  if constexpr (std::is_same_v<Weight, float> && Rule::kStates != 0) return update_coded<Rule>;
  return nullptr;
}

#else

template <class Rule, class Weight>
constexpr auto coded_update_of() -> void (*)(const Span&) {
  return nullptr;
}

#endif

template <class Rule, class Weight, class State>
constexpr RuleKernels elementwise_kernels() {
  constexpr uint32_t written = kWeightBits<Rule, Weight> | kStateBits<Rule>;
  RuleKernels kernels{};
  kernels.phase[kUpdate] = {update_span<Rule, Weight, State>, written | kGradBit, written,
                            coded_update_of<Rule, Weight>()};
  return kernels;
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
