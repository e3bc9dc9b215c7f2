// Runs the two phases of a rule with norms over a span. Norms are summed as src/core/reduction.h says.
#pragma once
#include <algorithm>

#include "cpu_kernels/elementwise.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

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

  // Of elements the first of which is in lane `lane`.
  FUSEDSTEP_FN void add_squares(int lane, const Pack<T>& x) {
    part_[lane / kPart] = with_square(part_[lane / kPart], x);
  }
  FUSEDSTEP_FN void add_squares(int lane, const Pack<float>& x) requires(std::is_same_v<T, double>) {
    Pack<double> low, high;
    widen(x, low, high);
    add_squares(lane, low);
    add_squares(lane + kPart, high);
  }
#if defined(CPU_CAPABILITY_AVX512)
  template <int kRegisters>
  FUSEDSTEP_FN void add_squares(int lane, const PackGroup<Order::kBehind, kRegisters>& x) {
    static_assert(kPart == kLanes);
    for (const Pack<float>& part : x.part) add_squares(lane, part);
  }
#endif

  // Whether these and the others are.
  FUSEDSTEP_FN bool are_in_range(const LaneSums& others) const {
    bool in_range = true;
    if constexpr (std::is_same_v<T, float>) {
      for (int k = 0; k < kLanes / kPart; ++k) {
        in_range &= all_between(kLeastSum, part_[k], others.part_[k], kMostSum);
      }
    }
    return in_range;
  }
  // Onto the sums of the chunk.
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

// What a rule adds its weight and update to, for the lanes from `lane` on.
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

// What a rule adds to where the norms are known already.
struct NoNorms {
  template <class V>
  FUSEDSTEP_FN void add(const V&, const V&) {}
};

// What a rule adds to where its weight alone is asked for.
template <class V>
struct Found {
  V& weight;
  FUSEDSTEP_FN void add(const V& p, const V&) { weight = p; }
};

// Without storing the update, the first phase leaves nothing but the norms: the second one does its maths
// again. From states rounded to 16 bits it would make another update than the one whose norm it is scaled by;
// from second moments rounded to zero, a huge one.
template <class V, bool kStore, class Rule, class Weight, class State, class Norms>
FUSEDSTEP_FN V accumulate_at(const Arrays<Rule, Weight, State>& a, int64_t i, Norms norms) {
  const V p = a.template load_weight<V>(i), g = a.template load_grad<V>(i);
  V s[Rule::kStates];
  a.load_states(s, i);
  const V u = Rule::accumulate(a.scalars, p, g, s, norms);
  if constexpr (kStore) {
    a.store_states(s, i);
    store(a.grad, i, u);
  }
  return u;
}

enum Norm : int { kWeightNorm, kUpdateNorm };

// The elements of a norm once more, after accumulate_at(). What a rule adds as its weight depends on nothing
// else, and an update that has been stored lies in the gradient.
template <Norm kNorm, bool kStored, class V, class Rule, class Weight, class State>
FUSEDSTEP_FN V find_again(const Arrays<Rule, Weight, State>& a, int64_t i) {
  if constexpr (kNorm == kUpdateNorm && kStored) {
    return load<V>(a.grad, i);
  } else {
    V p;
    const V u = accumulate_at<V, false>(a, i, Found<V>{p});
    return kNorm == kWeightNorm ? p : u;
  }
}

// Adds a segment's sums to those of its chunk: as they are in float where that has the range, else in double.
// Out of line and with a copy of `a`, so that it takes no register from the loop that calls it.
template <Norm kNorm, bool kStored, class Rule, class Weight, class State, class T>
[[gnu::noinline]] void add_in_double(Arrays<Rule, Weight, State> a, int64_t begin, int64_t end,
                                     const T (&in_float)[kLanes], double* lanes) {
  if (std::all_of(in_float, in_float + kLanes, [](T sum) { return is_in_range(sum); })) {  // the other norm's
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<double>(in_float[lane]);
    return;
  }
  using V = Pack<T>;
  int64_t i = begin;
  V largest(0);
  for (; i + V::size() <= end; i += V::size()) {
    const V x = find_again<kNorm, kStored, V>(a, i);
    largest = maximum(largest, maximum(x, -x));
  }
  bool is_zero = all_between(0, largest, largest, 0);
  for (; i < end; ++i) is_zero &= find_again<kNorm, kStored, T>(a, i) == 0;
  if (is_zero) return;  // a new bias; rows of an embedding that no gradient reaches

  LaneSums<double> sums;
  for (i = begin; i + kLanes <= end; i += kLanes) {
#pragma GCC unroll 4
    for (int lane = 0; lane < kLanes; lane += V::size()) {
      sums.add_squares(lane, find_again<kNorm, kStored, V>(a, i + lane));
    }
  }
  alignas(64) double in_double[kLanes];
  sums.save(in_double);
  for (int lane = 0; i < end; ++i, ++lane) {
    const auto x = static_cast<double>(find_again<kNorm, kStored, T>(a, i));
    in_double[lane] = with_square(in_double[lane], x);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] += is_in_range(in_float[lane]) ? static_cast<double>(in_float[lane]) : in_double[lane];
  }
}

template <bool kStore, class Rule, class Weight, class State, class T>
FUSEDSTEP_FN void add_sums(const Arrays<Rule, Weight, State>& a, int64_t begin, int64_t end,
                           const LaneSums<T>& weight, const LaneSums<T>& update, double* norms) {
  if (__builtin_expect(weight.are_in_range(update), 1)) {
    weight.add_to(norms);
    update.add_to(norms + kLanes);
  } else {
    alignas(64) T in_float[kLanes];
    weight.save(in_float);
    add_in_double<kWeightNorm, kStore>(a, begin, end, in_float, norms);
    update.save(in_float);
    add_in_double<kUpdateNorm, kStore>(a, begin, end, in_float, norms + kLanes);
  }
}

// Elements from the i-th on, `kElements` of them, the first of which is in the first lane.
template <class Register, bool kStore, Reach kReach, int64_t kElements, class Rule, class Weight, class State,
          class T>
FUSEDSTEP_FN void accumulate_lanes(const Arrays<Rule, Weight, State>& a, int64_t i, LaneSums<T>& weight,
                                   LaneSums<T>& update) {
#pragma GCC unroll 4
  for (int64_t k = 0; k < kElements; k += Register::size()) {
    a.template prefetch<kReach, Register>(i + k);
    accumulate_at<Register, kStore>(a, i + k,
                                    PackNorms<Register, T>{weight, update, static_cast<int>(k % kLanes)});
  }
}

template <bool kStore, Reach kReach, class Rule, class Weight, class State>
FUSEDSTEP_FN void accumulate_row(const Arrays<Rule, Weight, State>& a, int64_t count, double* norms) {
  using T = typename Arrays<Rule, Weight, State>::T;
  using Group = typename Groups<Weight, State>::template InOrder<registers_at_once<Rule>(kReach)>;
  int64_t i = 0;
  // Whole segments: where their end is known, what comes between them is a tenth of the time less.
  const int64_t in_groups = Groups<Weight, State>::are_exact() ? count : 0;
  for (; i + kSegmentElements <= in_groups; i += kSegmentElements) {
    LaneSums<T> weight, update;
    accumulate_lanes<Group, kStore, kReach, kSegmentElements>(a, i, weight, update);
    add_sums<kStore>(a, i, i + kSegmentElements, weight, update, norms);
  }
  while (i < count) {
    const int64_t begin = i, end = std::min(i + kSegmentElements, count), tail = end - end % kLanes;
    LaneSums<T> weight, update;
    for (; i < tail; i += kLanes) accumulate_lanes<Pack<T>, kStore, kReach, kLanes>(a, i, weight, update);
    if (i < end) {
      alignas(64) T last[2][kLanes];
      weight.save(last[0]);
      update.save(last[1]);
      for (; i < end; ++i) {
        accumulate_at<T, kStore>(a, i, ScalarNorms<T>{last[0][i - tail], last[1][i - tail]});
      }
      weight.restore(last[0]);
      update.restore(last[1]);
    }
    add_sums<kStore>(a, begin, end, weight, update, norms);
  }
}

template <class Rule, class Weight, class State, bool kStore>
void accumulate_span(const Span& span) {
  Arrays<Rule, Weight, State> a(span);
  for_rows(
      span, a, [&]() __attribute__((always_inline)) {
        switch (a.reach()) {
          case Reach::kFar:
            return accumulate_row<kStore, Reach::kFar>(a, span.count, span.norms);
          case Reach::kNear:
            return accumulate_row<kStore, Reach::kNear>(a, span.count, span.norms);
          case Reach::kNone:
            return accumulate_row<kStore, Reach::kNone>(a, span.count, span.norms);
        }
      });
}

template <class V, bool kStored, class Rule, class Weight, class State, class T>
FUSEDSTEP_FN void apply_at(const Arrays<Rule, Weight, State>& a, int64_t i, T factor) {
  V p = a.template load_weight<V>(i), u;
  if constexpr (kStored) {
    u = load<V>(a.grad, i);
  } else {
    V s[Rule::kStates];
    a.load_states(s, i);
    NoNorms norms;
    u = Rule::accumulate(a.scalars, p, a.template load_grad<V>(i), s, norms);
    a.store_states(s, i);
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
  kernels.phase[kAccumulateStore] = {accumulate_span<Rule, Weight, State, true>, all, kGradBit | states};
  kernels.phase[kAccumulate] = {accumulate_span<Rule, Weight, State, false>, all, 0};
  kernels.phase[kApplyStored] = {apply_span<Rule, Weight, State, true>, weight | kGradBit, weight};
  kernels.phase[kApplyRecompute] = {apply_span<Rule, Weight, State, false>, all, weight | states};
  return kernels;
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
