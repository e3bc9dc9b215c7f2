// Compiled for each rule that steps projected gradients, which FUSEDSTEP_RULE names: the product that
// projects a gradient, on Hopper's tensor cores, with the rule in its epilogue.
//
// A cluster of blocks has a tile of the product and shares out what is contracted. Each of its blocks then
// adds up a part of the tile, in the order of the blocks, and steps it: no sum is by atomics, and the bits
// are those of every run. For float32's accuracy a number is the sum of two of TF32; of their four products,
// that of the smaller ones is left out, and sums of kDepth terms are added in float32, as the tensor cores do
// not round.
#include "cuda_kernels/projected.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "cuda_kernels/pack.cuh"
#include "cuda_kernels/warp_group.cuh"
#include "fusedstep/rules/specs.h"
#include FUSEDSTEP_RULE_HEADER

namespace fusedstep::cuda {
namespace {

// Rows of a tile, and how deep a block goes at a time; numbers in a word that is copied.
constexpr int kRows = 128, kDepth = 32, kWord = 4, kSteps = kDepth / 8;
constexpr int kMostSplits = 8;  // blocks that a cluster may have on every GPU

// A block's way over the gradient: `kStages` parts of kDepth are in shared memory or on their way there.
template <bool kFromLeft, bool kInTwo, int kColumns, int kStages>
struct Cut {
  // Rows in shared memory are so far apart that a warp's reads are from all banks.
  static constexpr int kStride = kFromLeft ? kRows + 8 : kDepth + 4;
  static constexpr int kGrad = (kFromLeft ? kDepth : kRows) * kStride;  // numbers of a part
  static constexpr int kHalf = kColumns * kDepth, kBasis = kHalf * (kInTwo ? 2 : 1);
  static constexpr size_t kBytes = sizeof(float) * std::max(kStages * (kGrad + kBasis), kRows* kColumns);
};

__device__ __forceinline__ unsigned rounded(float x) {
  unsigned y = 0;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}
// The nearest number of TF32, and what is left; where one is NaN, a part of it is.
__device__ __forceinline__ void part(float x, unsigned& large, unsigned& small) {
  large = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  small = __float_as_uint(x - __uint_as_float(large));
}

template <class Rule, bool kFromLeft, bool kInTwo, int kColumns, int kStages, int kResident>
__global__ void __launch_bounds__(kThreads, kResident)
    projected_kernel(const __grid_constant__ ProjectedLaunch launch) {
  using Of = Cut<kFromLeft, kInTwo, kColumns, kStages>;
  extern __shared__ __align__(1024) float memory[];
  float *const bases = memory, *const grads = memory + kStages * Of::kBasis;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int quad = lane / 4, in_quad = lane % 4, row = thread / kWarp * 16 + quad;
  const int rank_tiles = (launch.rank + kColumns - 1) / kColumns;
  const int share = static_cast<int>(blockIdx.x) % launch.splits;
  const int tile = static_cast<int>(blockIdx.x) / launch.splits;
  const int first_row = tile / rank_tiles * kRows, first_column = tile % rank_tiles * kColumns;
  const int parts = (launch.contracted + kDepth - 1) / kDepth;
  const int begin = parts * share / launch.splits, end = parts * (share + 1) / launch.splits;

  const auto load = [&](int number, int stage) {
    const int deep = number * kDepth;
    float* const grad = grads + stage * Of::kGrad;
    constexpr int kInRow = (kFromLeft ? kRows : kDepth) / kWord;
#pragma unroll
    for (int i = 0; i < kRows * kDepth / kWord / kThreads; ++i) {
      const int word = thread + i * kThreads, r = word / kInRow, c = word % kInRow * kWord;
      const int k = deep + (kFromLeft ? r : c), m = first_row + (kFromLeft ? c : r);
      const bool is_there = k < launch.contracted && m < launch.along;
      const int64_t at = kFromLeft ? k * launch.grad_stride + m : m * launch.grad_stride + k;
      copy_word(grad + r * Of::kStride + c, launch.grad + (is_there ? at : 0), is_there);
    }
#pragma unroll
    for (int half = 0; half < (kInTwo ? 2 : 1); ++half) {
      const float* const from = launch.basis + half * int64_t{launch.rank} * launch.contracted;
      float* const basis = bases + stage * Of::kBasis + half * Of::kHalf;
#pragma unroll
      for (int i = 0; i < kColumns * kDepth / kWord / kThreads; ++i) {
        const int word = thread + i * kThreads, n = word / (kDepth / kWord), w = word % (kDepth / kWord);
        const int k = deep + w * kWord, column = first_column + n;
        const bool is_there = k < launch.contracted && column < launch.rank;
        copy_word(basis + n * kDepth + (w ^ n % 8) * kWord,
                  from + (is_there ? int64_t{column} * launch.contracted + k : 0), is_there);
      }
    }
  };

  float sums[kColumns / 2] = {};
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) load(begin + s, s);
    end_copies();
  }
  int stage = 0;
#pragma unroll 1
  for (int number = begin; number < end; ++number) {
    wait_for_copies<kStages - 2>();
    __syncthreads();
    const int ahead = number + kStages - 1;
    if (ahead < end) load(ahead, stage == 0 ? kStages - 1 : stage - 1);
    end_copies();
    const float* const grad = grads + stage * Of::kGrad;
    const uint64_t basis = describe_matrix(bases + stage * Of::kBasis);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    const auto at = [&](int m, int k) { return grad[kFromLeft ? k * Of::kStride + m : m * Of::kStride + k]; };
    // A step is 32 bytes along the rows of the basis; matrices are named in words of 16 bytes.
    constexpr int kStep = 2, kToSmall = Of::kHalf * static_cast<int>(sizeof(float)) / 16;
    unsigned large[kSteps][4], small[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = at(row + i % 2 * 8, k * 8 + in_quad + i / 2 * 4);
        if constexpr (kInTwo) {
          part(x, large[k][i], small[k][i]);
        } else {
          large[k][i] = rounded(x);
        }
      }
    }
    if constexpr (kInTwo) {
      float terms[kColumns / 2];
      hold(terms);
      begin_products();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        Multiply<kColumns>::run(terms, small[k], basis + k * kStep, k > 0);
        Multiply<kColumns>::run(terms, large[k], basis + kToSmall + k * kStep, 1);
        Multiply<kColumns>::run(terms, large[k], basis + k * kStep, 1);
      }
      end_products();
      hold(terms);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) sums[i] += terms[i];
    } else {
      hold(sums);
      begin_products();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) Multiply<kColumns>::run(sums, large[k], basis + k * kStep, 1);
      end_products();
      hold(sums);
    }
  }

  // Each thread has a word of every 8 columns: two neighbours of a row, and two of the row 8 below.
  __syncthreads();
  auto* const words = reinterpret_cast<float4*>(memory) + thread;
#pragma unroll
  for (int w = 0; w < kColumns / 8; ++w) {
    words[w * kThreads] = {sums[4 * w], sums[4 * w + 1], sums[4 * w + 2], sums[4 * w + 3]};
  }
  wait_for_cluster();
  using V = Pack<float, 4>;
  typename Rule::template Scalars<float> scalars;
  memcpy(static_cast<void*>(&scalars), &launch.scalars, sizeof scalars);
#pragma unroll 4
  for (int w = share; w < kColumns / 8; w += launch.splits) {
    V grad(0.0f);
    for (int block = 0; block < launch.splits; ++block) {
      const float4 x = load_from_block(words + w * kThreads, block);
      const float of[4] = {x.x, x.y, x.z, x.w};
      grad = grad + V(of);
    }
    const int m = first_row + row, n = first_column + w * 8 + in_quad * 2;
    const int64_t to_row = kFromLeft ? 1 : launch.rank, to_column = kFromLeft ? launch.along : 1;
    const int64_t first = m * to_row + n * to_column;
    const auto for_each = [&](const auto& run) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (m + i / 2 * 8 < launch.along && n + i % 2 < launch.rank)
          run(i, first + i / 2 * 8 * to_row + i % 2 * to_column);
      }
    };
    rules::States<V, Rule::kStates> states;
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) {
      states[s] = V(0.0f);
      for_each([&](int i, int64_t at) { states[s].of[i] = launch.states[s][at]; });
    }
    V weight(0.0f);
    const V update = Rule::template direction<V>(scalars, weight, grad * V(launch.grad_factor), states);
    Rule::template apply<V>(scalars, weight, update);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) {
      for_each([&](int i, int64_t at) { launch.states[s][at] = states[s].of[i]; });
    }
    for_each([&](int i, int64_t at) { launch.update[at] = weight.of[i]; });
  }
  wait_for_cluster();  // others may be reading this block's words
}

// A kernel, and how many clusters of each size a device runs at once.
struct Kernel {
  void (*run)(ProjectedLaunch);
  size_t bytes;
  int columns;
};

cudaLaunchConfig_t config_of(const Kernel& kernel, int blocks, cudaLaunchAttribute& cluster, int splits) {
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(kThreads);
  config.dynamicSmemBytes = kernel.bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return config;
}

using Clusters = std::array<int, kMostSplits + 1>;

const Clusters& clusters_of(const Kernel& kernel, int device) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::pair<void (*)(ProjectedLaunch), int>, Clusters>;
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = known.try_emplace({kernel.run, device});
  if (is_new) {
    at->second = {};
    cudaFuncSetAttribute(kernel.run, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(kernel.bytes));
    for (int splits = 1; splits <= kMostSplits; ++splits) {
      cudaLaunchAttribute cluster{};
      const cudaLaunchConfig_t config = config_of(kernel, splits, cluster, splits);
      cudaOccupancyMaxActiveClusters(&at->second[splits], kernel.run, &config);
    }
    static_cast<void>(cudaGetLastError());  // sizes that cannot be have no clusters
  }
  return at->second;
}

// The size of clusters that is over first, or 0 if there is none. A tile's beginning and end take about as
// long as `kEnds` parts.
int best_splits(const Clusters& at_once, int tiles, int contracted) {
  constexpr double kEnds = 6;
  const double parts = (contracted + kDepth - 1) / kDepth;
  int best = 0;
  double least = 0;
  for (int splits = 1; splits <= kMostSplits; ++splits) {
    if (at_once[splits] == 0) continue;
    const int waves = (tiles + at_once[splits] - 1) / at_once[splits];
    const double time = waves * (parts / splits + kEnds);
    if (best == 0 || time < least) {
      best = splits;
      least = time;
    }
  }
  return best;
}

template <class Rule, bool kFromLeft, bool kInTwo, int kColumns, int kStages, int kResident>
constexpr Kernel kKernel{projected_kernel<Rule, kFromLeft, kInTwo, kColumns, kStages, kResident>,
                         Cut<kFromLeft, kInTwo, kColumns, kStages>::kBytes, kColumns};

template <class Rule, bool kFromLeft>
const Kernel& kernel_for(int rank, bool in_two) {
  if (in_two) {
    return rank <= 32 ? kKernel<Rule, kFromLeft, true, 32, 4, 2> : kKernel<Rule, kFromLeft, true, 64, 3, 2>;
  }
  if (rank <= 32) return kKernel<Rule, kFromLeft, false, 32, 3, 3>;
  return rank <= 64 ? kKernel<Rule, kFromLeft, false, 64, 4, 2> : kKernel<Rule, kFromLeft, false, 128, 3, 2>;
}

}  // namespace

template <>
bool launch_projected<rules::FUSEDSTEP_RULE>(const ProjectedLaunch& launch, bool from_left, bool in_two,
                                             int device, Stream stream) {
  using Rule = rules::FUSEDSTEP_RULE<0>;
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (major != 9 || minor != 0) return false;
  const Kernel& kernel =
      from_left ? kernel_for<Rule, true>(launch.rank, in_two) : kernel_for<Rule, false>(launch.rank, in_two);
  const int tiles =
      (launch.along + kRows - 1) / kRows * ((launch.rank + kernel.columns - 1) / kernel.columns);
  ProjectedLaunch with_splits = launch;
  with_splits.splits = best_splits(clusters_of(kernel, device), tiles, launch.contracted);
  if (with_splits.splits == 0) return false;
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t config = config_of(kernel, tiles * with_splits.splits, cluster, with_splits.splits);
  config.stream = stream;
  cudaLaunchKernelEx(&config, kernel.run, with_splits);
  return true;
}

}  // namespace fusedstep::cuda
