// Runs the two phases of a rule with norms over a span. Norms are summed as src/reduction.h says.
#pragma once
#include <algorithm>

#include "cpu_kernels/elementwise.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// The sums of a segment, lane by lane.
struct LaneSums {
  static constexpr int kPart = Pack<double>::size();
  Pack<double> part[kLanes / kPart];

  FUSEDSTEP_FN LaneSums() {
    for (Pack<double>& sums : part) sums = Pack<double>(0.0);
  }
  FUSEDSTEP_FN void save(double* lanes) const {
    for (int k = 0; k < kLanes / kPart; ++k) Codec<double>::store(lanes + k * kPart, part[k]);
  }
  // Onto the sums of the chunk.
  FUSEDSTEP_FN void add_to(double* lanes) const {
    for (int k = 0; k < kLanes / kPart; ++k) {
      Codec<double>::store(lanes + k * kPart, Codec<double>::load(lanes + k * kPart) + part[k]);
    }
  }
  FUSEDSTEP_FN void add_square(int lane, const Pack<double>& x) {
    part[lane / kPart] = part[lane / kPart] + x * x;
  }
  // Of a float: the sum is the same in one instruction as in two.
  FUSEDSTEP_FN void add_exact_square(int lane, const Pack<double>& x) {
#if defined(__FMA__)
    part[lane / kPart] = mul_add(x, x, part[lane / kPart]);
#else
    add_square(lane, x);
#endif
  }
  FUSEDSTEP_FN void add_square(int lane, const Pack<float>& x) {
    Pack<double> low, high;
    widen(x, low, high);
    add_exact_square(lane, low);
    add_exact_square(lane + kPart, high);
  }
};

// What a rule adds its weight and update to, for the lanes from `lane` on.
template <class V>
struct PackNorms {
  LaneSums &weight, &update;
  int lane;
  FUSEDSTEP_FN void add(const V& p, const V& u) {
    weight.add_square(lane, p);
    update.add_square(lane, u);
  }
};

template <class T>
struct ScalarNorms {
  double &weight, &update;
  FUSEDSTEP_FN void add(T p, T u) {
    weight += static_cast<double>(p) * static_cast<double>(p);
    update += static_cast<double>(u) * static_cast<double>(u);
  }
};

// What a rule adds to where the norms are known already.
struct NoNorms {
  template <class V>
  FUSEDSTEP_FN void add(const V&, const V&) {}
};

// Without storing the update, the first phase leaves nothing but the norms: the second one does its maths
// again. From states rounded to 16 bits it would make another update than the one whose norm it is scaled by;
// from second moments rounded to zero, a huge one.
template <class V, bool kStore, class Rule, class Weight, class State, class Norms>
FUSEDSTEP_FN void accumulate_at(const Arrays<Rule, Weight, State>& a, int64_t i, Norms norms) {
  const V p = a.template load_weight<V>(i), g = a.template load_grad<V>(i);
  V s[Rule::kStates];
  a.load_states(s, i);
  const V u = Rule::accumulate(a.scalars, p, g, s, norms);
  if constexpr (kStore) {
    a.store_states(s, i);
    store(a.grad, i, u);
  }
}

template <bool kStore, class Rule, class Weight, class State>
FUSEDSTEP_FN void accumulate_row(const Arrays<Rule, Weight, State>& a, int64_t count, double* norms) {
  using T = typename Arrays<Rule, Weight, State>::T;
  using V = Pack<T>;
  double *weight_lanes = norms, *update_lanes = norms + kLanes;
  for (int64_t i = 0; i < count;) {
    const int64_t end = std::min(i + kSegmentElements, count), tail = end - end % kLanes;
    LaneSums weight, update;
    for (; i < tail; i += kLanes) {
#pragma GCC unroll 4
      for (int lane = 0; lane < kLanes; lane += V::size()) {
        a.template prefetch<V>(i + lane);
        accumulate_at<V, kStore>(a, i + lane, PackNorms<V>{weight, update, lane});
      }
    }
    if (tail == end) {
      weight.add_to(weight_lanes);
      update.add_to(update_lanes);
      continue;
    }
    alignas(64) double last[2][kLanes];
    weight.save(last[0]);
    update.save(last[1]);
    for (; i < end; ++i) {
      accumulate_at<T, kStore>(a, i, ScalarNorms<T>{last[0][i - tail], last[1][i - tail]});
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      weight_lanes[lane] += last[0][lane];
      update_lanes[lane] += last[1][lane];
    }
  }
}

template <class Rule, class Weight, class State, bool kStore>
void accumulate_span(const Span& span) {
  Arrays<Rule, Weight, State> a(span);
  for_rows(
      span, a, [&]() __attribute__((always_inline)) { accumulate_row<kStore>(a, span.count, span.norms); });
}

template <class V, bool kStored, class Rule, class Weight, class State, class T>
FUSEDSTEP_FN void apply_at(const Arrays<Rule, Weight, State>& a, int64_t i, T ratio) {
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
  Rule::apply(a.scalars, ratio, p, u);
  a.store_weight(i, p);
}

template <class Rule, class Weight, class State, bool kStored>
void apply_span(const Span& span) {
  Arrays<Rule, Weight, State> a(span);
  using T = typename decltype(a)::T;
  using V = Pack<T>;
  const T ratio = static_cast<T>(span.ratio);
  const int64_t count = span.count;
  const int64_t in_pairs = !kStored && Pairs<Weight, State>::are_exact() ? count : 0;
  for_rows(
      span, a, [&]() __attribute__((always_inline)) {
        int64_t i = 0;
        if constexpr (!kStored) {
          using Pair = typename Pairs<Weight, State>::Type;
          for (; i + Pair::size() <= in_pairs; i += Pair::size()) apply_at<Pair, kStored>(a, i, ratio);
        }
        for (; i + V::size() <= count; i += V::size()) apply_at<V, kStored>(a, i, ratio);
        for (; i < count; ++i) apply_at<T, kStored>(a, i, ratio);
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
