// What happens to gradients whatever the rule: their norm, their multiplication in memory, their sum.
#pragma once
#include "cpu_kernels/reduce.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

template <class Stored>
void norm_span(const Span& span) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  const auto* grad = static_cast<const Stored*>(span.operand[kGrad]);
  const auto rows = [&](int64_t begin, int64_t end, LaneSums & sums) __attribute__((always_inline)) {
    for (int64_t i = begin; i < end; i += kLanes) {
#pragma GCC unroll 4
      for (int lane = 0; lane < kLanes; lane += V::size()) {
        prefetch_ahead(grad + i + lane);
        sums.add_square(lane, load<V>(grad, i + lane));
      }
    }
  };
  const int64_t count = span.count;
  int64_t i = 0;
  for (; i + kSegmentElements <= count; i += kSegmentElements) {
    LaneSums sums;
    rows(i, i + kSegmentElements, sums);
    sums.add_to(span.norms);
  }
  if (i == count) return;
  const int64_t tail = count - count % kLanes;
  alignas(64) double last[kLanes];
  LaneSums sums;
  rows(i, tail, sums);
  sums.save(last);
  for (i = tail; i < count; ++i) {
    const auto g = static_cast<double>(load<T>(grad, i));
    last[i - tail] += g * g;
  }
  for (int lane = 0; lane < kLanes; ++lane) span.norms[lane] += last[lane];
}

template <class Stored>
void scale_span(const Span& span) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  auto* grad = static_cast<Stored*>(span.operand[kGrad]);
  const T factor = static_cast<T>(span.grad_factor);
  int64_t i = 0;
  for (; i + V::size() <= span.count; i += V::size()) store(grad, i, load<V>(grad, i) * V(factor));
  for (; i < span.count; ++i) store(grad, i, load<T>(grad, i) * factor);
}

template <class Stored>
void add_span(const Span& span) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  auto* sum = static_cast<Stored*>(span.operand[kWeight]);
  const auto* grad = static_cast<const Stored*>(span.operand[kGrad]);
  int64_t i = 0;
  for (; i + V::size() <= span.count; i += V::size()) store(sum, i, load<V>(sum, i) + load<V>(grad, i));
  for (; i < span.count; ++i) store(sum, i, load<T>(sum, i) + load<T>(grad, i));
}

template <class Stored>
constexpr GradKernels grad_kernels() {
  constexpr uint32_t kSumBit = 1u << kWeight;
  return {{norm_span<Stored>, kGradBit, 0},
          {scale_span<Stored>, kGradBit, kGradBit},
          {add_span<Stored>, kSumBit | kGradBit, kSumBit}};
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
