// The maths of second moments that are kept as those of a matrix's rows and of its columns, and the order of
// their sums. It decides the last bits, so it is the same on every instruction set, on a GPU, and for every
// number of threads.
//
// A matrix consists of tiles of kTileRows rows and kTileColumns columns. In the type of the maths, squares
// are added up
//   - along a tile's row, in each lane: its element j is in lane j % kTileLanes;
//   - down a tile's column.
// All that follows is in double:
//   - a row's lanes, in a tree: the upper half is added to the lower;
//   - for norms, each lane row by row, then the lanes in a tree;
//   - over tiles, as over a tensor's chunks (see reduction.h): in groups of kPartialsGroup, group by group;
//   - the moments of a matrix's rows: kMeanRows of them in a tree, and these sums as those of tiles.
#pragma once
#include <cstdint>

#include "fusedstep/vocabulary.h"

namespace fusedstep {

constexpr int64_t kTileRows = 64, kTileColumns = 256;
constexpr int kTileLanes = 32, kMeanRows = 32;

// The sum of numbers in a tree: the upper half is added to the lower. Overwrites them.
template <int kCount, class T>
FUSEDSTEP_FN T sum_in_tree(T* sums) {
  if constexpr (kCount == 1) {
    return sums[0];
  } else {
    constexpr int kHalf = kCount / 2;
    for (int i = 0; i < kHalf; ++i) sums[i] = sums[i] + sums[i + kHalf];
    return sum_in_tree<kHalf>(sums);
  }
}

// For the gradient g of a matrix, with v a second moment and mean(v) that over the rows of the matrix:
//
//     row = (1 - rate) * row + rate * (mean over columns of g^2 + added)         column: alike
//     update = g * min(1 / sqrt(row / max(mean(row), least_mean) * column), most)
//     length = step * (scaled ? max(rms(weight), least_scale) : 1)
//     move = length / max(1, rms(update) / threshold) * update,  averaged by beta if there is a moment
//     weight = (1 - decay * (decays_by_length ? length : 1)) * weight - move
//
// rms() is that over the whole tensor.
struct FactoredOptions {
  double rate, added, least_mean, most, step, scaled, least_scale, threshold, decay, decays_by_length, beta,
      grad_factor;
};

// Takes the mean of `terms` squares into a second moment.
template <class T>
FUSEDSTEP_FN T next_moment(const FactoredOptions& options, T moment, double sum, int64_t terms) {
  const double mean = sum / static_cast<double>(terms) + options.added;
  return static_cast<T>((1 - options.rate) * static_cast<double>(moment) + options.rate * mean);
}

// The mean that moments of rows are divided by, from their sum.
FUSEDSTEP_FN double mean_of_rows(const FactoredOptions& options, double sum, int64_t rows) {
  const double mean = sum / static_cast<double>(rows);
  return mean < options.least_mean ? options.least_mean : mean;  // NaN goes on
}

// The factor of the gradient for its row or its column. The mean of columns' moments is one.
template <class T>
FUSEDSTEP_FN T factor_of(T moment, T mean) {
  return 1 / rules::square_root(moment / mean);
}

// The factors of the weight and of the update in a step.
struct FactoredLengths {
  double keep, step;
};
FUSEDSTEP_FN FactoredLengths lengths_of(const FactoredOptions& options, double weight_norm2,
                                        double update_norm2, double elements) {
  const double excess = rules::square_root(update_norm2 / elements) / options.threshold;
  double length = options.step;
  if (options.scaled != 0) {
    const double scale = rules::square_root(weight_norm2 / elements);
    length *= scale < options.least_scale ? options.least_scale : scale;
  }
  return {1 - options.decay * (options.decays_by_length != 0 ? length : 1),
          excess <= 1 ? length : length / excess};  // NaN goes on
}

// Which part of a step is taken. Where processes have parts of a tensor, each takes all but the first, one
// after another; sums over all processes lie in between (see FactoredShare).
enum class FactoredPart : uint8_t {
  kWhole,
  kSums,   // writes sums of squares
  kRows,   // takes the moments of rows forward, and writes their sums
  kNorms,  // takes the moments of columns forward, and writes the squares of norms
  kApply,  // moves the weight
  kCount
};

// A block of the CPU's kernels: some tiles side by side.
constexpr int64_t kBlockTiles = 4, kBlockColumns = kBlockTiles * kTileColumns;

// The elements of a block in memory. Strides are in elements; `matrix` is that from one matrix to the next.
struct BlockArray {
  void* first;
  int64_t row, column, matrix;
};

// Factors and column sums have the type of the maths, as the moment has: double beside a double weight, else
// float.
struct FactoredBlock {
  BlockArray weight, grad, moment;  // moment.first may be null: the update is then not averaged
  int64_t rows, columns;
  // The block is the first of so many matrices of one tile each, whose sums, factors and norms lie one behind
  // the other. 1 if a matrix has more tiles.
  int64_t matrices;
  double grad_factor;  // multiplies the gradient as it is read

  // kSums writes sums of squares of the gradient: of rows for each tile, so many elements behind the last's.
  double* row_sums;
  int64_t row_sums_of_tile;
  void* column_sums;

  // The update is the gradient times the product of both factors, but for products above `most`. Null: the
  // factors of rows are 1.
  const void *row_factors, *column_factors;
  double most;

  double* norms;  // kNorms writes the sums of squares of weight and update of each tile

  // kApply: w = keep * w - step * update, or m = beta * m + (1 - beta) * step * update, w = keep * w - m.
  double keep, step, beta;
};

enum FactoredPhase : int { kSums, kNorms, kApply, kFactoredPhases };

struct FactoredKernels {
  void (*phase[kFactoredPhases])(const FactoredBlock&);
};

// The dtypes of weight and gradient. A float weight with a gradient of 16 bits is a master copy.
#define FUSEDSTEP_FACTORED_FORMATS(X) \
  X(Float, float, float)              \
  X(Double, double, double)           \
  X(BFloat16, bf16, bf16)             \
  X(Half, f16, f16)                   \
  X(BFloat16Master, float, bf16)      \
  X(HalfMaster, float, f16)

enum class FactoredFormat : uint8_t {
#define FUSEDSTEP_ID(name, weight, grad) k##name,
  FUSEDSTEP_FACTORED_FORMATS(FUSEDSTEP_ID)
#undef FUSEDSTEP_ID
      kCount
};

}  // namespace fusedstep
