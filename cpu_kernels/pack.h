// One SIMD register of T, over the vector types of GCC and Clang, with the words of vocabulary.h.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fusedstep/vocabulary.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
constexpr bool kIsFallback = kRegisterBytes == 16;

template <class T>
struct VectorOf {
  using Type [[gnu::vector_size(kRegisterBytes)]] = T;
};
template <class T>
using Vector = typename VectorOf<T>::Type;

// The vector types have no operators for these: a number in every element, square roots, and products with a
// sum that are rounded once.
#if defined(__AVX512F__)
FUSEDSTEP_FN __m512 repeated(float x) { return _mm512_set1_ps(x); }
FUSEDSTEP_FN __m512d repeated(double x) { return _mm512_set1_pd(x); }
FUSEDSTEP_FN __m512 roots(__m512 x) { return _mm512_sqrt_ps(x); }
FUSEDSTEP_FN __m512d roots(__m512d x) { return _mm512_sqrt_pd(x); }
FUSEDSTEP_FN __m512 fused(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
FUSEDSTEP_FN __m512d fused(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
#elif defined(__AVX2__)
FUSEDSTEP_FN __m256 repeated(float x) { return _mm256_set1_ps(x); }
FUSEDSTEP_FN __m256d repeated(double x) { return _mm256_set1_pd(x); }
FUSEDSTEP_FN __m256 roots(__m256 x) { return _mm256_sqrt_ps(x); }
FUSEDSTEP_FN __m256d roots(__m256d x) { return _mm256_sqrt_pd(x); }
FUSEDSTEP_FN __m256 fused(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
FUSEDSTEP_FN __m256d fused(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
#else
FUSEDSTEP_FN Vector<float> repeated(float x) { return Vector<float>{x, x, x, x}; }
FUSEDSTEP_FN Vector<double> repeated(double x) { return Vector<double>{x, x}; }
#if defined(__x86_64__)
FUSEDSTEP_FN __m128 roots(__m128 x) { return _mm_sqrt_ps(x); }
FUSEDSTEP_FN __m128d roots(__m128d x) { return _mm_sqrt_pd(x); }
#else
template <class V>
FUSEDSTEP_FN V roots(V x) {
  for (unsigned i = 0; i < sizeof x / sizeof x[0]; ++i) x[i] = rules::square_root(x[i]);
  return x;
}
#endif
// Each element takes a call where there is no instruction for it. One function calls for all elements, out of
// line: every call empties the registers.
#if defined(__FP_FAST_FMAF)
#define FUSEDSTEP_FUSED FUSEDSTEP_FN
#else
#define FUSEDSTEP_FUSED [[gnu::noinline]] inline
#endif
template <class V>
FUSEDSTEP_FUSED V fused(V a, V b, V c) {
  for (unsigned i = 0; i < sizeof c / sizeof c[0]; ++i) c[i] = rules::mul_add(a[i], b[i], c[i]);
  return c;
}
#undef FUSEDSTEP_FUSED
#endif

template <class T>
struct Pack {
  using Number = T;
  using Bits = Vector<std::conditional_t<sizeof(T) == sizeof(int32_t), int32_t, int64_t>>;
  Vector<T> v;

  static constexpr int size() { return kRegisterBytes / sizeof(T); }

  Pack() = default;
  FUSEDSTEP_FN explicit Pack(T x) : v(repeated(x)) {}
  FUSEDSTEP_FN explicit Pack(const Vector<T>& x) : v(x) {}

  FUSEDSTEP_FN static Pack load(const T* x) {
    Pack pack;
    std::memcpy(&pack.v, x, sizeof pack.v);
    return pack;
  }
  FUSEDSTEP_FN void store(T* to) const { std::memcpy(to, &v, sizeof v); }

  FUSEDSTEP_FN friend Pack operator+(const Pack& a, const Pack& b) { return Pack(a.v + b.v); }
  FUSEDSTEP_FN friend Pack operator-(const Pack& a, const Pack& b) { return Pack(a.v - b.v); }
  FUSEDSTEP_FN friend Pack operator*(const Pack& a, const Pack& b) { return Pack(a.v * b.v); }
  FUSEDSTEP_FN friend Pack operator/(const Pack& a, const Pack& b) { return Pack(a.v / b.v); }
  FUSEDSTEP_FN friend Pack operator-(const Pack& a) { return Pack(-a.v); }
  FUSEDSTEP_FN friend Pack square_root(const Pack& a) { return Pack(roots(a.v)); }
  FUSEDSTEP_FN friend Pack maximum(const Pack& a, const Pack& b) {
    return Pack(((a.v > b.v) | (a.v != a.v)) ? a.v : b.v);  // NOLINT(misc-redundant-expression): NaN
  }
  FUSEDSTEP_FN friend Pack mul_add(const Pack& a, const Pack& b, const Pack& c) {
    return Pack(fused(a.v, b.v, c.v));
  }

  FUSEDSTEP_FN friend Pack sign_of(const Pack& a) {
    const Pack zero(0);
    return Pack(a.v > zero.v ? Pack(1).v : (a.v < zero.v ? Pack(-1).v : zero.v));
  }
  FUSEDSTEP_FN friend Pack absolute(const Pack& a) {
    const auto sign = reinterpret_cast<Bits>(Pack(-T{0}).v);
    return Pack(reinterpret_cast<Vector<T>>(reinterpret_cast<Bits>(a.v) & ~sign));
  }
  FUSEDSTEP_FN friend Pack where_equal(const Pack& a, const Pack& b, const Pack& x, const Pack& y) {
    return Pack(a.v == b.v ? x.v : y.v);
  }

  // True if all elements of both lie in [least, most]; false for NaN.
  FUSEDSTEP_FN friend bool all_between(T least, const Pack& x, const Pack& y, T most) {
    const auto between = (x.v >= least) & (x.v <= most) & (y.v >= least) & (y.v <= most);
#if defined(__AVX512F__)
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(between)) == 0xffff;
#elif defined(__AVX2__)
    return _mm256_movemask_epi8(reinterpret_cast<__m256i>(between)) == -1;
#else
    struct Words {
      int64_t of[2];
    };
    const auto words = std::bit_cast<Words>(between);
    return (words.of[0] & words.of[1]) == -1;
#endif
  }
};

// The two halves of a register of floats, as doubles.
FUSEDSTEP_FN void widen(const Pack<float>& x, Pack<double>& low, Pack<double>& high) {
#if defined(__AVX512F__)
  low.v = _mm512_cvtps_pd(_mm512_castps512_ps256(x.v));
  high.v = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1));
#elif defined(__AVX2__)
  low.v = _mm256_cvtps_pd(_mm256_castps256_ps128(x.v));
  high.v = _mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1));
#else
  low.v = Vector<double>{double{x.v[0]}, double{x.v[1]}};
  high.v = Vector<double>{double{x.v[2]}, double{x.v[3]}};
#endif
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
