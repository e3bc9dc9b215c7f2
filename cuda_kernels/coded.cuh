// The pass of an elementwise rule over tensors whose states are in codes: a warp has a block of codes, or two
// of int4, and each of its threads eight elements side by side.
#pragma once
#include "cuda_kernels/elementwise.cuh"
#include "src/core/code_map.h"

namespace fusedstep::cuda {

constexpr int kCodedWidth = 8, kWarpElements = kWarp * kCodedWidth, kWarps = kThreads / kWarp;
constexpr int kCodedParts = kChunkElements / (kThreads * kCodedWidth);
constexpr int kCodeValues = 256;
static_assert(kCodeValues <= kThreads);

// Codes that a thread has, in one access: eight bytes, or four of halves.
struct Codes {
  uint32_t words[2];

  __device__ __forceinline__ int32_t at(bool halves, int j) const {
    if (!halves) return static_cast<int32_t>(words[j / 4] >> 8 * (j % 4) & 255);
    const uint32_t byte = words[0] >> 8 * (j / 2) & 255;
    return static_cast<int32_t>(j % 2 == 0 ? byte >> 4 : byte & 15);
  }
  __device__ __forceinline__ void put(bool halves, int j, int32_t code) {
    const auto bits = static_cast<uint32_t>(code);
    if (halves) {
      words[0] |= bits << (8 * (j / 2) + (j % 2 == 0 ? 4 : 0));
    } else {
      words[j / 4] |= bits << 8 * (j % 4);
    }
  }
};

// Those of elements [i, i + valid), of eight.
__device__ __forceinline__ Codes load_codes(const uint8_t* codes, bool halves, int64_t i, int valid) {
  Codes found{};
  if (valid == kCodedWidth && reinterpret_cast<uintptr_t>(codes) % kCodedWidth == 0) {
    if (halves) {
      found.words[0] = *reinterpret_cast<const uint32_t*>(codes + i / 2);
    } else {
      memcpy(&found, reinterpret_cast<const uint2*>(codes + i), sizeof found);
    }
    return found;
  }
  const int bytes = halves ? (valid + 1) / 2 : valid;
  for (int b = 0; b < bytes; ++b) {
    found.words[b / 4] |= static_cast<uint32_t>(codes[(halves ? i / 2 : i) + b]) << 8 * (b % 4);
  }
  return found;
}
__device__ __forceinline__ void store_codes(const Codes& found, uint8_t* codes, bool halves, int64_t i,
                                            int valid) {
  if (valid == kCodedWidth && reinterpret_cast<uintptr_t>(codes) % kCodedWidth == 0) {
    if (halves) {
      *reinterpret_cast<uint32_t*>(codes + i / 2) = found.words[0];
    } else {
      *reinterpret_cast<uint2*>(codes + i) = {found.words[0], found.words[1]};
    }
    return;
  }
  const int bytes = halves ? (valid + 1) / 2 : valid;
  for (int b = 0; b < bytes; ++b) {
    codes[(halves ? i / 2 : i) + b] = static_cast<uint8_t>(found.words[b / 4] >> 8 * (b % 4));
  }
}

// The largest of a number that each thread has, of `width` neighbours: for all of them. `shared` has a place
// for each warp's groups.
__device__ __forceinline__ int32_t largest_of(int32_t mine, int width, int32_t (&shared)[kWarps][2]) {
  const int thread = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int distance = width / 2; distance > 0; distance /= 2) {
    const auto other = static_cast<int32_t>(__shfl_down_sync(0xffffffffu, mine, distance, width));
    mine = other > mine ? other : mine;
  }
  __syncwarp();
  if (thread % width == 0) shared[warp][thread / width] = mine;
  __syncwarp();
  return shared[warp][thread / width];
}

// Elements [i, i + valid) of an operand, of eight: in whole words if it is aligned to these.
template <class Stored>
__device__ __forceinline__ void load_some(const Stored* from, bool aligned, int valid,
                                          ComputeOf<Stored> (&x)[kCodedWidth]) {
  if (aligned && valid == kCodedWidth) return load<kOnce>(from, x);
#pragma unroll
  for (int j = 0; j < kCodedWidth; ++j) x[j] = j < valid ? Codec<Stored>::decode(from[j]) : 0;
}
template <class Stored>
__device__ __forceinline__ void store_some(Stored* to, bool aligned, int valid,
                                           const ComputeOf<Stored> (&x)[kCodedWidth]) {
  if (aligned && valid == kCodedWidth) return store<kOnce>(to, x);
#pragma unroll
  for (int j = 0; j < kCodedWidth; ++j) {
    if (j < valid) to[j] = Codec<Stored>::encode(x[j]);
  }
}

// Blocks of threads that a multiprocessor is to hold: eight numbers of each operand in registers.
template <class Body>
constexpr int kCodedResident = Body::kOperands <= 4 ? 4 : 2;

template <class Rule, class Weight>
__global__ void __launch_bounds__(kThreads, kCodedResident<Operands<Rule, Weight, float>>)
    coded_update_kernel(const __grid_constant__ Launch launch) {
  using Body = Operands<Rule, Weight, float>;
  constexpr int kStates = Rule::kStates;
  __shared__ CodeMap maps[kStates];
  __shared__ float values[kStates][kCodeValues];
  __shared__ int32_t shared[kWarps][2];
  const Chunk chunk = launch.chunks[blockIdx.x / kCodedParts].chunk;
  const TensorTask& task = launch.tensors[chunk.tensor];
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    const CodeMap* const from = task.coded[k].map;
    constexpr int kWords = sizeof(CodeMap) / sizeof(uint32_t);
    static_assert(kWords <= kThreads);
    if (thread < kWords) {
      reinterpret_cast<uint32_t*>(&maps[k])[thread] = reinterpret_cast<const uint32_t*>(from)[thread];
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    by_storage(maps[k].storage, [&]<Storage kStorage>(StorageIs<kStorage>) {
      if (kStorage != Storage::kInt4 || thread < 16) values[k][thread] = value_of<kStorage>(maps[k], thread);
    });
  }
  __syncthreads();
  const int64_t part = static_cast<int64_t>(blockIdx.x % kCodedParts) * kThreads * kCodedWidth;
  const int64_t i = chunk.begin + part + static_cast<int64_t>(threadIdx.x) * kCodedWidth;
  const int64_t left = chunk.end - i;
  const int valid = left >= kCodedWidth ? kCodedWidth : left > 0 ? static_cast<int>(left) : 0;
  Body body(launch, chunk);
  auto* const weight = body.weight + i;
  auto* const grad = body.grad + i;
  const auto is_aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % kWordBytes == 0;
  };
  const bool weight_aligned = is_aligned(body.weight), grad_aligned = is_aligned(body.grad);
  constexpr float kZeros[kCodedWidth] = {};
  if (left_out(launch.found_inf)) {
    if (body.clears) store_some(grad, grad_aligned, valid, kZeros);
    return;
  }
  Elements<Body::kStates, float, kCodedWidth> read;
  load_some(weight, weight_aligned, valid, read.weight);
  load_some(grad, grad_aligned, valid, read.grad);
  [[maybe_unused]] float* const master = Body::kHasMaster ? body.state[Body::kStates - 1] + i : nullptr;
  [[maybe_unused]] const bool master_aligned = Body::kHasMaster && is_aligned(body.state[Body::kStates - 1]);
  if constexpr (Body::kHasMaster) load_some(master, master_aligned, valid, read.state[Rule::kStates]);
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    const CodeMap& map = maps[k];
    const bool halves = map.storage == Storage::kInt4;
    const Codes codes = load_codes(static_cast<const uint8_t*>(task.data[kFirstState + k]), halves, i, valid);
    const float scale = valid > 0 ? task.coded[k].absmax[i >> map.block_shift] / map.top : 0;
#pragma unroll
    for (int j = 0; j < kCodedWidth; ++j) {
      const int32_t code = halves ? codes.at(true, j) : codes.at(false, j);
      read.state[k][j] = j < valid ? values[k][code] * scale : 0;
    }
  }
  if (body.scales) {
#pragma unroll
    for (int j = 0; j < kCodedWidth; ++j) {
      using Stored = typename Body::Stored;
      read.grad[j] = Codec<Stored>::decode(Codec<Stored>::encode(read.grad[j] * body.scale));
    }
    store_some(grad, grad_aligned, valid, read.grad);
  }
  body.with_packs(read, [&](int, auto& p, auto g, auto& s) { update<Rule>(body.scalars, p, g, s); });
  store_some(weight, weight_aligned, valid, read.weight);
  if constexpr (Body::kHasMaster) store_some(master, master_aligned, valid, read.state[Rule::kStates]);
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    const CodeMap& map = maps[k];
    int32_t largest = 0;
#pragma unroll
    for (int j = 0; j < kCodedWidth; ++j) {
      const int32_t magnitude = bits_of(read.state[k][j]) & kMagnitudeBits;
      if (j < valid && magnitude > largest) largest = magnitude;
    }
    const bool halves = map.storage == Storage::kInt4;
    const int width = halves ? kWarp / 2 : kWarp;
    const BlockScale scale = scale_of(largest_of(largest, width, shared), map.top);
    Codes codes{};
    if (scale.inverse == 0) {
      const auto zeros = static_cast<uint32_t>(zero_byte(map)) * 0x01010101u;
      codes = {zeros, zeros};
    } else {
      by_storage(map.storage, [&]<Storage kStorage>(StorageIs<kStorage>) {
#pragma unroll
        for (int j = 0; j < kCodedWidth; ++j) {
          const int32_t code = code_of<kStorage>(map, read.state[k][j] * scale.inverse);
          if (j < valid) codes.put(kStorage == Storage::kInt4, j, code);
        }
      });
    }
    store_codes(codes, static_cast<uint8_t*>(task.data[kFirstState + k]), halves, i, valid);
    if (valid > 0 && thread % width == 0) task.coded[k].absmax[i >> map.block_shift] = scale.absmax;
  }
  if (body.clears) store_some(grad, grad_aligned, valid, kZeros);
}

template <class Rule, class Weight>
void launch_coded_update(const Launch& launch) {
  launch_blocks(coded_update_kernel<Rule, Weight>, launch.chunk_count * kCodedParts, launch.queue, launch);
}

}  // namespace fusedstep::cuda
