// The passes of a step that moves chosen rows or columns alone. Each value is rounded as torch's separate
// operations on a CPU round it.
#pragma once
#include "cpu_kernels/matrix_passes.h"
#include "cpu_kernels/pass_bodies.h"
#include "cpu_kernels/reduce.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// An average with its gradient added, or subtracted.
template <class Stored>
struct Sum {
  using T = typename Codec<Stored>::Compute;
  const Stored *average, *grad;
  T sign;

  template <class V>
  FUSEDSTEP_FN V at(int64_t i) const {
    using rules::mul_add;
    return rounded<Stored>(mul_add(V(sign), load<V>(grad, i), load<V>(average, i)));
  }
};

// From an element on.
template <class Stored>
FUSEDSTEP_FN Sum<Stored> sum_of(const ChosenTensor& tensor, int64_t at, bool maximizes) {
  using T = typename Codec<Stored>::Compute;
  return {static_cast<const Stored*>(tensor.stored) + at, static_cast<const Stored*>(tensor.grad) + at,
          maximizes ? T(-1) : T(1)};
}

// Adds the sizes of a register's elements to sums in double.
FUSEDSTEP_FN void add_sizes(Pack<double>* sums, const Pack<double>& x) { sums[0] = sums[0] + absolute(x); }
FUSEDSTEP_FN void add_sizes(Pack<double>* sums, const Pack<float>& x) {
  Pack<double> low, high;
  widen(x, low, high);
  sums[0] = sums[0] + absolute(low);
  sums[1] = sums[1] + absolute(high);
}

// Element i of a row is in lane i % kLanes.
template <class Stored>
FUSEDSTEP_FN double row_norm(const Sum<Stored>& sum, int64_t count) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  using D = Pack<double>;
  D parts[kLanes / D::size()];
  for (D& part : parts) part = D(0);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
#pragma GCC unroll 4
    for (int lane = 0; lane < kLanes; lane += V::size()) {
      add_sizes(parts + lane / D::size(), sum.template at<V>(i + lane));
    }
  }
  alignas(64) double lanes[kLanes];
  for (int k = 0; const D& part : parts) part.store(lanes + D::size() * k++);
  for (; i < count; ++i) {
    lanes[i % kLanes] += rules::absolute(static_cast<double>(sum.template at<T>(i)));
  }
  return sum_lanes(lanes);
}

template <class Stored>
void norms_of_rows(const ChosenTensor& tensor, int64_t matrix, bool maximizes, const Tile& tile,
                   double* norms) {
  for (int64_t row = tile.row; row < tile.row_end; ++row) {
    const int64_t at = (matrix * tensor.rows + row) * tensor.columns + tile.column;
    norms[row - tile.row] = row_norm(sum_of<Stored>(tensor, at, maximizes), tile.column_end - tile.column);
  }
}

// Adds the sizes of a register's columns, in rows that follow one another.
template <int kRows, class Stored>
FUSEDSTEP_FN void add_columns(double* norms, const Sum<Stored>& sum, int64_t stride, int64_t count) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  using D = Pack<double>;
  int64_t i = 0;
  for (; i + V::size() <= count; i += V::size()) {
    D found[V::size() / D::size()];
    for (int k = 0; D & part : found) part = D::load(norms + i + D::size() * k++);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) add_sizes(found, sum.template at<V>(row * stride + i));
    for (int k = 0; const D& part : found) part.store(norms + i + D::size() * k++);
  }
  for (; i < count; ++i) {
    for (int row = 0; row < kRows; ++row) {
      norms[i] += rules::absolute(static_cast<double>(sum.template at<T>(row * stride + i)));
    }
  }
}

template <class Stored>
void norms_of_columns(const ChosenTensor& tensor, int64_t matrix, bool maximizes, const Tile& tile,
                      double* norms) {
  constexpr int kRows = 4;  // at a time: fewer accesses to the sums
  alignas(64) double found[kTileColumns] = {};
  const int64_t count = tile.column_end - tile.column, columns = tensor.columns;
  int64_t row = tile.row;
  const auto sum = [&] {
    return sum_of<Stored>(tensor, (matrix * tensor.rows + row) * columns + tile.column, maximizes);
  };
  for (; row + kRows <= tile.row_end; row += kRows) add_columns<kRows>(found, sum(), columns, count);
  for (; row < tile.row_end; ++row) add_columns<1>(found, sum(), columns, count);
  for (int64_t i = 0; i < count; ++i) norms[i] = found[i];
}

template <class Stored, class Product>
struct TakeRow {
  using T = typename Codec<Stored>::Compute;
  Sum<Stored> sum;
  Product* update;

  template <class V>
  FUSEDSTEP_FN void run_at(int64_t i) const {
    store(update, i, sum.template at<V>(i));
  }
};

template <class Stored, class Product>
void take_chosen(const ChosenTensor& tensor, int64_t matrix, bool maximizes, const Tile& tile,
                 const ChoiceMemory& memory) {
  using T = typename Codec<Stored>::Compute;
  const int32_t* const places = memory.places + tensor.first_chosen + matrix * tensor.chosen;
  auto* const updates = static_cast<Product*>(tensor.product);
  const int64_t columns = tensor.columns, count = tile.column_end - tile.column;
  for (int64_t row = tile.row; row < tile.row_end; ++row) {
    if (has_rows(tensor)) {
      const int64_t from = (matrix * tensor.rows + places[row]) * columns + tile.column;
      Product* const to = updates + (matrix * tensor.chosen + row) * columns + tile.column;
      run_over(TakeRow<Stored, Product>{sum_of<Stored>(tensor, from, maximizes), to}, 0, count);
      continue;
    }
    const Sum<Stored> sum = sum_of<Stored>(tensor, (matrix * tensor.rows + row) * columns, maximizes);
    Product* const to = updates + (matrix * tensor.rows + row) * tensor.chosen;
    for (int64_t j = tile.column; j < tile.column_end; ++j) store(to, j, sum.template at<T>(places[j]));
  }
}

template <class Stored, class Times, class Moves>
struct AdvanceChosen {
  using T = typename Codec<Stored>::Compute;
  Stored *average, *weight;
  Sum<Stored> sum;
  T keep, factor;
  Times times;  // of the average
  Moves moves;

  template <class V>
  FUSEDSTEP_FN void run_at(int64_t i) const {
    using rules::mul_add;
    store(average, i, times.template at<V>(i) * sum.template at<V>(i));
    const V decayed = rounded<Stored>(load<V>(weight, i) * V(keep));
    store(weight, i, mul_add(V(factor), moves.template at<V>(i), decayed));
  }
};

// Returns the first of ascending places that is a column, or behind it.
FUSEDSTEP_FN int64_t first_from(const int32_t* places, int64_t count, int64_t column) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (places[middle] < column) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// A tensor's operands of the last pass, in a tile of a matrix.
template <class Stored, class Product>
struct ChosenTile {
  using T = typename Codec<Stored>::Compute;
  const ChosenTensor& tensor;
  Stored* weights;
  int64_t matrix;
  const ChosenMove& options;
  const Tile& tile;

  template <class Times, class Moves>
  void advance(int64_t row, const Times times, const Moves moves) const {
    const int64_t at = (matrix * tensor.rows + row) * tensor.columns + tile.column;
    AdvanceChosen<Stored, Times, Moves> body{static_cast<Stored*>(tensor.stored) + at,
                                             weights + at,
                                             sum_of<Stored>(tensor, at, options.choice.maximizes),
                                             static_cast<T>(options.keep),
                                             rounded<Stored>(static_cast<T>(tensor.factor)),
                                             times,
                                             moves};
    run_over(body, 0, tile.column_end - tile.column);
  }
};

// A CPU's operation on a weight takes a factor in the weight's dtype. What no channel of a direction has
// moves by 0 times the factor, as by torch's addition.
template <class Stored, class Product>
void advance_chosen(const ChosenTensor& tensor, void* weights, int64_t matrix, const ChosenMove& options,
                    const Tile& tile, const ChoiceMemory& memory) {
  using T = typename Codec<Stored>::Compute;
  const ChosenTile<Stored, Product> of{tensor, static_cast<Stored*>(weights), matrix, options, tile};
  const auto momentum = static_cast<T>(options.choice.momentum);
  const int64_t columns = tensor.columns, count = tile.column_end - tile.column;
  const int32_t* const positions = memory.positions + tensor.first_channel + matrix * channels_of(tensor);
  const int32_t* const places = memory.places + tensor.first_chosen + matrix * tensor.chosen;
  const auto* const directions = static_cast<const Product*>(tensor.product);
  if (has_rows(tensor)) {
    for (int64_t row = tile.row; row < tile.row_end; ++row) {
      if (const int32_t position = positions[row]; position >= 0) {
        const int64_t from = (matrix * tensor.chosen + position) * columns + tile.column;
        of.advance(row, OneFactor<T>{momentum}, Factors<Product>{directions + from});
      } else {
        of.advance(row, OneFactor<T>{T(1)}, OneFactor<T>{T(0)});
      }
    }
    return;
  }
  // For each column of a tile: the factor of the average, and the move of the weight in one row.
  alignas(64) T times[kTileColumns], moves[kTileColumns] = {};
  for (int64_t i = 0; i < count; ++i) times[i] = positions[tile.column + i] < 0 ? T(1) : momentum;
  const int64_t begin = first_from(places, tensor.chosen, tile.column),
                end = first_from(places, tensor.chosen, tile.column_end);
  for (int64_t row = tile.row; row < tile.row_end; ++row) {
    const Product* const direction = directions + (matrix * tensor.rows + row) * tensor.chosen;
    for (int64_t j = begin; j < end; ++j) moves[places[j] - tile.column] = load<T>(direction, j);
    of.advance(row, Factors<T>{times}, Factors<T>{moves});
  }
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
