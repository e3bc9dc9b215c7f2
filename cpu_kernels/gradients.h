// Kernels over gradients, the same for every rule: norm, multiplication in memory, sum.
#pragma once
#include <algorithm>

#include "cpu_kernels/reduce.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// A row's gradient, and what stands in the weight's place.
template <class Stored>
struct GradArrays {
  Stored *weight, *grad;

  explicit GradArrays(const Span& span)
      : weight(static_cast<Stored*>(span.operand[kWeight])),
        grad(static_cast<Stored*>(span.operand[kGrad])) {}

  FUSEDSTEP_FN void go_to_next_row(const Span& span) {
    advance(weight, span.row_bytes[kWeight]);
    advance(grad, span.row_bytes[kGrad]);
  }
};

template <class Stored>
FUSEDSTEP_FN void norm_row(const Stored* grad, const Span& span) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  for (int64_t i = 0; i < span.count;) {
    const int64_t end = std::min(i + kSegmentElements, span.count), tail = end - end % kLanes;
    LaneSums<double> sums;
    for (; i < tail; i += kLanes) {
#pragma GCC unroll 4
      for (int lane = 0; lane < kLanes; lane += V::size()) {
        if (span.ahead.second != 0) prefetch_ahead<Reach::kFar>(grad, i + lane, 1, span.ahead);
        sums.add_squares(lane, load<V>(grad, i + lane));
      }
    }
    if (i < end) {
      alignas(64) double last[kLanes];
      sums.save(last);
      for (; i < end; ++i) {
        last[i - tail] = with_square(last[i - tail], static_cast<double>(load<T>(grad, i)));
      }
      sums.restore(last);
    }
    sums.add_to(span.norms);
  }
}

template <class Stored>
void norm_span(const Span& span) {
  GradArrays<Stored> a(span);
  for_rows(
      span, a, [&]() __attribute__((always_inline)) { norm_row(a.grad, span); });
}

template <class Stored>
void scale_span(const Span& span) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  GradArrays<Stored> a(span);
  const T factor = static_cast<T>(span.grad_factor);
  for_rows(
      span, a, [&]() __attribute__((always_inline)) {
        int64_t i = 0;
        for (; i + V::size() <= span.count; i += V::size()) store(a.grad, i, load<V>(a.grad, i) * V(factor));
        for (; i < span.count; ++i) store(a.grad, i, load<T>(a.grad, i) * factor);
      });
}

template <class Stored>
void add_span(const Span& span) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  GradArrays<Stored> a(span);
  for_rows(
      span, a, [&]() __attribute__((always_inline)) {
        int64_t i = 0;
        for (; i + V::size() <= span.count; i += V::size()) {
          store(a.weight, i, load<V>(a.weight, i) + load<V>(a.grad, i));
        }
        for (; i < span.count; ++i) store(a.weight, i, load<T>(a.weight, i) + load<T>(a.grad, i));
      });
}

template <class Stored>
constexpr GradKernels grad_kernels() {
  constexpr uint32_t kSumBit = 1u << kWeight;
  return {{norm_span<Stored>, kGradBit, 0},
          {scale_span<Stored>, kGradBit, kGradBit},
          {add_span<Stored>, kSumBit | kGradBit, kSumBit}};
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
