// What happens to gradients whatever the rule: their norm, their multiplication in memory, their sum.
#pragma once
#include "cpu_kernels/reduce.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

template <class Stored>
void norm_span(const Span& span) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  const auto* grad = static_cast<const Stored*>(span.operand[kGrad]);
  LaneSums sums(span.norms);
  int64_t i = 0;
  for (; i + kLanes <= span.count; i += kLanes) {
#pragma GCC unroll 4
    for (int lane = 0; lane < kLanes; lane += V::size()) {
      __builtin_prefetch(grad + i + lane + kPrefetchDistance);
      sums.add_square(lane, load<V>(grad, i + lane));
    }
  }
  sums.save(span.norms);
  for (int lane = 0; i < span.count; ++i, ++lane) {
    const auto g = static_cast<double>(load<T>(grad, i));
    span.norms[lane] += g * g;
  }
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
  return {{norm_span<Stored>, kGradBit, 0},
          {scale_span<Stored>, kGradBit, kGradBit},
          {add_span<Stored>, kWeightBit | kGradBit, kWeightBit}};
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
