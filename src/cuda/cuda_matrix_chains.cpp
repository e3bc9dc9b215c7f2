// Chains of matrix products on a GPU: the products of one level of all batches are one launch.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cuda_kernels/matrix_products.h"
#include "cuda_kernels/matrix_scalings.h"
#include "src/cuda/memory.h"
#include "src/run/backend.h"

namespace fusedstep::cuda {
namespace {

constexpr int64_t kNumberBytes = 2, kWordBytes = 16;

// The driver's function, by way of the runtime: libcuda is not linked.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto known = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult how{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &how),
          "asking the driver for tensor maps");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  if (known == nullptr)
    throw std::runtime_error("the CUDA driver knows no tensor maps: it is older than 12.0");
  return known;
}

CUtensorMap map_of(void* data, int64_t count, int64_t rows, int64_t columns, int64_t stride,
                   bool is_bfloat16) {
  const std::array<cuuint64_t, 3> sizes{static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                                        static_cast<cuuint64_t>(count)};
  const std::array<cuuint64_t, 2> strides{static_cast<cuuint64_t>(stride) * kNumberBytes,
                                          static_cast<cuuint64_t>(stride * rows) * kNumberBytes};
  const std::array<cuuint32_t, 3> box{kProductBox, kProductBox, 1}, one{1, 1, 1};
  CUtensorMap map{};
  const CUresult result = encoder()(
      &map, is_bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, data,
      sizes.data(), strides.data(), box.data(), one.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("the CUDA driver makes no tensor map of these matrices: error " +
                             std::to_string(result));
  }
  return map;
}

// The sum's length in an element of a product.
int depth_of(const ChainBatch& batch, ChainKind kind) {
  return static_cast<int>(kind == ChainKind::kGram ? std::max(batch.rows, batch.columns) : batch.side());
}

// Rows of the symmetric matrices of a batch are so far apart.
int64_t square_stride(const ChainBatch& batch) { return (batch.side() + 7) / 8 * 8; }

int64_t aligned(int64_t bytes) {
  constexpr int64_t kAlignment = 256;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

int64_t square_bytes(const ChainBatch& batch) {
  return aligned(batch.count * batch.side() * square_stride(batch) * kNumberBytes);
}

int64_t factor_bytes(const ChainBatch& batch) {
  if (!batch.has_factors()) return 0;
  return aligned(batch.count * square_stride(batch) * static_cast<int64_t>(sizeof(float)));
}

// Calls use(operand) for the symmetric matrices that a chain has.
template <class Use>
void each_square(const ChainBatch& batch, Use use) {
  for (int i = index_of(ChainOperand::kS0); i < kChainOperands; ++i) {
    const auto operand = static_cast<ChainOperand>(i);
    const auto is_written = [&](const ChainProduct& product) {
      return product.c == operand || product.shifted == operand;
    };
    if (std::ranges::any_of(batch.products, is_written)) use(operand);
  }
}

int64_t workspace_bytes(std::span<const ChainBatch> batches) {
  int64_t bytes = 0;
  for (const ChainBatch& batch : batches) {
    each_square(batch, [&](ChainOperand) { bytes += square_bytes(batch); });
    bytes += factor_bytes(batch);
  }
  return bytes;
}

// A batch, and the maps of its operands. Its symmetric matrices and factors lie from `workspace` on.
struct Mapped {
  const ChainBatch* batch;
  std::array<CUtensorMap, kChainOperands> maps;
  std::array<void*, kChainOperands> squares;
  float* factors;

  Mapped(const ChainBatch& of, bool is_bfloat16, std::byte*& workspace) : batch(&of), maps{}, squares{} {
    for (const ChainOperand whole : {ChainOperand::kX, ChainOperand::kY}) {
      void* const data = of.operands[index_of(whole)];
      if (reinterpret_cast<uintptr_t>(data) % kWordBytes != 0 ||
          of.columns * kNumberBytes % kWordBytes != 0) {
        throw std::runtime_error("x and y must be aligned to 16 bytes, and have a multiple of 8 columns");
      }
      maps[index_of(whole)] = map_of(data, of.count, of.rows, of.columns, of.columns, is_bfloat16);
    }
    const int64_t side = of.side();
    each_square(of, [&](ChainOperand square) {
      maps[index_of(square)] = map_of(workspace, of.count, side, side, square_stride(of), is_bfloat16);
      squares[index_of(square)] = workspace;
      workspace += square_bytes(of);
    });
    factors = reinterpret_cast<float*>(workspace);
    workspace += factor_bytes(of);
  }
  const CUtensorMap& map(ChainOperand operand) const { return maps[index_of(operand)]; }

  MatrixProduct product(const ChainProduct& of) const {
    const bool is_wide = batch->rows <= batch->columns;
    const int side = static_cast<int>(batch->side()), rows = static_cast<int>(batch->rows),
              columns = static_cast<int>(batch->columns);
    MatrixProduct made{};
    made.is_symmetric = of.kind != ChainKind::kWhole;
    made.rows = made.columns = side;
    made.depth = depth_of(*batch, of.kind);
    made.form = ProductForm::kRowsRows;
    made.a = map(of.a);
    made.b = map(of.b);
    if (of.kind == ChainKind::kGram && !is_wide) {
      made.form = ProductForm::kColumnsColumns;
    } else if (of.kind == ChainKind::kWhole) {
      made.rows = rows;
      made.columns = columns;
      if (is_wide) {
        made.form = ProductForm::kRowsColumns;
      } else {
        std::swap(made.a, made.b);
      }
    }
    made.c = map(of.c);
    made.d = map(of.d);
    made.shifted = map(of.shifted);
    made.alpha = of.alpha;
    made.beta = of.beta;
    made.is_shifted = of.shifted != ChainOperand::kNone;
    made.shift = of.shift;
    made.tile_columns = static_cast<uint32_t>((made.columns + kTileColumns - 1) / kTileColumns);
    made.tiles = product_tiles(made);
    return made;
  }

  SquareMatrices scaled(ChainOperand square) const {
    const int64_t side = batch->side();
    return {squares[index_of(square)],
            factors,
            batch->count * side,
            static_cast<int>(side),
            static_cast<int>(square_stride(*batch)),
            0};
  }
};

using Level = std::vector<std::pair<const Mapped*, const ChainProduct*>>;

void launch_products_of(Level& level, bool is_bfloat16, int device, Queue queue) {
  // Those that take longest first: what is left for the end is short.
  std::ranges::stable_sort(level, std::greater(),
                           [](const auto& each) { return depth_of(*each.first->batch, each.second->kind); });
  ProductLaunch launch{};
  launch.queue = queue;
  for (size_t first = 0; first < level.size(); first += ProductLaunch::kMostProducts) {
    launch.count = 0;
    launch.tiles = 0;
    for (size_t i = first; i < std::min(first + ProductLaunch::kMostProducts, level.size()); ++i) {
      const auto& [each, product] = level[i];
      MatrixProduct& made = launch.products[launch.count++] = each->product(*product);
      made.first_tile = launch.tiles;
      launch.tiles += made.tiles * static_cast<uint32_t>(each->batch->count);
    }
    launch_products(launch, is_bfloat16, device);
  }
}

void launch_scalings_of(const Level& level, ChainKind kind, bool is_bfloat16, Queue queue) {
  ScalingLaunch launch{};
  launch.queue = queue;
  launch.has_rows = kind == ChainKind::kScaleBoth;
  for (size_t first = 0; first < level.size(); first += ScalingLaunch::kMostBatches) {
    launch.count = 0;
    launch.blocks = 0;
    for (size_t i = first; i < std::min(first + ScalingLaunch::kMostBatches, level.size()); ++i) {
      SquareMatrices& made = launch.batches[launch.count++] = level[i].first->scaled(level[i].second->a);
      made.first_block = launch.blocks;
      launch.blocks += static_cast<uint32_t>((made.rows + kScalingRows - 1) / kScalingRows);
    }
    (kind == ChainKind::kFactors ? launch_factors : launch_scaling)(launch, is_bfloat16);
  }
}

bool are_taken(int device) { return has_matrix_products(device); }

void run(int device, bool is_bfloat16, std::span<const ChainBatch> batches, std::byte* workspace) {
  const DeviceGuard guard(device);
  std::vector<Mapped> mapped;
  mapped.reserve(batches.size());
  int levels = 0;
  for (const ChainBatch& batch : batches) {
    mapped.emplace_back(batch, is_bfloat16, workspace);
    if (!batch.products.empty()) levels = std::max(levels, batch.products.back().level + 1);
  }
  const Queue queue = {current_stream(device), can_start_early(device)};
  constexpr std::array kScalings = {ChainKind::kFactors, ChainKind::kScaleBoth, ChainKind::kScale};
  for (int level = 0; level < levels; ++level) {
    Level products;
    std::array<Level, kScalings.size()> scalings;
    for (const Mapped& each : mapped) {
      for (const ChainProduct& product : each.batch->products) {
        if (product.level != level) continue;
        const auto* const found = std::ranges::find(kScalings, product.kind);
        (found == kScalings.end() ? products : scalings[found - kScalings.begin()])
            .emplace_back(&each, &product);
      }
    }
    for (size_t i = 0; i < kScalings.size(); ++i)
      launch_scalings_of(scalings[i], kScalings[i], is_bfloat16, queue);
    launch_products_of(products, is_bfloat16, device, queue);
  }
  check(cudaGetLastError(), "launching matrix products, or in a kernel before them");
}

[[maybe_unused]] const bool registered = [] {
  register_cuda_chains({are_taken, workspace_bytes, run});
  return true;
}();

}  // namespace
}  // namespace fusedstep::cuda
