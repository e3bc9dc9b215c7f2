// Launches of the products that project matrices on bases of low rank, and back.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda_kernels/low_rank_products.h"
#include "cuda_kernels/matrix_products.h"
#include "src/cuda/memory.h"
#include "src/run/backend.h"

namespace fusedstep::cuda {
namespace {

constexpr int64_t kWordBytes = 16, kInWord = kWordBytes / static_cast<int64_t>(sizeof(float));

// In TF32 torch's products are faster from so many multiplications on: they take their operands from shared
// memory, and here a thread loads and rounds its own.
constexpr double kLongProduct = 2.5e9;

int64_t tiles_of(int side) { return (side + kLowRankTile - 1) / kLowRankTile; }
uint32_t tiles_of(const LowRankProduct& product) {
  return static_cast<uint32_t>(tiles_of(product.rows) * tiles_of(product.columns));
}

bool is_in_words(const float* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % kWordBytes == 0 && stride % kInWord == 0;
}

// A row in memory is copied in words: its length is a multiple of them.
bool is_in_words(const LowRankProduct& product) {
  const bool of_depth = product.form == ProductForm::kColumnsColumns || product.depth % kInWord == 0;
  const bool of_rows = product.form != ProductForm::kColumnsColumns || product.rows % kInWord == 0;
  return of_depth && of_rows && product.columns % kInWord == 0 && is_in_words(product.a, product.a_stride) &&
         is_in_words(product.b, product.b_stride) && is_in_words(product.c, product.c_stride);
}

bool is_short(const LowRankProduct& product) {
  return double{1} * product.rows * product.columns * product.depth < kLongProduct;
}

bool are_taken(int device, std::span<const LowRankProduct> products, ProductPrecision precision) {
  if (!has_matrix_products(device) ||
      !std::ranges::all_of(products, [](const LowRankProduct& product) { return is_in_words(product); })) {
    return false;
  }
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "asking for the multiprocessors of a device");
  int64_t tiles = 0;
  for (const LowRankProduct& product : products) tiles += tiles_of(product);
  // Each tile is of one block: with fewer than these half of the device would wait.
  return 2 * tiles >= multiprocessors &&
         (precision == ProductPrecision::kHighest || std::ranges::all_of(products, is_short));
}

bool take(int device, std::span<const LowRankProduct> products, ProductPrecision precision) {
  const DeviceGuard guard(device);
  if (!are_taken(device, products, precision)) return false;
  LowRankLaunch launch{};
  launch.queue.stream = current_stream(device);
  for (size_t first = 0; first < products.size(); first += LowRankLaunch::kMostProducts) {
    const auto some =
        products.subspan(first, std::min<size_t>(LowRankLaunch::kMostProducts, products.size() - first));
    launch.count = 0;
    launch.tiles = 0;
    for (const LowRankProduct& product : some) {
      launch.products[launch.count++] = {product, static_cast<uint32_t>(tiles_of(product.columns)),
                                         launch.tiles};
      launch.tiles += tiles_of(product);
    }
    launch_low_rank_products(launch, precision == ProductPrecision::kHighest);
  }
  check(cudaGetLastError(), "launching products, or in a kernel before them");
  return true;
}

[[maybe_unused]] const bool registered = [] {
  register_cuda_low_rank_products(take);
  return true;
}();

}  // namespace
}  // namespace fusedstep::cuda
