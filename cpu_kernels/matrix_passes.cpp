// Compiled once for each instruction set: the passes around the matrix products of a step.
#include "cpu_kernels/matrix_passes.h"

#include "cpu_kernels/chosen_channels.h"
#include "cpu_kernels/codecs.h"
#include "cpu_kernels/pass_bodies.h"
#include "cpu_kernels/reduce.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {
namespace {

template <class V, class T>
FUSEDSTEP_FN V interpolated(const V& from, const V& to, T share) {
  using rules::mul_add;
  const V way = to - from;
  return rules::absolute(share) < T(0.5) ? mul_add(V(share), way, from) : mul_add(-way, V(T(1) - share), to);
}

template <class Stored, class Product>
struct Update {
  using T = typename Codec<Stored>::Compute;
  const Stored *average, *grad;
  Product* update;
  T share, lead;
  bool leads;

  template <class V>
  FUSEDSTEP_FN void run_at(int64_t i) const {
    const V g = load<V>(grad, i);
    const V m = rounded<Stored>(interpolated(load<V>(average, i), g, share));
    store(update, i, leads ? rounded<Stored>(interpolated(g, m, lead)) : m);
  }
};

template <class Stored, class Product>
struct Advance {
  using T = typename Codec<Stored>::Compute;
  Stored *average, *weight;
  const Stored* grad;
  const Product* direction;
  T share, keep, factor;

  template <class V>
  FUSEDSTEP_FN void run_at(int64_t i) const {
    using rules::mul_add;
    store(average, i, interpolated(load<V>(average, i), load<V>(grad, i), share));
    const V decayed = rounded<Stored>(load<V>(weight, i) * V(keep));
    store(weight, i, mul_add(V(factor), load<V>(direction, i), decayed));
  }
};

template <class From, class To>
struct Quotient {
  using T = float;
  const From* from;
  To* to;
  float divisor;

  template <class V>
  FUSEDSTEP_FN void run_at(int64_t i) const {
    store(to, i, load<V>(from, i) / V(divisor));
  }
};

template <class Stored, class Product>
void update(const PassTensor& tensor, const AverageOptions& options, int64_t begin, int64_t end) {
  Update<Stored, Product> body{};
  body.average = static_cast<const Stored*>(tensor.stored);
  body.grad = static_cast<const Stored*>(tensor.grad);
  body.update = static_cast<Product*>(tensor.product);
  body.share = static_cast<typename decltype(body)::T>(options.share);
  body.lead = static_cast<typename decltype(body)::T>(options.lead);
  body.leads = options.leads;
  run_over(body, begin, end);
}

template <class Stored, class Product>
void advance(const AdvanceTensor& tensor, const AdvanceOptions& options, int64_t begin, int64_t end) {
  Advance<Stored, Product> body{};
  body.average = static_cast<Stored*>(tensor.average);
  body.weight = static_cast<Stored*>(tensor.weight);
  body.grad = static_cast<const Stored*>(tensor.grad);
  body.direction = static_cast<const Product*>(tensor.direction);
  body.share = static_cast<typename decltype(body)::T>(options.share);
  body.keep = static_cast<typename decltype(body)::T>(options.keep);
  // A CPU's operation on a weight takes a factor in the weight's dtype.
  body.factor = rounded<Stored>(static_cast<typename decltype(body)::T>(tensor.factor));
  run_over(body, begin, end);
}

// Element i of a sum is in lane i % kSquareLanes. The lanes are added in a tree.
constexpr int kSquareLanes = 64;

template <class From>
float sum_squares(const NormTensor& tensor, int64_t begin, int64_t end) {
  using V = Pack<float>;
  using rules::mul_add;
  constexpr int kParts = kSquareLanes / V::size();
  const auto* const from = static_cast<const From*>(tensor.from);
  V sums[kParts];
  for (V& part : sums) part = V(0);
  const int64_t whole = end - (end - begin) % kSquareLanes;
  for (int64_t i = begin; i < whole; i += kSquareLanes) {
#pragma GCC unroll 16
    for (int k = 0; k < kParts; ++k) {
      const V x = load<V>(from, i + k * V::size());
      sums[k] = mul_add(x, x, sums[k]);
    }
  }
  float lanes[kSquareLanes];
  for (int k = 0; k < kParts; ++k) store(lanes, k * V::size(), sums[k]);
  for (int64_t i = whole; i < end; ++i) {
    const auto x = load<float>(from, i);
    lanes[i - whole] = mul_add(x, x, lanes[i - whole]);
  }
  for (int width = kSquareLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

template <class From, class To>
void divide(const NormTensor& tensor, float divisor, int64_t begin, int64_t end) {
  run_over(Quotient<From, To>{static_cast<const From*>(tensor.from), static_cast<To*>(tensor.to), divisor},
           begin, end);
}

// Element i of a row is in lane i % kLanes.
template <class Stored>
FUSEDSTEP_FN double row_squares(const Stored* from, int64_t count, int64_t stride) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  LaneSums<double> sums;
  int64_t i = 0;
  if (stride == 1) {
    for (; i + kLanes <= count; i += kLanes) {
#pragma GCC unroll 4
      for (int lane = 0; lane < kLanes; lane += V::size()) sums.add_squares(lane, load<V>(from, i + lane));
    }
  }
  alignas(64) double lanes[kLanes];
  sums.save(lanes);
  for (; i < count; ++i) {
    lanes[i % kLanes] = with_square(lanes[i % kLanes], static_cast<double>(load<T>(from, i * stride)));
  }
  return sum_lanes(lanes);
}

template <class Stored>
void squares_of_rows(const SquaresTensor& tensor, const Tile& tile, double* sums) {
  const auto* const from = static_cast<const Stored*>(tensor.data) + tile.column * tensor.column_stride;
  for (int64_t row = tile.row; row < tile.row_end; ++row) {
    sums[row - tile.row] =
        row_squares(from + row * tensor.row_stride, tile.column_end - tile.column, tensor.column_stride);
  }
}

// Adds the squares of a register's columns, in rows that follow one another.
template <int kRows, class Stored>
FUSEDSTEP_FN void add_column_squares(double* sums, const Stored* from, int64_t row_stride) {
  using V = Pack<typename Codec<Stored>::Compute>;
  using D = Pack<double>;
  D found[V::size() / D::size()];
  for (int k = 0; D & sum : found) sum = D::load(sums + D::size() * k++);
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
    const V x = load<V>(from, row * row_stride);
    if constexpr (V::size() == D::size()) {
      found[0] = with_square(found[0], x);
    } else {
      D low, high;
      widen(x, low, high);
      found[0] = with_square(found[0], low);
      found[1] = with_square(found[1], high);
    }
  }
  for (int k = 0; const D& sum : found) sum.store(sums + D::size() * k++);
}

template <int kRows, class Stored>
FUSEDSTEP_FN void add_row_squares(double* sums, const Stored* from, const SquaresTensor& tensor,
                                  int64_t count) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  int64_t i = 0;
  if (tensor.column_stride == 1) {
    for (; i + V::size() <= count; i += V::size()) {
      add_column_squares<kRows>(sums + i, from + i, tensor.row_stride);
    }
  }
  for (; i < count; ++i) {
    for (int row = 0; row < kRows; ++row) {
      const auto x = load<T>(from, row * tensor.row_stride + i * tensor.column_stride);
      sums[i] = with_square(sums[i], static_cast<double>(x));
    }
  }
}

template <class Stored>
void squares_of_columns(const SquaresTensor& tensor, const Tile& tile, double* sums) {
  constexpr int kRows = 4;  // at a time: fewer accesses to the sums
  alignas(64) double found[kTileColumns] = {};
  const int64_t count = tile.column_end - tile.column;
  const auto* from = static_cast<const Stored*>(tensor.data) + tile.row * tensor.row_stride +
                     tile.column * tensor.column_stride;
  int64_t row = tile.row;
  for (; row + kRows <= tile.row_end; row += kRows, from += kRows * tensor.row_stride) {
    add_row_squares<kRows>(found, from, tensor, count);
  }
  for (; row < tile.row_end; ++row, from += tensor.row_stride) {
    add_row_squares<1>(found, from, tensor, count);
  }
  for (int64_t i = 0; i < count; ++i) sums[i] = found[i];
}

template <class Stored, class Grad, class Factor>
FUSEDSTEP_FN void move_row(Stored* weight, const Grad* grad, const MoveTensor& tensor,
                           typename Codec<Stored>::Compute keep, const Factor factor, int64_t count) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  using rules::mul_add;
  int64_t i = 0;
  if (tensor.column_stride == 1 && tensor.grad_column_stride == 1) {
    for (; i + V::size() <= count; i += V::size()) {
      const V kept = load<V>(weight, i) * V(keep);
      store(weight, i, mul_add(factor.template at<V>(i), load<V>(grad, i), kept));
    }
  }
  for (; i < count; ++i) {
    const int64_t at = i * tensor.column_stride;
    const T kept = load<T>(weight, at) * keep;
    store(weight, at, mul_add(factor.template at<T>(i), load<T>(grad, i * tensor.grad_column_stride), kept));
  }
}

template <class Stored, class Grad>
void move(const MoveTensor& tensor, double keep_all, const Tile& tile) {
  using T = typename Codec<Stored>::Compute;
  const T keep = static_cast<T>(keep_all);
  const auto* const factors = static_cast<const T*>(tensor.factors);
  const int64_t count = tile.column_end - tile.column;
  for (int64_t row = tile.row; row < tile.row_end; ++row) {
    auto* const weight =
        static_cast<Stored*>(tensor.weight) + row * tensor.row_stride + tile.column * tensor.column_stride;
    const auto* const grad = static_cast<const Grad*>(tensor.grad) + row * tensor.grad_row_stride +
                             tile.column * tensor.grad_column_stride;
    if (tensor.channels == Channels::kColumns) {
      move_row(weight, grad, tensor, keep, Factors<T>{factors + tile.column}, count);
    } else {
      const T factor = factors[tensor.channels == Channels::kRows ? row : 0];
      move_row(weight, grad, tensor, keep, OneFactor<T>{factor}, count);
    }
  }
}

}  // namespace

#define FUSEDSTEP_PASSES(name, Stored, Product) \
  {update<Stored, Product>, advance<Stored, Product>, move<Stored, Product>},
#define FUSEDSTEP_NORMS(name, From, To) {sum_squares<From>, divide<From, To>},
#define FUSEDSTEP_SQUARES(name, Stored) {squares_of_rows<Stored>, squares_of_columns<Stored>},
#define FUSEDSTEP_CHOSEN(name, Stored, Product)                                   \
  {norms_of_rows<Stored>, norms_of_columns<Stored>, take_chosen<Stored, Product>, \
   advance_chosen<Stored, Product>},
extern const PassTable kPasses = {{FUSEDSTEP_PASS_FORMATS(FUSEDSTEP_PASSES)},
                                  {FUSEDSTEP_NORM_FORMATS(FUSEDSTEP_NORMS)},
                                  {FUSEDSTEP_SQUARES_FORMATS(FUSEDSTEP_SQUARES)},
                                  {FUSEDSTEP_PASS_FORMATS(FUSEDSTEP_CHOSEN)}};
#undef FUSEDSTEP_PASSES
#undef FUSEDSTEP_NORMS
#undef FUSEDSTEP_SQUARES
#undef FUSEDSTEP_CHOSEN

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
