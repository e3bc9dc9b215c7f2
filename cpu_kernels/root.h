// Square roots without the divider, which is busy with divisions while the units for products idle.
#pragma once
#include "cpu_kernels/pack.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

#if defined(__AVX512F__)

// Returns the root with IEEE's bits, where numbers are rounded to nearest. It starts from an estimate: g
// converges to the root and h to 1 / (2 root) (Goldschmidt), then the exact remainder, x - g^2, corrects g
// (Markstein, 1990). Verified for every significand and every estimate within the instruction's bound, 2^-14,
// so that it holds for any vendor's. Below 2^-96 the remainder may not be exact.
FUSEDSTEP_FN __m512 corrected_root(__m512 x) {
  const __m512 half = _mm512_set1_ps(0.5f), estimate = _mm512_rsqrt14_ps(x);
  __m512 g = _mm512_mul_ps(x, estimate), h = _mm512_mul_ps(half, estimate);
  const __m512 error = _mm512_fnmadd_ps(g, h, half);
  g = _mm512_fmadd_ps(g, error, g);
  h = _mm512_fmadd_ps(h, error, h);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(g, g, x), h, g);
}

// The roots of several registers, with one check: those of what is out of range are below 2^-48 as they come,
// or the NaN of an invalid operation, whose sign is set (zeros, infinity, numbers below zero).
template <int kCount>
FUSEDSTEP_FN void estimated_square_roots(const Pack<float>* x, Pack<float>* root) {
  constexpr int kLeast = (127 - 48) << 23;
  __m512i least = _mm512_set1_epi32(kLeast);
#pragma GCC unroll 4
  for (int k = 0; k < kCount; ++k) {
    root[k] = Pack<float>(corrected_root(x[k].v));
    const __m512i bits = _mm512_castps_si512(root[k].v);
    least = k == 0 ? bits : _mm512_min_epi32(least, bits);
  }
  if (__builtin_expect(_mm512_cmplt_epi32_mask(least, _mm512_set1_epi32(kLeast)) == 0, 1)) return;
#pragma GCC unroll 4
  for (int k = 0; k < kCount; ++k) root[k] = square_root(x[k]);
}

// True if estimated_square_roots() is exact in the caller's rounding mode.
FUSEDSTEP_FN bool estimated_roots_are_exact() { return (_mm_getcsr() & _MM_ROUND_MASK) == _MM_ROUND_NEAREST; }

#endif

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
