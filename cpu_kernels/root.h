// Square roots without the divider, which is busy with divisions while the units for products idle.
#pragma once
#include "cpu_kernels/pack.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

#if defined(CPU_CAPABILITY_AVX512)

// From an estimate, to IEEE's bits where numbers are rounded to nearest: g converges to the root and h to
// 1 / (2 root) (Goldschmidt), then the exact remainder, x - g^2, corrects g (Markstein, 1990). Verified for
// every significand and every estimate within the instruction's bound, 2^-14, so that it holds for any
// vendor's. Below 2^-96 the remainder may not be exact.
FUSEDSTEP_FN Pack<float> estimated_square_root(const Pack<float>& a) {
  constexpr int kLeast = (127 - 96) << 23, kInfinity = 255 << 23;
  const __m512 x = a.v, half = _mm512_set1_ps(0.5f);
  const __m512i above = _mm512_sub_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(kLeast));
  const __mmask16 beyond = _mm512_cmpge_epu32_mask(above, _mm512_set1_epi32(kInfinity - kLeast));
  if (__builtin_expect(beyond != 0, 0)) return square_root(a);
  const __m512 estimate = _mm512_rsqrt14_ps(x);
  __m512 g = _mm512_mul_ps(x, estimate), h = _mm512_mul_ps(half, estimate);
  const __m512 error = _mm512_fnmadd_ps(g, h, half);
  g = _mm512_fmadd_ps(g, error, g);
  h = _mm512_fmadd_ps(h, error, h);
  return Pack<float>(_mm512_fmadd_ps(_mm512_fnmadd_ps(g, g, x), h, g));
}

// Whether that is so in the caller's rounding mode.
FUSEDSTEP_FN bool estimated_roots_are_exact() { return (_mm_getcsr() & _MM_ROUND_MASK) == _MM_ROUND_NEAREST; }

#endif

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
