// Products that project matrices on bases of low rank, and back, on the CPU.
#pragma once
#include <span>

#include "src/core/low_rank_product.h"

namespace fusedstep {

// Takes products by their parts in bfloat16, as the precision allows. Returns false, and takes none, where
// products of float32 are faster. The bits of results do not depend on the number of threads.
bool take_low_rank_products(std::span<const LowRankProduct> products, ProductPrecision precision,
                            int threads);

}  // namespace fusedstep
