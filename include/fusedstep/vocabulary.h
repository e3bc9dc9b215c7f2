// The words that every rule is written in, for one number: fused multiply-add, square root, maximum, sign and
// others.
//
// A rule is a template on its pack type V. For V = float or double (the tail of an array, a CUDA thread, an
// oracle) these functions are found here; for a SIMD pack they are found beside the pack
// (cpu_kernels/pack.h).
#pragma once

// Rules are always inlined, at every optimisation level: an out-of-line copy would be a weak symbol, and the
// linker could then keep the AVX-512 copy for a machine that has none.
#if defined(__CUDACC__)
#define FUSEDSTEP_FN __host__ __device__ __forceinline__
#else
#define FUSEDSTEP_FN inline __attribute__((always_inline))
#endif

namespace fusedstep::rules {

// a * b + c rounded once, on every instruction set: results must not depend on whether one has the
// instruction.
#if defined(__CUDA_ARCH__)
FUSEDSTEP_FN float mul_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FUSEDSTEP_FN double mul_add(double a, double b, double c) { return __fma_rn(a, b, c); }

FUSEDSTEP_FN float square_root(float x) { return __fsqrt_rn(x); }
FUSEDSTEP_FN double square_root(double x) { return __dsqrt_rn(x); }
#else
FUSEDSTEP_FN float mul_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FUSEDSTEP_FN double mul_add(double a, double b, double c) { return __builtin_fma(a, b, c); }

FUSEDSTEP_FN float square_root(float x) { return __builtin_sqrtf(x); }
FUSEDSTEP_FN double square_root(double x) { return __builtin_sqrt(x); }
#endif

// The larger of two numbers; NaN if either is NaN, as torch.maximum.
FUSEDSTEP_FN float maximum(float a, float b) { return a > b || a != a ? a : b; }
FUSEDSTEP_FN double maximum(double a, double b) { return a > b || a != a ? a : b; }

// 1, -1, or 0 for zeros and NaN, as torch.sign.
FUSEDSTEP_FN float sign_of(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f; }
FUSEDSTEP_FN double sign_of(double x) { return x > 0 ? 1.0 : x < 0 ? -1.0 : 0.0; }

FUSEDSTEP_FN float absolute(float x) { return __builtin_fabsf(x); }
FUSEDSTEP_FN double absolute(double x) { return __builtin_fabs(x); }

// x where a and b are equal, else y.
FUSEDSTEP_FN float where_equal(float a, float b, float x, float y) { return a == b ? x : y; }
FUSEDSTEP_FN double where_equal(double a, double b, double x, double y) { return a == b ? x : y; }

// The states of an element or a register of them. There may be none.
template <class V, int kCount>
struct States {
  V of[static_cast<unsigned>(kCount)];
  FUSEDSTEP_FN V& operator[](int k) { return of[k]; }
  FUSEDSTEP_FN const V& operator[](int k) const { return of[k]; }
};
template <class V>
struct States<V, 0> {
  FUSEDSTEP_FN V& operator[](int) const { __builtin_unreachable(); }
};

}  // namespace fusedstep::rules
