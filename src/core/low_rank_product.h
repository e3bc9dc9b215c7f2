// Products that project matrices on bases of low rank, and back.
#pragma once
#include <cstdint>

#include "src/core/product_form.h"

namespace fusedstep {

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
