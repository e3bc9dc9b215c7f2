// The numbers that a thread works on side by side, as the V of a rule.
//
// A division or root of its own, rounded as IEEE wants, ends in a branch to a slow way for what is out of
// range: four of them take turns. Here the fast ways of all numbers run interleaved, and one branch is taken
// if any of them is out of range: 0 is not.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda_kernels/launch.cuh"
#include "fusedstep/vocabulary.h"

namespace fusedstep::cuda {

namespace fast {

__device__ __forceinline__ uint32_t magnitude(float x) {
  uint32_t bits = 0;
  memcpy(&bits, &x, sizeof x);
  return bits & 0x7fffffffu;
}
// True if 2^low <= |x| < 2^high.
template <int kLow, int kHigh>
__device__ __forceinline__ bool is_within(float x) {
  constexpr int kBias = 127, kMantissa = 23;
  constexpr uint32_t kLeast = (kLow + kBias) << kMantissa, kRange = (kHigh - kLow) << kMantissa;
  return magnitude(x) - kLeast < kRange;
}

// Within these no step of the divisions below leaves the normal numbers.
__device__ __forceinline__ bool can_divide(float a, float b) {
  return (is_within<-90, 60>(a) | (a == 0)) & is_within<-60, 30>(b);
}
// Newton's step for the reciprocal and two for the quotient, each with an exact remainder (Markstein, 1990).
// The compiler's own division has one step less. The root below is the compiler's.
__device__ __forceinline__ float divide(float a, float b) {
  const auto fma = [](float x, float y, float z) { return rules::mul_add(x, y, z); };
  float r = approximate_reciprocal(b);
  r = fma(fma(-b, r, 1), r, r);
  const float first = a * r, second = fma(fma(-b, first, a), r, first);
  const float quotient = fma(fma(-b, second, a), r, second);
  return a == 0 ? first : quotient;  // with its sign
}

__device__ __forceinline__ bool can_take_root(float x) { return is_within<-100, 120>(x) | (x == 0); }
__device__ __forceinline__ float root(float x) {
  const float y = approximate_inverse_root(x), root = x * y;
  const float exact = rules::mul_add(rules::mul_add(-root, root, x), y * 0.5f, root);
  return x == 0 ? x : exact;
}

}  // namespace fast

template <class T, int N>
struct Pack {
  T of[N];

  Pack() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): a number stands for a pack of it
  __device__ __forceinline__ Pack(T x) {
    each([&](int j) { of[j] = x; });
  }
  explicit __device__ __forceinline__ Pack(const T* x) {
    each([&](int j) { of[j] = x[j]; });
  }
  __device__ __forceinline__ void copy_to(T* x) const {
    each([&](int j) { x[j] = of[j]; });
  }

  template <class Run>
  static __device__ __forceinline__ void each(const Run& run) {
#pragma unroll
    for (int j = 0; j < N; ++j) run(j);
  }
  template <class Make>
  static __device__ __forceinline__ Pack of_each(const Make& make) {
    Pack pack;
    each([&](int j) { pack.of[j] = make(j); });
    return pack;
  }

  friend __device__ __forceinline__ Pack operator+(const Pack& a, const Pack& b) {
    return of_each([&](int j) { return a.of[j] + b.of[j]; });
  }
  friend __device__ __forceinline__ Pack operator-(const Pack& a, const Pack& b) {
    return of_each([&](int j) { return a.of[j] - b.of[j]; });
  }
  friend __device__ __forceinline__ Pack operator*(const Pack& a, const Pack& b) {
    return of_each([&](int j) { return a.of[j] * b.of[j]; });
  }
  friend __device__ __forceinline__ Pack operator-(const Pack& a) {
    return of_each([&](int j) { return -a.of[j]; });
  }
  friend __device__ __forceinline__ Pack operator/(const Pack& a, const Pack& b) {
    if constexpr (std::is_same_v<T, float>) {
      bool in_range = true;
      each([&](int j) { in_range &= fast::can_divide(a.of[j], b.of[j]); });
      if (in_range) return of_each([&](int j) { return fast::divide(a.of[j], b.of[j]); });
    }
    return of_each([&](int j) { return a.of[j] / b.of[j]; });
  }
  friend __device__ __forceinline__ Pack square_root(const Pack& a) {
    if constexpr (std::is_same_v<T, float>) {
      bool in_range = true;
      each([&](int j) { in_range &= fast::can_take_root(a.of[j]); });
      if (in_range) return of_each([&](int j) { return fast::root(a.of[j]); });
    }
    return of_each([&](int j) { return rules::square_root(a.of[j]); });
  }
  friend __device__ __forceinline__ Pack mul_add(const Pack& a, const Pack& b, const Pack& c) {
    return of_each([&](int j) { return rules::mul_add(a.of[j], b.of[j], c.of[j]); });
  }
  friend __device__ __forceinline__ Pack maximum(const Pack& a, const Pack& b) {
    return of_each([&](int j) { return rules::maximum(a.of[j], b.of[j]); });
  }
  friend __device__ __forceinline__ Pack sign_of(const Pack& a) {
    return of_each([&](int j) { return rules::sign_of(a.of[j]); });
  }
  friend __device__ __forceinline__ Pack absolute(const Pack& a) {
    return of_each([&](int j) { return rules::absolute(a.of[j]); });
  }
  friend __device__ __forceinline__ Pack where_equal(const Pack& a, const Pack& b, const Pack& x,
                                                     const Pack& y) {
    return of_each([&](int j) { return rules::where_equal(a.of[j], b.of[j], x.of[j], y.of[j]); });
  }
};

}  // namespace fusedstep::cuda
