// Passes over matrices by channels: the sums of squares of each channel, and moves of weights along matrices
// whose channels have a factor each.
#pragma once
#include <cstdint>

#include "fusedstep/vocabulary.h"

namespace fusedstep {

// The parts of a matrix that are channels.
enum class Channels : uint8_t { kRows, kColumns, kWhole };

// The numbers that squares are added up of, in memory.
#define FUSEDSTEP_SQUARES_FORMATS(X) \
  X(Float, float)                    \
  X(Double, double)                  \
  X(BFloat16, bf16)                  \
  X(Half, f16)

enum class SquaresFormat : uint8_t {
#define FUSEDSTEP_ID(name, Stored) k##name,
  FUSEDSTEP_SQUARES_FORMATS(FUSEDSTEP_ID)
#undef FUSEDSTEP_ID
      kCount
};

// A matrix, and the sum of the squares of each of its channels. Strides are in elements.
struct SquaresTensor {
  const void* data;
  int64_t rows, columns, row_stride, column_stride;
  double* sums;
  double* partials;  // of segments, where a channel has not exactly one; else the sums
  Channels channels;
};

// Squares are added up in double by segments: so many elements of a row, or a column in so many rows. A
// channel's segments are added in their order.
constexpr int64_t kRowSegment = 4096, kColumnSegment = 128;
FUSEDSTEP_FN constexpr int64_t pieces_of(int64_t count, int64_t most) { return (count + most - 1) / most; }

FUSEDSTEP_FN int64_t channels_of(const SquaresTensor& of) {
  return of.channels == Channels::kRows ? of.rows : (of.channels == Channels::kColumns ? of.columns : 1);
}
// Segment s of row or column i has the partial sum number s times the rows, or columns, plus i.
FUSEDSTEP_FN int64_t partials_of(const SquaresTensor& of) {
  return of.channels == Channels::kColumns ? of.columns * pieces_of(of.rows, kColumnSegment)
                                           : of.rows * pieces_of(of.columns, kRowSegment);
}
FUSEDSTEP_FN bool has_partials(const SquaresTensor& of) { return partials_of(of) != channels_of(of); }

// A matrix S has the channels of a gradient G, each times a factor: norm(U) / norm(R) of the same channel of
// an update U and a gradient R in a low rank.
struct ScaleTensor {
  const double *low, *grad, *update;  // sums of squares by channel: of R, G and U
  double* norm2;                      // the square of S's norm
  void* factors;                      // a number for each channel, in the type of the maths
  void* last;                         // the norm of the last S, in this type
  int64_t channels;
  double length;  // a factor that U has, and the move
};

struct ScaleOptions {
  double factor;   // that R has and G lacks
  double epsilon;  // that is added to norms before a division by them
};

// The norm of S is at most `growth` times the last one, if that was above 0.
struct LimitOptions {
  bool limits;
  bool in_front;  // the root is a factor of S before the limit, else after it
  double root, growth, epsilon;
  double times;  // a factor of the move
};

// Of channel c, with c's sums of squares.
FUSEDSTEP_FN double scale_of(const ScaleTensor& tensor, int64_t c, const ScaleOptions& options) {
  const double low = rules::square_root(tensor.low[c]) + options.epsilon;
  return rules::square_root(tensor.update[c]) / tensor.length * options.factor / low;
}

// What the factors of a tensor are multiplied by, for the norm of S and of the last one, which becomes that
// of the S which is limited.
FUSEDSTEP_FN double limited(double norm2, double length, const LimitOptions& options, double& last) {
  const double times = options.root * length * options.times;
  if (!options.limits) return times;
  const double norm = rules::square_root(norm2) * (options.in_front ? options.root : 1);
  double limit = norm / (last + options.epsilon);
  limit = (limit < options.growth ? options.growth : limit) / options.growth;  // NaN stays
  if (!(last > 0)) limit = 1;
  last = norm / limit;
  return times / limit;
}

// weight = keep * weight + factor * grad, with a factor for each channel. Strides are in elements.
struct MoveTensor {
  void* weight;
  const void* grad;
  const void* factors;
  int64_t rows, columns, row_stride, column_stride, grad_row_stride, grad_column_stride;
  Channels channels;
};

}  // namespace fusedstep
