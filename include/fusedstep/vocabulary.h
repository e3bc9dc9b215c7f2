// The words that every rule is written in: fused multiply-add, square root and maximum of one number.
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

}  // namespace fusedstep::rules
