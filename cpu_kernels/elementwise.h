// Runs a rule over a span: loads, the rule's maths, stores; a register at a time, then the tail one by one.
#pragma once
#include "cpu_kernels/codecs.h"
#include "cpu_kernels/group.h"
#include "cpu_kernels/kernel_table.h"
#include "fusedstep/vocabulary.h"
#include "src/core/phases.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// Prefetches that a kernel makes: none, those at the near distance, or those at the far one too
// (PrefetchDistance).
enum class Reach { kNone, kNear, kFar };
template <Reach kReach>
using ReachIs = std::integral_constant<Reach, kReach>;

// Unrolls each loop over a rule's states. States that a loop indexes lie in memory instead of registers, and
// GCC 12 keeps loops over three of them or more.
constexpr int kUnrolledStates = 8;

// Registers that are worked on together. With many, the divider has work while some wait for its results.
// With few, prefetches do not come in bursts where a kernel waits for memory, and many operands fit in the
// registers that there are.
template <class Rule>
constexpr int registers_at_once(Reach reach) {
  return reach == Reach::kFar || Rule::kStates > 2 ? 2 : 4;
}

constexpr int64_t kLine = 64;  // bytes

// Prefetches what is ahead of `count` elements from the i-th on.
template <Reach kReach, class T>
FUSEDSTEP_FN void prefetch_ahead(const T* array, int64_t i, int count, const PrefetchDistance& ahead) {
  const char* const first = reinterpret_cast<const char*>(array);
  const int64_t offset = i * int64_t{sizeof(T)}, bytes = count * int64_t{sizeof(T)};
#pragma GCC unroll 8
  for (int64_t at = 0; at < bytes; at += kLine) {
    __builtin_prefetch(first + (offset + ahead.first) + at);
    if constexpr (kReach == Reach::kFar) __builtin_prefetch(first + (offset + ahead.second) + at, 0, 2);
  }
}

template <class Stored>
FUSEDSTEP_FN void advance(Stored*& array, int64_t bytes) {
  array = reinterpret_cast<Stored*>(reinterpret_cast<char*>(array) + bytes);
}

// A row's operands under their types, and the rule's scalars.
template <class Rule, class Weight, class State>
struct Arrays {
  using Stored = typename StoredOf<Weight>::Type;
  using T = typename Codec<Stored>::Compute;
  using Scalars = typename Rule::template Scalars<T>;
  static constexpr int kStates = Rule::kStates;
  static constexpr bool kHasMaster = StoredOf<Weight>::kHasMaster;
  template <class V>
  using States = rules::States<V, kStates>;

  Stored *weight, *grad;
  rules::States<State*, kStates + kHasMaster> state;  // the last is the master copy
  const Scalars scalars;                              // by value: a store through an operand cannot change it
  const T grad_factor;
  const PrefetchDistance ahead;

  explicit Arrays(const Span& span)
      : weight(static_cast<Stored*>(span.operand[kWeight])),
        grad(static_cast<Stored*>(span.operand[kGrad])),
        scalars(*static_cast<const Scalars*>(span.scalars)),
        grad_factor(static_cast<T>(span.grad_factor)),
        ahead(span.ahead) {
    for (int k = 0; k < kStates + kHasMaster; ++k) {
      state[k] = static_cast<State*>(span.operand[kFirstState + k]);
    }
  }

  template <class V>
  FUSEDSTEP_FN V load_weight(int64_t i) const {
    const V p = load<V>(weight, i);
    if constexpr (kHasMaster) {
      const V master = load<V>(state[kStates], i);
      using rules::where_equal;
      return where_equal(rounded<Stored>(master), p, master, p);
    } else {
      return p;
    }
  }
  template <class V>
  FUSEDSTEP_FN void store_weight(int64_t i, const V& p) const {
    store(weight, i, p);
    if constexpr (kHasMaster) store(state[kStates], i, p);
  }

  // Loads the gradient times its factor: one, or minus one to maximize, or the factor of a scaled loss and
  // clipped norms. Multiplies always: this is exact for one, and hidden behind memory or division.
  template <class V>
  FUSEDSTEP_FN V load_grad(int64_t i) const {
    return load<V>(grad, i) * V(grad_factor);
  }
  template <class V>
  FUSEDSTEP_FN States<V> load_states(int64_t i) const {
    States<V> s;
#pragma GCC unroll kUnrolledStates
    for (int k = 0; k < kStates; ++k) s[k] = load<V>(state[k], i);
    return s;
  }
  template <class V>
  FUSEDSTEP_FN void store_states(const States<V>& s, int64_t i) const {
#pragma GCC unroll kUnrolledStates
    for (int k = 0; k < kStates; ++k) store(state[k], i, s[k]);
  }
  FUSEDSTEP_FN void go_to_next_row(const Span& span) {
    advance(weight, span.row_bytes[kWeight]);
    advance(grad, span.row_bytes[kGrad]);
#pragma GCC unroll kUnrolledStates
    for (int k = 0; k < kStates + kHasMaster; ++k) advance(state[k], span.row_bytes[kFirstState + k]);
  }
  FUSEDSTEP_FN Reach reach() const {
    if (kIsFallback || ahead.second != 0) return Reach::kFar;
    return ahead.first != 0 && Groups<Weight, State>::kExist ? Reach::kNear : Reach::kNone;
  }
  template <Reach kReach, class V>
  FUSEDSTEP_FN void prefetch(int64_t i) const {
    if constexpr (kReach == Reach::kNone) return;
    prefetch_ahead<kReach>(weight, i, V::size(), ahead);
    prefetch_ahead<kReach>(grad, i, V::size(), ahead);
#pragma GCC unroll kUnrolledStates
    for (int k = 0; k < kStates + kHasMaster; ++k) prefetch_ahead<kReach>(state[k], i, V::size(), ahead);
  }
};

template <class Operands, class Row>
FUSEDSTEP_FN void for_rows(const Span& span, Operands& operands, Row row) {
  for (int64_t left = span.rows;;) {
    row();
    if (--left == 0) return;
    operands.go_to_next_row(span);
  }
}

// Operands that a rule touches, as bits.
constexpr uint32_t kGradBit = 1u << kGrad;
template <class Rule>
constexpr uint32_t kStateBits = ((1u << Rule::kStates) - 1) << kFirstState;
template <class Rule, class Weight>
constexpr uint32_t kWeightBits =
    1u << kWeight | (StoredOf<Weight>::kHasMaster ? 1u << (kFirstState + Rule::kStates) : 0);

template <class V, class Rule, class Weight, class State>
FUSEDSTEP_FN void update_at(const Arrays<Rule, Weight, State>& a, int64_t i) {
  V p = a.template load_weight<V>(i);
  const V g = a.template load_grad<V>(i);
  auto s = a.template load_states<V>(i);
  update<Rule>(a.scalars, p, g, s);
  a.store_weight(i, p);
  a.store_states(s, i);
}

// Updates elements from the i-th on, in as many registers, or groups of them, as fit before `end`. Returns
// the place after them.
template <class Register, Reach kReach, class Rule, class Weight, class State>
FUSEDSTEP_FN int64_t update_registers(const Arrays<Rule, Weight, State>& a, int64_t i, int64_t end) {
  for (; i + Register::size() <= end; i += Register::size()) {
    a.template prefetch<kReach, Register>(i);
    update_at<Register>(a, i);
  }
  return i;
}

// Calls run(reach) with a constant: each reach has a loop of its own, since with a branch in one the
// prefetches would come in bursts. The fallback has one loop, and prefetches in vain what is not far.
template <class Rule, class Weight, class State, class Run>
FUSEDSTEP_FN int64_t by_reach(const Arrays<Rule, Weight, State>& a, Run run) {
  const Reach reach = a.reach();
  if constexpr (kIsFallback) return run(ReachIs<Reach::kFar>());
  if (reach == Reach::kFar) return run(ReachIs<Reach::kFar>());
  if constexpr (Groups<Weight, State>::kExist) {
    if (reach == Reach::kNear) return run(ReachIs<Reach::kNear>());
  }
  return run(ReachIs<Reach::kNone>());
}

template <class Rule, class Weight, class State>
FUSEDSTEP_FN void update_row(const Arrays<Rule, Weight, State>& a, int64_t in_groups, int64_t count) {
  using T = typename Arrays<Rule, Weight, State>::T;
  int64_t i = by_reach(
      a, [&]<Reach kReach>(ReachIs<kReach>) __attribute__((always_inline)) {
        using Group = typename Groups<Weight, State>::template Type<registers_at_once<Rule>(kReach)>;
        return update_registers<Group, kReach>(a, 0, in_groups);
      });
  if constexpr (Groups<Weight, State>::kExist) i = update_registers<Pack<T>, Reach::kNone>(a, i, count);
  for (; i < count; ++i) update_at<T>(a, i);
}

template <class Rule, class Weight, class State>
void update_span(const Span& span) {
  Arrays<Rule, Weight, State> a(span);
  const int64_t count = span.count, in_groups = Groups<Weight, State>::are_exact() ? count : 0;
  for_rows(
      span, a, [&]() __attribute__((always_inline)) { update_row(a, in_groups, count); });
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
