// Chained matrix products on Hopper's tensor cores. A block of threads goes from tile to tile of the results:
// a warp copies parts of the operands to shared memory, stage by stage, ahead of two warp groups that
// multiply them. D goes through the same stages. Of a symmetric result a block writes a tile and its
// transpose.
#include "cuda_kernels/matrix_products.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda_kernels/launch.cuh"
#include "cuda_kernels/tensor_copy.cuh"
#include "cuda_kernels/warp_group.cuh"

namespace fusedstep::cuda {
namespace {

// Warp groups: two that multiply, 64 rows of a tile each, and that of the warp that copies.
constexpr int kGroup = 128, kMultipliers = 2, kProductThreads = (kMultipliers + 1) * kGroup;
constexpr int kDepth = 64, kStages = 4;  // a stage is so deep
constexpr int kBox = kProductBox, kBoxBytes = kBox * kBox * 2;
constexpr int kRowBoxes = kTileRows / kBox, kColumnBoxes = kTileColumns / kBox;
constexpr int kStageBytes = (kRowBoxes + kColumnBoxes) * kBoxBytes;
// A tile of D takes two stages: half of the columns each.
constexpr int kAddendBoxes = kColumnBoxes / 2, kAddendBytes = kRowBoxes * kAddendBoxes * kBoxBytes;
static_assert(kAddendBytes <= kStageBytes);
// Each warp group writes a box while the one before is stored.
constexpr int kOutBytes = kMultipliers * 2 * kBoxBytes;
constexpr size_t kSharedBytes = kStages * kStageBytes + kOutBytes + 1024;  // boxes begin at multiples of 1024
constexpr int kSums = kTileColumns / 2;                                    // of a thread

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

// A tile: its matrix, first row and first column.
struct Tile {
  int matrix, row, column;
};

__device__ __forceinline__ Tile tile_of(const MatrixProduct& product, uint32_t number) {
  const uint32_t index = number - product.first_tile, matrix = index / product.tiles;
  const uint32_t tile = index % product.tiles;
  uint32_t row = tile / product.tile_columns, column = tile % product.tile_columns;
  if (product.is_symmetric) {
    // Before pair p of rows are p (p + 1) tiles, and each row of the pair has p + 1.
    auto pair = static_cast<uint32_t>((sqrtf(4.0f * static_cast<float>(tile) + 1.0f) - 1.0f) * 0.5f);
    while (pair * (pair + 1) > tile) --pair;
    while ((pair + 1) * (pair + 2) <= tile) ++pair;
    const uint32_t in_pair = tile - pair * (pair + 1);
    row = 2 * pair + in_pair / (pair + 1);
    column = in_pair % (pair + 1);
  }
  return {static_cast<int>(matrix), static_cast<int>(row) * kTileRows,
          static_cast<int>(column) * kTileColumns};
}

// Calls run(product, tile) for the tiles of a block.
template <class Run>
__device__ __forceinline__ void for_tiles(const ProductLaunch& launch, Run run) {
  int index = 0;
  for (uint32_t number = blockIdx.x; number < launch.tiles; number += gridDim.x) {
    while (index + 1 < launch.count && launch.products[index + 1].first_tile <= number) ++index;
    const MatrixProduct& product = launch.products[index];
    run(product, tile_of(product, number));
  }
}

// Copies one operand of a stage: boxes along the rows (or columns, of a matrix that lies by columns).
template <bool kByColumns, int kCount>
__device__ __forceinline__ void copy_operand(std::byte* to, const CUtensorMap& from, int along, int deep,
                                             int matrix, uint64_t& full) {
#pragma unroll
  for (int box = 0; box < kCount; ++box) {
    const int at = along + box * kBox;
    copy_box(to + box * kBoxBytes, from, kByColumns ? at : deep, kByColumns ? deep : at, matrix, full);
  }
}

// The work of the warp that copies: it fills empty stages with the operands of a tile.
class Copies {
 public:
  __device__ __forceinline__ Copies(std::byte* stages, Pipeline& pipeline)
      : stages_(stages), pipeline_(&pipeline) {}

  template <ProductForm kForm>
  __device__ __forceinline__ void operands(const MatrixProduct& product, const Tile& tile) {
    for (int deep = 0; deep < product.depth; deep += kDepth) {
      std::byte* const to = begin(kStageBytes);
      copy_operand<kForm == ProductForm::kColumnsColumns, kRowBoxes>(to, product.a, tile.row, deep,
                                                                     tile.matrix, full());
      copy_operand<kForm != ProductForm::kRowsRows, kColumnBoxes>(to + kRowBoxes * kBoxBytes, product.b,
                                                                  tile.column, deep, tile.matrix, full());
      at_.advance();
    }
  }
  // The columns of one of two halves of a tile of D.
  __device__ __forceinline__ void addend(const CUtensorMap& from, const Tile& tile, int half) {
    std::byte* const to = begin(kAddendBytes);
#pragma unroll
    for (int box = 0; box < kRowBoxes * kAddendBoxes; ++box) {
      const int column = half * kAddendBoxes + box % kAddendBoxes;
      copy_box(to + box * kBoxBytes, from, tile.column + column * kBox, tile.row + box / kAddendBoxes * kBox,
               tile.matrix, full());
    }
    at_.advance();
  }

 private:
  __device__ __forceinline__ std::byte* begin(unsigned bytes) {
    wait_for(pipeline_->empty[at_.stage], at_.phase ^ 1u);
    expect_bytes(full(), bytes);
    return stages_ + at_.stage * kStageBytes;
  }
  __device__ __forceinline__ uint64_t& full() { return pipeline_->full[at_.stage]; }

  std::byte* stages_;
  Pipeline* pipeline_;
  Position at_;
};

// Multiplies a stage into the sums of a warp group: 64 rows of the tile.
template <class T, ProductForm kForm>
__device__ __forceinline__ void multiply(const std::byte* operands, int group, bool adds,
                                         float (&sums)[kSums]) {
  constexpr bool kAByColumns = kForm == ProductForm::kColumnsColumns;
  constexpr bool kBByColumns = kForm != ProductForm::kRowsRows;
  constexpr int kInstruction = 16;  // deep
  // In units of 16 bytes: an instruction goes on by 32 bytes of each row, or by 16 rows of 128 bytes.
  constexpr int kStepA = kAByColumns ? kInstruction * 8 : 2, kStepB = kBByColumns ? kInstruction * 8 : 2;
  // 64 rows of A, or columns, are one box either way.
  const uint64_t a = describe_boxes<kAByColumns>(operands + group * kBoxBytes);
  const uint64_t b = describe_boxes<kBByColumns>(operands + kRowBoxes * kBoxBytes);
  hold(sums);
  begin_products();
#pragma unroll
  for (int k = 0; k < kDepth / kInstruction; ++k) {
    Multiply16<T>::template run<kAByColumns, kBByColumns>(sums, a + k * kStepA, b + k * kStepB,
                                                          adds || k > 0);
  }
  commit_products();
  hold(sums);
}

// Multiplies the stages of a tile.
template <class T>
__device__ __forceinline__ void multiply_all(const MatrixProduct& product, int group, std::byte* stages,
                                             Pipeline& pipeline, Position& at, float (&sums)[kSums]) {
  int before = -1;
  const int parts = (product.depth + kDepth - 1) / kDepth;
  const ProductForm form = product.form;
#pragma unroll 1
  for (int part = 0; part < parts; ++part) {
    wait_for(pipeline.full[at.stage], at.phase);
    const std::byte* const operands = stages + at.stage * kStageBytes;
    if (form == ProductForm::kRowsRows) {
      multiply<T, ProductForm::kRowsRows>(operands, group, part > 0, sums);
    } else if (form == ProductForm::kRowsColumns) {
      multiply<T, ProductForm::kRowsColumns>(operands, group, part > 0, sums);
    } else {
      multiply<T, ProductForm::kColumnsColumns>(operands, group, part > 0, sums);
    }
    // The products of the previous stage are complete. The products of this stage may still run.
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

// A thread's place in the sums of a warp group: of every 8 columns it has two neighbours of a row, and two of
// the row 8 below.
struct Place {
  int group, warp, lane, row, column;
  __device__ __forceinline__ explicit Place(int thread)
      : group(thread / kGroup),
        warp(thread % kGroup / kWarp),
        lane(thread % kWarp),
        row(warp * 16 + lane / 4),
        column(lane % 4 * 2) {}
  // Has the compiler compute addresses where they are used: there are not enough registers to keep them.
  __device__ __forceinline__ void compute_anew() {
    asm volatile("" : "+r"(warp), "+r"(lane), "+r"(row), "+r"(column));
  }
};

// Two columns, or one, in a box of rows of 128 bytes, whose 16-byte words are permuted.
template <class T = uint32_t>
__device__ __forceinline__ T* word(std::byte* box, int row, int column) {
  return reinterpret_cast<T*>(box + row * 128 + ((column * 2) ^ (row % 8 << 4)));
}

constexpr int kPart = kBox / 2;  // sums of a thread in a box of its warp group

// Adds a box of D to a part of the sums.
template <class T>
__device__ __forceinline__ void add(float factor, const Place& place, std::byte* box, float (&part)[kPart]) {
#pragma unroll
  for (int j = 0; j < kBox / 8; ++j) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const float2 found = Pair<T>::unpack(*word(box, place.row + below * 8, j * 8 + place.column));
      float* const of = part + 4 * j + 2 * below;
      of[0] = fmaf(factor, found.x, of[0]);
      of[1] = fmaf(factor, found.y, of[1]);
    }
  }
}

// Adds a number to the diagonal of a box, once its sums have been rounded.
template <class T>
__device__ __forceinline__ void add_to_diagonal(float number, const Place& place, float (&part)[kPart]) {
  const auto add = [&](float& sum) { sum = Pair<T>::unpack(Pair<T>::pack(sum, 0)).x + number; };
  const int column = place.row - place.column;  // of the diagonal, from the first of the thread's
#pragma unroll
  for (int i = 0; i < kPart; i += 4) {
    if (column == 2 * i) add(part[i]);
    if (column == 2 * i + 1) add(part[i + 1]);
    if (column + 8 == 2 * i) add(part[i + 2]);
    if (column + 8 == 2 * i + 1) add(part[i + 3]);
  }
}

// Stores boxes of results of a warp group, each while the next is written.
template <class T>
class Stores {
 public:
  __device__ __forceinline__ Stores(std::byte* out, const Place& place)
      : out_(out + place.group * 2 * kBoxBytes), group_(place.group), is_first_(threadIdx.x % kGroup == 0) {}

  __device__ __forceinline__ void box(const CUtensorMap& to, int column, int row, int matrix,
                                      const Place& place, const float (&part)[kPart]) {
    std::byte* const box = begin();
#pragma unroll
    for (int j = 0; j < kBox / 8; ++j) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const float* const of = part + 4 * j + 2 * below;
        *word(box, place.row + below * 8, j * 8 + place.column) = Pair<T>::pack(of[0], of[1]);
      }
    }
    end(to, column, row, matrix, box);
  }
  // Stores a box on the diagonal of a symmetric result. Elements above the diagonal get the bits of the
  // elements below, because products take the rows of a symmetric matrix for its columns.
  __device__ __forceinline__ void mirrored(const CUtensorMap& to, int first, int matrix, const Place& place,
                                           const float (&part)[kPart]) {
    std::byte* const box = begin();
#pragma unroll
    for (int i = 0; i < kPart; i += 2) {
      const int row = place.row + i % 4 / 2 * 8, column = i / 4 * 8 + place.column;
      const uint32_t both = Pair<T>::pack(part[i], part[i + 1]);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const auto number = static_cast<uint16_t>(both >> (16 * k));
        if (row < column + k) continue;
        *word<uint16_t>(box, row, column + k) = number;
        *word<uint16_t>(box, column + k, row) = number;
      }
    }
    end(to, first, first, matrix, box);
  }
  __device__ __forceinline__ void transposed(const CUtensorMap& to, int column, int row, int matrix,
                                             const Place& place, const float (&part)[kPart]) {
    std::byte* const box = begin();
    // Lanes 0 to 7 name the rows of the first of four 8 x 8 matrices, and so on: columns j and j + 1, rows 0
    // and 8.
    const int quarter = place.lane / 8;
#pragma unroll
    for (int j = 0; j < kBox / 8; j += 2) {
      const int r = (j + quarter / 2) * 8 + place.lane % 8, c = place.warp * 16 + quarter % 2 * 8;
      const float* const of = part + 4 * j;
      store_transposed(word(box, r, c), Pair<T>::pack(of[0], of[1]), Pair<T>::pack(of[2], of[3]),
                       Pair<T>::pack(of[4], of[5]), Pair<T>::pack(of[6], of[7]));
    }
    end(to, column, row, matrix, box);
  }
  // Waits until shared memory has been read.
  __device__ __forceinline__ void finish() const {
    if (is_first_) wait_for_stores<0>();
  }

 private:
  __device__ __forceinline__ std::byte* begin() {
    if (is_first_) wait_for_stores<1>();  // that before the last one
    wait_for_group(group_);
    turn_ ^= 1;
    return out_ + turn_ * kBoxBytes;
  }
  __device__ __forceinline__ void end(const CUtensorMap& to, int column, int row, int matrix,
                                      const std::byte* box) const {
    show_to_copies();
    wait_for_group(group_);
    if (is_first_) {
      store_box(to, column, row, matrix, box);
      end_stores();
    }
  }

  std::byte* out_;
  int group_, turn_ = 0;
  bool is_first_;
};

// Makes results of the sums of a warp group, and stores them.
template <class T>
__device__ __forceinline__ void finish_all(const MatrixProduct& product, const Tile& tile, Place place,
                                           std::byte* stages, Pipeline& pipeline, Position& at,
                                           Stores<T>& stores, const float (&sums)[kSums]) {
  const int first = tile.row + place.group * kBox;
  const auto take = [&] {
    wait_for(pipeline.full[at.stage], at.phase);
    const int stage = at.stage;
    at.advance();
    return stage;
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int d = product.beta != 0 ? take() : -1;
#pragma unroll
    for (int number = half * kAddendBoxes; number < (half + 1) * kAddendBoxes; ++number) {
      place.compute_anew();
      const int addend = (place.group * kAddendBoxes + number % kAddendBoxes) * kBoxBytes;
      const int along = tile.column + number * kBox;
      // Boxes above the diagonal of a symmetric result are transposes of others.
      if (along >= product.columns || (product.is_symmetric && along > first)) continue;
      float part[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) part[i] = product.alpha * sums[number * kPart + i];
      if (d >= 0) add<T>(product.beta, place, stages + d * kStageBytes + addend, part);
      const auto store = [&](const CUtensorMap& to) {
        if (product.is_symmetric && along == first) {
          stores.mirrored(to, first, tile.matrix, place, part);
          return;
        }
        stores.box(to, along, first, tile.matrix, place, part);
        if (product.is_symmetric) stores.transposed(to, first, along, tile.matrix, place, part);
      };
      store(product.c);
      if (product.is_shifted) {
        if (along == first) add_to_diagonal<T>(product.shift, place, part);
        store(product.shifted);
      }
    }
    if (d >= 0) {
      wait_for_group(place.group);
      arrive_once(pipeline.empty[d]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kProductThreads, 1)
    product_kernel(const __grid_constant__ ProductLaunch launch) {
  extern __shared__ std::byte unaligned[];
  std::byte* const stages = unaligned + ((1024u - (shared_address(unaligned) & 1023u)) & 1023u);
  __shared__ Pipeline pipeline;
  let_next_kernel_begin();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      begin_barrier(pipeline.full[stage], 1);
      begin_barrier(pipeline.empty[stage], kMultipliers);
    }
    show_barriers();
  }
  __syncthreads();

  if (thread / kGroup == kMultipliers) {
    give_registers<40>();
    if (thread % kGroup == 0) {
      wait_for_kernel_before();
      Copies copies(stages, pipeline);
      for_tiles(launch, [&](const MatrixProduct& product, const Tile& tile) {
        if (product.form == ProductForm::kRowsRows) {
          copies.operands<ProductForm::kRowsRows>(product, tile);
        } else if (product.form == ProductForm::kRowsColumns) {
          copies.operands<ProductForm::kRowsColumns>(product, tile);
        } else {
          copies.operands<ProductForm::kColumnsColumns>(product, tile);
        }
        for (int half = 0; half < 2 && product.beta != 0; ++half) copies.addend(product.d, tile, half);
      });
    }
  } else {
    take_registers<232>();
    const Place place(thread);
    Stores<T> stores(stages + kStages * kStageBytes, place);
    Position at;
    for_tiles(launch, [&](const MatrixProduct& product, const Tile& tile) {
      float sums[kSums];
      multiply_all<T>(product, place.group, stages, pipeline, at, sums);
      finish_all<T>(product, tile, place, stages, pipeline, at, stores, sums);
    });
    stores.finish();
  }
}

}  // namespace

bool has_matrix_products(int device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major == 9 && minor == 0;
}

void launch_products(const ProductLaunch& launch, bool is_bfloat16, int device) {
  int multiprocessors = 0;
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const auto kernel = is_bfloat16 ? product_kernel<__nv_bfloat16> : product_kernel<__half>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  const auto blocks = std::min<int64_t>(launch.tiles, multiprocessors);
  launch_with_memory(kernel, blocks, kProductThreads, kSharedBytes, launch.queue, launch);
}

}  // namespace fusedstep::cuda
