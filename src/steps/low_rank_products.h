// Products that project matrices on bases of low rank, and back, on the CPU.
#pragma once
#include <span>

#include "cpu_kernels/products.h"
#include "src/core/low_rank_product.h"

namespace fusedstep {

// Takes products by their parts in bfloat16, as the precision allows. Returns false, and takes none, where
// products of float32 are faster. The bits of results do not depend on the number of threads.
bool take_low_rank_products(std::span<const LowRankProduct> products, ProductPrecision precision,
                            int threads);

// Takes products by one part of their numbers in bfloat16, or two, with the kernels of one instruction set.
// Allocates before anything is written.
void run_low_rank_products(const cpu::ProductKernels& kernels, std::span<const LowRankProduct> products,
                           int parts, int threads);

}  // namespace fusedstep
