#include "src/steps/low_rank_products.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "src/run/dispatch.h"
#include "src/run/product_chain.h"

namespace fusedstep {
namespace {

using cpu::BFloat16Bits;

// Products follow one another in groups whose packed operands are no more than so many bytes together. Memory
// allocators keep what is no larger, so that a system need not give new pages to each call.
constexpr int64_t kMostPacked = int64_t{24} << 20;
constexpr int64_t kAlignment = 64;

int64_t blocks_of(int64_t side) { return (side + cpu::kBlockSide - 1) / cpu::kBlockSide; }

// The packing of the operand that a product finds packed, but for its place.
cpu::WidePacking packing_of(const cpu::WideProduct& product) {
  cpu::WidePacking packing;
  packing.is_left = product.left_is_packed();
  packing.from = packing.is_left ? product.left() : product.right();
  packing.rows = blocks_of(packing.from.rows);
  packing.columns = blocks_of(packing.from.columns);
  packing.parts = product.parts;
  return packing;
}

}  // namespace

bool take_low_rank_products(std::span<const LowRankProduct> products, ProductPrecision precision,
                            int threads) {
  const cpu::ProductKernels* const kernels = product_kernels();
  if (kernels == nullptr || !kernels->outruns_float || precision == ProductPrecision::kHighest) return false;
  run_low_rank_products(*kernels, products, precision == ProductPrecision::kHigh ? 2 : 1, threads);
  return true;
}

void run_low_rank_products(const cpu::ProductKernels& kernels, std::span<const LowRankProduct> products,
                           int parts, int threads) {
  struct Place {
    size_t group;
    int64_t number;  // of all that are packed for the group
  };
  std::vector<Place> places;
  std::vector<cpu::WideProduct> tasks;
  size_t group = 0;
  int64_t numbers = 0, most = 0;
  for (const LowRankProduct& product : products) {
    tasks.push_back({blocks_of(product.rows), blocks_of(product.columns), blocks_of(product.depth), product,
                     parts, nullptr});
    const cpu::WidePacking packing = packing_of(tasks.back());
    const int64_t more = parts * packing.rows * packing.columns * cpu::kBlockNumbers;
    if (numbers > 0 && (numbers + more) * static_cast<int64_t>(sizeof(BFloat16Bits)) > kMostPacked) {
      ++group;
      numbers = 0;
    }
    places.push_back({group, numbers});
    numbers += more;
    most = std::max(most, numbers);
  }
  const auto memory = std::make_unique_for_overwrite<std::byte[]>(most * sizeof(BFloat16Bits) + kAlignment);
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  auto* const packed = reinterpret_cast<BFloat16Bits*>((address + kAlignment - 1) / kAlignment * kAlignment);
  ProductChain chain;
  for (size_t i = 0; i < tasks.size(); ++i) {
    cpu::WidePacking packing = packing_of(tasks[i]);
    packing.to = packed + places[i].number;
    tasks[i].packed = packing.to;
    chain.add(2 * places[i].group, 1, packing);
    chain.add(2 * places[i].group + 1, 1, tasks[i]);
  }
  chain.run(kernels, threads);
}

}  // namespace fusedstep
