// Chained matrix products on Hopper's tensor cores. A block of threads computes a tile of one result: a warp
// copies parts of the operands to shared memory, stage by stage, and two warp groups multiply them. D and E
// go through the same stages. Of a symmetric result a block writes its tile and the tile's transpose.
#include "cuda_kernels/matrix_products.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda_kernels/launch.cuh"
#include "cuda_kernels/tensor_copy.cuh"
#include "cuda_kernels/warp_group.cuh"

namespace fusedstep::cuda {
namespace {

constexpr int kStages = 3, kMultipliers = 2;              // warp groups that multiply
constexpr int kProductThreads = kMultipliers * 128 + 32;  // and a warp that copies
constexpr int kBoxBytes = kProductBox * kProductBox * 2, kBoxes = kProductTile / kProductBox;
constexpr int kOperandBytes = kProductTile * kProductDepth * 2, kStageBytes = 2 * kOperandBytes;
constexpr int kResident = 2;  // blocks on a multiprocessor: one writes its tile while the other multiplies
constexpr size_t kSharedBytes = kStages * kStageBytes + 1024;  // stages begin at a multiple of 1024
static_assert(kBoxes * kBoxes * kBoxBytes == kStageBytes, "a tile of D fills a stage");

// A stage is full when its copies have arrived, and empty when both warp groups have read it.
struct Pipeline {
  alignas(8) uint64_t full[kStages], empty[kStages];
};

struct Position {
  int stage = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1u;
    }
  }
};

// A block's tile: its matrix, first row and first column.
struct Tile {
  int matrix, row, column;
};

__device__ __forceinline__ Tile tile_of(const MatrixProduct& product, uint32_t block) {
  const uint32_t index = block - product.first_block, matrix = index / product.tiles;
  const uint32_t tile = index % product.tiles;
  if (!product.is_symmetric) {
    return {static_cast<int>(matrix), static_cast<int>(tile / product.tile_columns) * kProductTile,
            static_cast<int>(tile % product.tile_columns) * kProductTile};
  }
  // Row r of the lower triangle begins at r (r + 1) / 2.
  auto row = static_cast<uint32_t>((sqrtf(8.0f * static_cast<float>(tile) + 1.0f) - 1.0f) * 0.5f);
  while (row * (row + 1) / 2 > tile) --row;
  while ((row + 1) * (row + 2) / 2 <= tile) ++row;
  return {static_cast<int>(matrix), static_cast<int>(row) * kProductTile,
          static_cast<int>(tile - row * (row + 1) / 2) * kProductTile};
}

// Copies one operand of a stage: 128 rows (or columns, of a matrix that lies by columns) and 64 deep.
template <bool kByColumns>
__device__ __forceinline__ void copy_operand(std::byte* to, const CUtensorMap& from, int along, int deep,
                                             int matrix, uint64_t& full) {
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    const int at = along + box * kProductBox;
    copy_box(to + box * kBoxBytes, from, kByColumns ? at : deep, kByColumns ? deep : at, matrix, full);
  }
}

template <ProductForm kForm>
__device__ __forceinline__ void copy_all(const MatrixProduct& product, const Tile& tile, std::byte* stages,
                                         Pipeline& pipeline) {
  Position at;
  const auto next = [&] {
    wait_for(pipeline.empty[at.stage], at.phase ^ 1u);
    expect_bytes(pipeline.full[at.stage], kStageBytes);
    return stages + at.stage * kStageBytes;
  };
  for (int deep = 0; deep < product.depth; deep += kProductDepth, at.advance()) {
    std::byte* const to = next();
    uint64_t& full = pipeline.full[at.stage];
    copy_operand<kForm == ProductForm::kColumnsColumns>(to, product.a, tile.row, deep, tile.matrix, full);
    copy_operand<kForm != ProductForm::kRowsRows>(to + kOperandBytes, product.b, tile.column, deep,
                                                  tile.matrix, full);
  }
  const auto copy_addend = [&](const CUtensorMap& from) {
    std::byte* const to = next();
#pragma unroll
    for (int box = 0; box < kBoxes * kBoxes; ++box) {
      copy_box(to + box * kBoxBytes, from, tile.column + box % kBoxes * kProductBox,
               tile.row + box / kBoxes * kProductBox, tile.matrix, pipeline.full[at.stage]);
    }
    at.advance();
  };
  if (product.beta != 0) copy_addend(product.d);
  if (product.gamma != 0) copy_addend(product.e);
}

// Multiplies the stages into the sums of a warp group: 64 rows of the tile.
template <class T, ProductForm kForm>
__device__ __forceinline__ void multiply_all(const MatrixProduct& product, int group, std::byte* stages,
                                             Pipeline& pipeline, Position& at, float (&sums)[64]) {
  constexpr bool kAByColumns = kForm == ProductForm::kColumnsColumns;
  constexpr bool kBByColumns = kForm != ProductForm::kRowsRows;
  constexpr int kInstruction = 16;  // deep
  // In units of 16 bytes: an instruction goes on by 32 bytes of each row, or by 16 rows of 128 bytes.
  constexpr int kStepA = kAByColumns ? kInstruction * 8 : 2, kStepB = kBByColumns ? kInstruction * 8 : 2;
  int before = -1;
  const int parts = (product.depth + kProductDepth - 1) / kProductDepth;
  for (int part = 0; part < parts; ++part) {
    wait_for(pipeline.full[at.stage], at.phase);
    const std::byte* const operands = stages + at.stage * kStageBytes;
    // 64 rows, or columns, are one box either way.
    const uint64_t a = describe_boxes<kAByColumns>(operands + group * kBoxBytes);
    const uint64_t b = describe_boxes<kBByColumns>(operands + kOperandBytes);
    hold(sums);
    begin_products();
#pragma unroll
    for (int k = 0; k < kProductDepth / kInstruction; ++k) {
      Multiply16<T>::template run<kAByColumns, kBByColumns>(sums, a + k * kStepA, b + k * kStepB,
                                                            part + k > 0);
    }
    commit_products();
    hold(sums);
    // The products of the stage before are over: others may be under way.
    wait_for_products<1>();
    if (before >= 0) arrive_once(pipeline.empty[before]);
    before = at.stage;
    at.advance();
  }
  wait_for_products<0>();
  hold(sums);
  if (before >= 0) arrive_once(pipeline.empty[before]);
}

template <class T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ uint32_t pack(float x, float y) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(both);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t both) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(both));
  }
};
template <>
struct Pair<__half> {
  static __device__ __forceinline__ uint32_t pack(float x, float y) {
    const __half2 both = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(both);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t both) {
    return __half22float2(reinterpret_cast<const __half2&>(both));
  }
};

template <class T>
__global__ void __launch_bounds__(kProductThreads, kResident)
    product_kernel(const __grid_constant__ ProductLaunch launch) {
  extern __shared__ std::byte unaligned[];
  std::byte* const stages = unaligned + ((1024u - (shared_address(unaligned) & 1023u)) & 1023u);
  __shared__ Pipeline pipeline;
  let_next_kernel_begin();
  int index = 0;
  while (index + 1 < launch.count && launch.products[index + 1].first_block <= blockIdx.x) ++index;
  const MatrixProduct& product = launch.products[index];
  const Tile tile = tile_of(product, blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x), group = thread / 128;
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      begin_barrier(pipeline.full[stage], 1);
      begin_barrier(pipeline.empty[stage], kMultipliers);
    }
    show_barriers();
  }
  __syncthreads();

  if (group == kMultipliers) {
    if (thread % kWarp == 0) {
      wait_for_kernel_before();
      switch (product.form) {
        case ProductForm::kRowsRows:
          copy_all<ProductForm::kRowsRows>(product, tile, stages, pipeline);
          break;
        case ProductForm::kRowsColumns:
          copy_all<ProductForm::kRowsColumns>(product, tile, stages, pipeline);
          break;
        case ProductForm::kColumnsColumns:
          copy_all<ProductForm::kColumnsColumns>(product, tile, stages, pipeline);
          break;
      }
    }
    return;
  }

  float sums[64];
  Position at;
  switch (product.form) {
    case ProductForm::kRowsRows:
      multiply_all<T, ProductForm::kRowsRows>(product, group, stages, pipeline, at, sums);
      break;
    case ProductForm::kRowsColumns:
      multiply_all<T, ProductForm::kRowsColumns>(product, group, stages, pipeline, at, sums);
      break;
    case ProductForm::kColumnsColumns:
      multiply_all<T, ProductForm::kColumnsColumns>(product, group, stages, pipeline, at, sums);
      break;
  }
  // Of every 8 columns a thread has two neighbours of a row, and two of the row 8 below.
  const int lane = thread % kWarp, warp = thread % 128 / kWarp;
  const int row = warp * 16 + lane / 4;  // in the box of the warp group
#pragma unroll
  for (float& sum : sums) sum *= product.alpha;
  // The word of two columns in a box of 64 rows of 128 bytes, whose 16-byte words are permuted.
  const auto word = [&](std::byte* box, int r, int column) {
    return reinterpret_cast<uint32_t*>(box + r * 128 + ((column * 2) ^ (r % 8 << 4)));
  };
  const auto add = [&](float factor) {
    wait_for(pipeline.full[at.stage], at.phase);
    std::byte* const boxes = stages + at.stage * kStageBytes + group * kBoxes * kBoxBytes;
#pragma unroll
    for (int j = 0; j < kProductTile / 8; ++j) {
      const int column = j * 8 + lane % 4 * 2;
      std::byte* const box = boxes + column / kProductBox * kBoxBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 found = Pair<T>::unpack(*word(box, row + half * 8, column % kProductBox));
        sums[4 * j + 2 * half] = fmaf(factor, found.x, sums[4 * j + 2 * half]);
        sums[4 * j + 2 * half + 1] = fmaf(factor, found.y, sums[4 * j + 2 * half + 1]);
      }
    }
    at.advance();
  };
  if (product.beta != 0) add(product.beta);
  if (product.gamma != 0) add(product.gamma);
  if (product.identity != 0 && tile.row == tile.column) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int r = group * kProductBox + row + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (r == column) sums[i] += product.identity;
    }
  }

  // All copies have arrived, and the other warp group has read them: the stages are free.
  wait_for_threads<1, kMultipliers * 128>();
  std::byte* const out = stages + group * kBoxes * kBoxBytes;
#pragma unroll
  for (int j = 0; j < kProductTile / 8; ++j) {
    const int column = j * 8 + lane % 4 * 2;
    std::byte* const box = out + column / kProductBox * kBoxBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *word(box, row + half * 8, column % kProductBox) =
          Pair<T>::pack(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
    }
  }
  const bool is_mirrored = product.is_symmetric && tile.row != tile.column;
  std::byte* const mirrored = stages + kStageBytes + group * kBoxes * kBoxBytes;
  if (is_mirrored) {
    // Lanes 0 to 7 name the rows of the first of four 8 x 8 matrices, and so on: columns j and j + 1, rows 0 and 8.
    const int of = lane / 8, in_matrix = lane % 8;
#pragma unroll
    for (int j = 0; j < kProductTile / 8; j += 2) {
      const int n = (j + of / 2) * 8 + in_matrix, m = warp * 16 + of % 2 * 8;
      store_transposed(word(mirrored + n / kProductBox * kBoxBytes, n % kProductBox, m),
                       Pair<T>::pack(sums[4 * j], sums[4 * j + 1]),
                       Pair<T>::pack(sums[4 * j + 2], sums[4 * j + 3]),
                       Pair<T>::pack(sums[4 * j + 4], sums[4 * j + 5]),
                       Pair<T>::pack(sums[4 * j + 6], sums[4 * j + 7]));
    }
  }
  show_to_copies();
  if (group == 0) {
    wait_for_threads<2, 128>();
  } else {
    wait_for_threads<3, 128>();
  }
  if (thread % 128 == 0) {
    const int first = tile.row + group * kProductBox;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int along = tile.column + box * kProductBox;
      store_box(product.c, along, first, tile.matrix, out + box * kBoxBytes);
      if (is_mirrored) store_box(product.c, first, along, tile.matrix, mirrored + box * kBoxBytes);
    }
    wait_for_stores();
  }
}

}  // namespace

bool has_matrix_products(int device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major == 9 && minor == 0;
}

void launch_products(const ProductLaunch& launch, bool is_bfloat16) {
  const auto kernel = is_bfloat16 ? product_kernel<__nv_bfloat16> : product_kernel<__half>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  launch_with_memory(kernel, launch.blocks, kProductThreads, kSharedBytes, launch.queue, launch);
}

}  // namespace fusedstep::cuda
