// Products that project matrices on bases of low rank, and back.
#pragma once
#include <cstdint>

#include "src/core/product_form.h"

namespace fusedstep {

// What a product may round its operands to, in the words of torch.set_float32_matmul_precision.
enum class ProductPrecision : uint8_t {
  kHighest,  // as exact as sums of float32
  kHigh,     // TF32, or two parts of bfloat16
  kMedium,   // TF32, or bfloat16
};

// C = alpha A B + beta C, of float32 numbers. Strides are from one row in memory to the next. With a beta of
// 0 nothing is read of C.
struct LowRankProduct {
  const float *a, *b;
  float* c;
  int64_t a_stride, b_stride, c_stride;
  int rows, columns, depth;
  float alpha, beta;
  ProductForm form;
};

}  // namespace fusedstep
