// One SIMD register of T, over ATen's vector class, with the words of vocabulary.h.
#pragma once
#include <ATen/cpu/vec/vec.h>

#include <concepts>

#include "fusedstep/vocabulary.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

template <class T>
struct Pack {
  using Number = T;
  using Vector = at::vec::Vectorized<T>;
  Vector v;

  static constexpr int size() { return Vector::size(); }

  Pack() = default;
  FUSEDSTEP_FN explicit Pack(T x) : v(x) {}
  FUSEDSTEP_FN explicit Pack(const Vector& x) : v(x) {}

  FUSEDSTEP_FN friend Pack operator+(const Pack& a, const Pack& b) { return Pack(a.v + b.v); }
  FUSEDSTEP_FN friend Pack operator-(const Pack& a, const Pack& b) { return Pack(a.v - b.v); }
  FUSEDSTEP_FN friend Pack operator*(const Pack& a, const Pack& b) { return Pack(a.v * b.v); }
  FUSEDSTEP_FN friend Pack operator/(const Pack& a, const Pack& b) { return Pack(a.v / b.v); }
  FUSEDSTEP_FN friend Pack operator-(const Pack& a) { return Pack(a.v.neg()); }
  FUSEDSTEP_FN friend Pack square_root(const Pack& a) { return Pack(a.v.sqrt()); }
  FUSEDSTEP_FN friend Pack maximum(const Pack& a, const Pack& b) { return Pack(at::vec::maximum(a.v, b.v)); }

  // x where a and b are equal, else y.
  FUSEDSTEP_FN friend Pack where_equal(const Pack& a, const Pack& b, const Pack& x, const Pack& y) {
    return Pack(Vector::blendv(y.v, x.v, a.v == b.v));
  }

  // Whether all elements of both are; false for NaN.
  FUSEDSTEP_FN friend bool all_between(T least, const Pack& x, const Pack& y, T most) {
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (std::is_same_v<T, float>) {  // ATen would make vectors of the masks
      const __m512 low = _mm512_set1_ps(least), high = _mm512_set1_ps(most);
      __mmask16 between = _mm512_cmp_ps_mask(x.v, low, _CMP_GE_OQ);
      between = _mm512_mask_cmp_ps_mask(between, x.v, high, _CMP_LE_OQ);
      between = _mm512_mask_cmp_ps_mask(between, y.v, low, _CMP_GE_OQ);
      between = _mm512_mask_cmp_ps_mask(between, y.v, high, _CMP_LE_OQ);
      return between == 0xffff;
    }
#endif
    const Vector low(least), high(most);
    return ((x.v >= low) & (x.v <= high) & (y.v >= low) & (y.v <= high)).zero_mask() == 0;
  }

  // ATen's fmadd rounds twice where the instruction is missing; this one never does.
  FUSEDSTEP_FN friend Pack mul_add(const Pack& a, const Pack& b, const Pack& c) {
#if defined(__FMA__) || defined(__aarch64__)
    return Pack(at::vec::fmadd(a.v, b.v, c.v));
#else
    T x[size()], y[size()], z[size()];
    a.v.store(x);
    b.v.store(y);
    c.v.store(z);
    for (int i = 0; i < size(); ++i) z[i] = rules::mul_add(x[i], y[i], z[i]);
    return Pack(Vector::loadu(z));
#endif
  }
};

template <std::floating_point T>
FUSEDSTEP_FN T where_equal(T a, T b, T x, T y) {
  return a == b ? x : y;
}

// The two halves of a register of floats, as doubles.
FUSEDSTEP_FN void widen(const Pack<float>& x, Pack<double>& low, Pack<double>& high) {
#if defined(CPU_CAPABILITY_AVX512)
  low.v = _mm512_cvtps_pd(_mm512_castps512_ps256(x.v));
  high.v = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1));
#elif defined(CPU_CAPABILITY_AVX2)
  low.v = _mm256_cvtps_pd(_mm256_castps256_ps128(x.v));
  high.v = _mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1));
#else
  constexpr int kHalf = Pack<double>::size();
  float narrow[2 * kHalf];
  double wide[2 * kHalf];
  x.v.store(narrow);
  for (int i = 0; i < 2 * kHalf; ++i) wide[i] = narrow[i];
  low.v = at::vec::Vectorized<double>::loadu(wide);
  high.v = at::vec::Vectorized<double>::loadu(wide + kHalf);
#endif
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
