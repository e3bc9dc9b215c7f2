// Runs the two phases of a rule with norms over a span. Norms are summed as src/core/reduction.h says.
#pragma once
#include <algorithm>
#include <bit>

#include "cpu_kernels/elementwise.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// The index of a lane is then a constant, and its sums stay in a register. The fallback has too few.
constexpr int kUnrolledLanes = kIsFallback ? 1 : 4;

// The sums of squares of a segment, lane by lane.
template <class T>
class LaneSums {
  static constexpr int kPart = Pack<T>::size();

 public:
  FUSEDSTEP_FN LaneSums() {
    for (Pack<T>& sums : part_) sums = Pack<T>(0);
  }
  FUSEDSTEP_FN void save(T* lanes) const {
    for (int lane = 0; lane < kLanes; lane += kPart) Codec<T>::store(lanes + lane, part_[lane / kPart]);
  }
  FUSEDSTEP_FN void restore(const T* lanes) {
    for (int lane = 0; lane < kLanes; lane += kPart) part_[lane / kPart] = Codec<T>::load(lanes + lane);
  }

  // Adds the squares of elements, the first of which is in lane `lane`.
  FUSEDSTEP_FN void add_squares(int lane, const Pack<T>& x) {
    part_[lane / kPart] = with_square(part_[lane / kPart], x);
  }
  FUSEDSTEP_FN void add_squares(int lane, const Pack<float>& x) requires(std::is_same_v<T, double>) {
    Pack<double> low, high;
    widen(x, low, high);
    add_squares(lane, low);
    add_squares(lane + kPart, high);
  }
#if defined(__AVX512F__)
  template <int kRegisters>
  FUSEDSTEP_FN void add_squares(int lane, const PackGroup<Order::kBehind, kRegisters>& x) {
    static_assert(kPart == kLanes);
    for (const Pack<float>& part : x.part) add_squares(lane, part);
  }
#endif

  // True if these sums and the others are in [kLeastSum, kMostSum].
  FUSEDSTEP_FN bool are_in_range(const LaneSums& others) const {
    bool in_range = true;
    if constexpr (std::is_same_v<T, float>) {
      for (int k = 0; k < kLanes / kPart; ++k) {
        in_range &= all_between(kLeastSum, part_[k], others.part_[k], kMostSum);
      }
    }
    return in_range;
  }
  // Adds these to the sums of the chunk.
  FUSEDSTEP_FN void add_to(double* lanes) const {
    for (int lane = 0; lane < kLanes; lane += kPart) add_part(lanes + lane, part_[lane / kPart]);
  }

 private:
  FUSEDSTEP_FN static void add_part(double* lanes, const Pack<double>& sums) {
    Codec<double>::store(lanes, Codec<double>::load(lanes) + sums);
  }
  FUSEDSTEP_FN static void add_part(double* lanes, const Pack<float>& sums) {
    Pack<double> low, high;
    widen(sums, low, high);
    add_part(lanes, low);
    add_part(lanes + Pack<double>::size(), high);
  }

  Pack<T> part_[kLanes / kPart];
};

// Adds weights and updates to the norms, for the lanes from `lane` on.
template <class V, class T>
struct PackNorms {
  LaneSums<T>&weight, &update;
  int lane;
  FUSEDSTEP_FN void add(const V& p, const V& u) {
    weight.add_squares(lane, p);
    update.add_squares(lane, u);
  }
};

template <class T>
struct ScalarNorms {
  T &weight, &update;
  FUSEDSTEP_FN void add(T p, T u) {
    weight = with_square(weight, p);
    update = with_square(update, u);
  }
};

// True if a gradient can hold an update between the phases: it must not be rounded there
// (Plan::grad_can_store).
template <class Weight>
constexpr bool kHoldsUpdates =
    std::is_same_v<Weight, typename Codec<typename StoredOf<Weight>::Type>::Compute>;

// Without storing the update, the first phase leaves nothing but the norms: the second one does its maths
// again. From states rounded to 16 bits it would make another update than the one whose norm it is scaled by;
// from second moments rounded to zero, a huge one.
template <class V, class Rule, class Weight, class State, class Norms>
FUSEDSTEP_FN void accumulate_at(const Arrays<Rule, Weight, State>& a, int64_t i, bool stores, Norms norms) {
  const V p = a.template load_weight<V>(i), g = a.template load_grad<V>(i);
  auto s = a.template load_states<V>(i);
  const V u = Rule::direction(a.scalars, p, g, s);
  norms.add(Rule::decayed(a.scalars, p), u);
  if (stores) {
    a.store_states(s, i);
    store(a.grad, i, u);
  }
}

// The update of element i, and its states. A second phase that finds no update in the gradient computes it
// again.
template <class V, class Rule, class Weight, class State>
FUSEDSTEP_FN V update_again(const Arrays<Rule, Weight, State>& a, int64_t i, const V& p,
                            rules::States<V, Rule::kStates>& states) {
  states = a.template load_states<V>(i);
  return Rule::direction(a.scalars, p, a.template load_grad<V>(i), states);
}

// The terms of both norms once more. An update that has been stored lies in the gradient.
template <class V, class Rule, class Weight, class State>
FUSEDSTEP_FN void find_again(const Arrays<Rule, Weight, State>& a, int64_t i, bool stored, float* weight,
                             float* update) {
  const V p = a.template load_weight<V>(i);
  rules::States<V, Rule::kStates> states;
  store(weight, 0, Rule::decayed(a.scalars, p));
  store(update, 0, stored ? load<V>(a.grad, i) : update_again(a, i, p, states));
}

// Adds a segment's sums to those of its chunk: as they are in float where that has the range, else in double.
[[gnu::noinline]] inline void add_in_double(const float* x, int64_t count, const float* in_float,
                                            double* lanes) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits |= std::bit_cast<uint32_t>(x[i]) << 1;
  if (bits == 0) return;  // a new bias; rows of an embedding that no gradient reaches
  double in_double[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) {
    double& sum = in_double[i % kLanes];
    sum = with_square(sum, static_cast<double>(x[i]));
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] += is_in_range(in_float[lane]) ? static_cast<double>(in_float[lane]) : in_double[lane];
  }
}

// Out of line and with a copy of `a`, so that it takes no register from the loop that calls it.
template <class Rule, class Weight, class State>
[[gnu::noinline]] void add_in_double(Arrays<Rule, Weight, State> a, int64_t begin, int64_t end, bool stored,
                                     const float (&weight)[kLanes], const float (&update)[kLanes],
                                     double* norms) {
  using V = Pack<float>;
  alignas(64) float found[2][kSegmentElements];
  int64_t i = begin;
  for (; i + V::size() <= end; i += V::size()) {
    find_again<V>(a, i, stored, found[0] + (i - begin), found[1] + (i - begin));
  }
  for (; i < end; ++i) find_again<float>(a, i, stored, found[0] + (i - begin), found[1] + (i - begin));
  add_in_double(found[0], end - begin, weight, norms);
  add_in_double(found[1], end - begin, update, norms + kLanes);
}

template <class Rule, class Weight, class State, class T>
FUSEDSTEP_FN void add_sums(const Arrays<Rule, Weight, State>& a, int64_t begin, int64_t end, bool stored,
                           const LaneSums<T>& weight, const LaneSums<T>& update, double* norms) {
  if constexpr (std::is_same_v<T, float>) {
    if (__builtin_expect(!weight.are_in_range(update), 0)) {
      alignas(64) float in_float[2][kLanes];
      weight.save(in_float[0]);
      update.save(in_float[1]);
      return add_in_double(a, begin, end, stored, in_float[0], in_float[1], norms);
    }
  }
  weight.add_to(norms);
  update.add_to(norms + kLanes);
}

// Elements [i, end), whole registers of them, the first of which is in the first lane.
template <class Register, Reach kReach, class Rule, class Weight, class State, class T>
FUSEDSTEP_FN void accumulate_lanes(const Arrays<Rule, Weight, State>& a, int64_t i, int64_t end, bool stores,
                                   LaneSums<T>& weight, LaneSums<T>& update) {
  constexpr int kStep = std::max(Register::size(), kLanes);
  for (; i < end; i += kStep) {
#pragma GCC unroll kUnrolledLanes
    for (int lane = 0; lane < kStep; lane += Register::size()) {
      a.template prefetch<kReach, Register>(i + lane);
      accumulate_at<Register>(a, i + lane, stores, PackNorms<Register, T>{weight, update, lane});
    }
  }
}

// Whole segments before `end`, from the first element on; returns what comes after them.
template <class Register, Reach kReach, class Rule, class Weight, class State>
FUSEDSTEP_FN int64_t accumulate_segments(const Arrays<Rule, Weight, State>& a, int64_t end, bool stores,
                                         double* norms) {
  using T = typename Arrays<Rule, Weight, State>::T;
  int64_t i = 0;
  for (; i + kSegmentElements <= end; i += kSegmentElements) {
    LaneSums<T> weight, update;
    accumulate_lanes<Register, kReach>(a, i, i + kSegmentElements, stores, weight, update);
    add_sums(a, i, i + kSegmentElements, stores, weight, update, norms);
  }
  return i;
}

template <class Rule, class Weight, class State>
FUSEDSTEP_FN void accumulate_row(const Arrays<Rule, Weight, State>& a, int64_t count, bool stores,
                                 double* norms) {
  using T = typename Arrays<Rule, Weight, State>::T;
  const int64_t in_groups = Groups<Weight, State>::are_exact() ? count : 0;
  int64_t i = by_reach(
      a, [&]<Reach kReach>(ReachIs<kReach>) __attribute__((always_inline)) {
        using Group = typename Groups<Weight, State>::template InOrder<registers_at_once<Rule>(kReach)>;
        return accumulate_segments<Group, kReach>(a, in_groups, stores, norms);
      });
  // Rows of a block are shorter than a segment. Near prefetches alone take the loop of far ones, whose
  // distance is then zero.
  const bool is_ahead = a.reach() != Reach::kNone;
  while (i < count) {
    const int64_t begin = i, end = std::min(i + kSegmentElements, count), tail = end - end % kLanes;
    LaneSums<T> weight, update;
    if (is_ahead) {
      accumulate_lanes<Pack<T>, Reach::kFar>(a, i, tail, stores, weight, update);
    } else {
      accumulate_lanes<Pack<T>, Reach::kNone>(a, i, tail, stores, weight, update);
    }
    if (tail < end) {
      alignas(64) T last[2][kLanes];
      weight.save(last[0]);
      update.save(last[1]);
      for (i = tail; i < end; ++i) {
        accumulate_at<T>(a, i, stores, ScalarNorms<T>{last[0][i - tail], last[1][i - tail]});
      }
      weight.restore(last[0]);
      update.restore(last[1]);
    }
    i = end;
    add_sums(a, begin, end, stores, weight, update, norms);
  }
}

template <class Rule, class Weight, class State>
void accumulate_span(const Span& span) {
  Arrays<Rule, Weight, State> a(span);
  const bool stores = kHoldsUpdates<Weight> && (span.writes & kGradBit) != 0;
  for_rows(
      span, a, [&]() __attribute__((always_inline)) { accumulate_row(a, span.count, stores, span.norms); });
}

template <class V, bool kStored, class Rule, class Weight, class State, class T>
FUSEDSTEP_FN void apply_at(const Arrays<Rule, Weight, State>& a, int64_t i, T factor) {
  V p = a.template load_weight<V>(i), u;
  if constexpr (kStored) {
    u = load<V>(a.grad, i);
  } else {
    rules::States<V, Rule::kStates> states;
    u = update_again(a, i, p, states);
    a.store_states(states, i);
  }
  Rule::apply(a.scalars, factor, p, u);
  a.store_weight(i, p);
}

template <class Rule, class Weight, class State, bool kStored>
void apply_span(const Span& span) {
  Arrays<Rule, Weight, State> a(span);
  using T = typename decltype(a)::T;
  using V = Pack<T>;
  const T factor = Rule::factor(a.scalars, span.ratio);
  const int64_t count = span.count;
  const int64_t in_groups = !kStored && Groups<Weight, State>::are_exact() ? count : 0;
  for_rows(
      span, a, [&]() __attribute__((always_inline)) {
        int64_t i = 0;
        if constexpr (!kStored) {
          using Group = typename Groups<Weight, State>::template Type<registers_at_once<Rule>(Reach::kFar)>;
          for (; i + Group::size() <= in_groups; i += Group::size()) apply_at<Group, kStored>(a, i, factor);
        }
        for (; i + V::size() <= count; i += V::size()) apply_at<V, kStored>(a, i, factor);
        for (; i < count; ++i) apply_at<T, kStored>(a, i, factor);
      });
}

template <class Rule, class Weight, class State>
constexpr RuleKernels two_phase_kernels() {
  constexpr uint32_t weight = kWeightBits<Rule, Weight>, states = kStateBits<Rule>,
                     all = weight | kGradBit | states;
  RuleKernels kernels{};
  kernels.phase[kAccumulate] = {accumulate_span<Rule, Weight, State>, all, 0};
  kernels.phase[kApplyRecompute] = {apply_span<Rule, Weight, State, false>, all, weight | states};
  if constexpr (kHoldsUpdates<Weight>) {
    kernels.phase[kAccumulateStore] = {accumulate_span<Rule, Weight, State>, all, kGradBit | states};
    kernels.phase[kApplyStored] = {apply_span<Rule, Weight, State, true>, weight | kGradBit, weight};
  }
  return kernels;
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
