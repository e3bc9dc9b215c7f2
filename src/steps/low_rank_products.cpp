#include "src/steps/low_rank_products.h"

#include "src/run/dispatch.h"
#include "src/run/product_chain.h"

namespace fusedstep {
namespace {

int64_t blocks_of(int64_t side) { return (side + cpu::kBlockSide - 1) / cpu::kBlockSide; }

}  // namespace

bool take_low_rank_products(std::span<const LowRankProduct> products, ProductPrecision precision,
                            int threads) {
  const cpu::ProductKernels* const kernels = product_kernels();
  if (kernels == nullptr || !kernels->outruns_float || precision == ProductPrecision::kHighest) return false;
  ProductChain tasks;
  for (const LowRankProduct& product : products) {
    cpu::WideProduct task;
    task.rows = blocks_of(product.rows);
    task.columns = blocks_of(product.columns);
    task.depth = blocks_of(product.depth);
    task.of = product;
    task.parts = precision == ProductPrecision::kHigh ? 2 : 1;
    tasks.add(0, 1, task);
  }
  tasks.run(*kernels, threads);
  return true;
}

}  // namespace fusedstep
