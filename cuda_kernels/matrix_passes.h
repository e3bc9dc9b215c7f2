// The border between the kernels of matrix_passes.cu and the host code that launches them.
#pragma once
#include <cstdint>

#include "cuda_kernels/kernel_table.h"
#include "src/core/channels.h"
#include "src/core/matrix_passes.h"

namespace fusedstep::cuda {

// Elements of a tensor that a block of threads goes through.
constexpr int64_t kPassElements = 4096;

// The tensors of one launch: as many as its arguments have room for.
struct PassLaunch {
  static constexpr int kMostTensors = 64;
  PassTensor tensors[kMostTensors];
  uint32_t first_block[kMostTensors + 1];  // the last: all blocks
  int count;
  Queue queue;
};
static_assert(sizeof(PassLaunch) <= 4000);

// Elements of a matrix whose squares a block of threads adds up.
constexpr int64_t kNormElements = 16384;

// Batches of matrices of one launch. `sums` has a number for each block.
struct NormLaunch {
  static constexpr int kMostTensors = 64;
  NormTensor tensors[kMostTensors];
  uint32_t first_block[kMostTensors + 1];
  int count;
  float* sums;
  Queue queue;
};
static_assert(sizeof(NormLaunch) <= 4000);

// Divides matrices by their norms, in two launches: sums of squares by block, and quotients.
using Normalize = void (*)(const NormLaunch&, const NormOptions&);
Normalize normalize_kernel(NormFormat format);

// The size of a block's tile: the columns of a tile whose columns are summed, or which is moved; the rows of
// a tile whose rows are summed; the rows of a tile which is moved.
constexpr int64_t kColumnsTogether = 128;
constexpr int64_t kSquaresRows = 8, kMoveRows = 32;
// Channels whose partial sums a block adds.
constexpr int64_t kFoldChannels = 256;

// Matrices of one launch. Partial sums are added in a launch of their own.
struct SquaresLaunch {
  static constexpr int kMostTensors = 56;
  SquaresTensor tensors[kMostTensors];
  uint32_t first_block[kMostTensors + 1];
  int count;
  Queue queue;
};
static_assert(sizeof(SquaresLaunch) <= 4000);

struct SquaresPasses {
  void (*sum)(const SquaresLaunch&);
  void (*fold)(const SquaresLaunch&);  // the tensors that have partial sums
};
const SquaresPasses& squares_passes(SquaresFormat format);

// Weights of one launch, a block each.
struct ScaleLaunch {
  static constexpr int kMostTensors = 56;
  ScaleTensor tensors[kMostTensors];
  uint32_t first_block[kMostTensors + 1];
  int count;
  Queue queue;
};
static_assert(sizeof(ScaleLaunch) <= 4000);

void scale_weights(bool is_double, const ScaleLaunch& launch, const ScaleOptions& options);
void limit_weights(bool is_double, const ScaleLaunch& launch, const LimitOptions& options);

struct MoveLaunch {
  static constexpr int kMostTensors = 45;
  MoveTensor tensors[kMostTensors];
  uint32_t first_block[kMostTensors + 1];
  int count;
  Queue queue;
};
static_assert(sizeof(MoveLaunch) <= 4000);

struct MatrixPasses {
  void (*average)(const PassLaunch&, const AverageOptions&);
  void (*move)(const PassLaunch&, double keep);
  void (*move_channels)(const MoveLaunch&, double keep);
};
const MatrixPasses& matrix_passes(PassFormat format);

}  // namespace fusedstep::cuda
