// Kernels over blocks of matrices with factored second moments: sums of squares by rows and columns, norms,
// and the step. A block's rows and columns are those of the matrix, whatever its layout in memory is, so that
// all layouts have the same bits. A row that is not contiguous goes through a tile on the stack.
#pragma once
#include "cpu_kernels/kernel_table.h"
#include "cpu_kernels/reduce.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// A row of elements, contiguous: in place, or as a copy.
template <class Stored>
class BlockRow {
 public:
  FUSEDSTEP_FN Stored* load(const BlockArray& array, int64_t row, int64_t columns) {
    in_place_ = static_cast<Stored*>(array.first) + row * array.row;
    if (array.column == 1) return in_place_;
    for (int64_t j = 0; j < columns; ++j) tile_[j] = in_place_[j * array.column];
    return tile_;
  }
  // Stores a copy that has been changed.
  FUSEDSTEP_FN void store(const BlockArray& array, int64_t columns) const {
    if (array.column == 1) return;
    for (int64_t j = 0; j < columns; ++j) in_place_[j * array.column] = tile_[j];
  }

 private:
  Stored* in_place_;
  alignas(64) Stored tile_[kBlockColumns];
};

// The sum of a row's lanes, which are floats or doubles, in a tree.
template <class T>
FUSEDSTEP_FN double sum_of_lanes(const T* lanes) {
  double sums[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) sums[lane] = static_cast<double>(lanes[lane]);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

// Rows [r, r + kRows): column sums are loaded and stored once for all of them.
template <int kRows, class Grad>
FUSEDSTEP_FN void sum_rows(const FactoredBlock& block, int64_t r, BlockRow<Grad>* rows) {
  using T = typename Codec<Grad>::Compute;
  using V = Pack<T>;
  auto* __restrict const column_sums = static_cast<T*>(block.column_sums);
  const T factor = static_cast<T>(block.grad_factor);
  const int64_t columns = block.columns, whole = columns - columns % kLanes;
  const Grad* grad[kRows];
  LaneSums<T> sums[kRows];
  for (int k = 0; k < kRows; ++k) grad[k] = rows[k].load(block.grad, r + k, columns);
  for (int64_t j = 0; j < whole; j += kLanes) {
#pragma GCC unroll kUnrolledLanes
    for (int lane = 0; lane < kLanes; lane += V::size()) {
      V column = load<V>(column_sums, j + lane);
#pragma GCC unroll 4
      for (int k = 0; k < kRows; ++k) {
        const V x = load<V>(grad[k], j + lane) * V(factor);
        sums[k].add_squares(lane, x);
        column = with_square(column, x);
      }
      store(column_sums, j + lane, column);
    }
  }
  for (int k = 0; k < kRows; ++k) {
    alignas(64) T lanes[kLanes];
    sums[k].save(lanes);
    for (int64_t j = whole; j < columns; ++j) {
      const T x = load<T>(grad[k], j) * factor;
      lanes[j - whole] = with_square(lanes[j - whole], x);
      column_sums[j] = with_square(column_sums[j], x);
    }
    block.row_sums[r + k] = sum_of_lanes(lanes);
  }
}

template <class Weight, class Grad>
void factored_sums(const FactoredBlock& block) {
  using T = typename Codec<Grad>::Compute;
  constexpr int kRows = 4;
  BlockRow<Grad> rows[kRows];
  auto* const column_sums = static_cast<T*>(block.column_sums);
  std::fill_n(column_sums, block.columns, T{0});
  int64_t r = 0;
  for (; r + kRows <= block.rows; r += kRows) sum_rows<kRows>(block, r, rows);
  for (; r < block.rows; ++r) sum_rows<1>(block, r, rows);
}

// The larger one, and `x` if it is NaN.
FUSEDSTEP_FN float at_least(float least, float x) { return least > x ? least : x; }
FUSEDSTEP_FN double at_least(double least, double x) { return least > x ? least : x; }
template <class T>
FUSEDSTEP_FN Pack<T> at_least(const Pack<T>& least, const Pack<T>& x) {
  return Pack<T>(least.v > x.v ? least.v : x.v);
}

// The update of a row's elements. Negative factors make a minimum of the maximum.
template <class Grad, class T>
struct RowUpdate {
  const Grad* grad;
  const T* column_factors;
  T grad_factor, row_factor, least;

  FUSEDSTEP_FN RowUpdate(const FactoredBlock& block, int64_t row, const Grad* elements)
      : grad(elements),
        column_factors(static_cast<const T*>(block.column_factors)),
        grad_factor(static_cast<T>(-block.grad_factor)),
        row_factor(block.row_factors ? -static_cast<const T*>(block.row_factors)[row] : T{-1}),
        least(static_cast<T>(-block.most)) {}

  template <class V>
  FUSEDSTEP_FN V at(int64_t j) const {
    const V factor = at_least(V(least), V(row_factor) * load<V>(column_factors, j));
    return load<V>(grad, j) * V(grad_factor) * factor;
  }
};

template <class Weight, class Grad>
void factored_norms(const FactoredBlock& block) {
  using T = typename Codec<Weight>::Compute;
  using V = Pack<T>;
  BlockRow<Weight> weights;
  BlockRow<Grad> grads;
  const int64_t columns = block.columns, whole = columns - columns % kLanes;
  for (int64_t r = 0; r < block.rows; ++r) {
    const Weight* const weight = weights.load(block.weight, r, columns);
    const RowUpdate<Grad, T> update(block, r, grads.load(block.grad, r, columns));
    LaneSums<T> of_weight, of_update;
    for (int64_t j = 0; j < whole; j += kLanes) {
#pragma GCC unroll kUnrolledLanes
      for (int lane = 0; lane < kLanes; lane += V::size()) {
        of_weight.add_squares(lane, load<V>(weight, j + lane));
        of_update.add_squares(lane, update.template at<V>(j + lane));
      }
    }
    alignas(64) T lanes[2][kLanes];
    of_weight.save(lanes[0]);
    of_update.save(lanes[1]);
    for (int64_t j = whole; j < columns; ++j) {
      lanes[0][j - whole] = with_square(lanes[0][j - whole], load<T>(weight, j));
      lanes[1][j - whole] = with_square(lanes[1][j - whole], update.template at<T>(j));
    }
    block.norms[0] += sum_of_lanes(lanes[0]);
    block.norms[1] += sum_of_lanes(lanes[1]);
  }
}

template <class V, class Weight, class Grad, class T>
FUSEDSTEP_FN void factored_apply_at(const FactoredBlock& block, const RowUpdate<Grad, T>& update,
                                    Weight* weight, T* moment, int64_t j) {
  using rules::mul_add;
  V move = update.template at<V>(j) * V(static_cast<T>(block.step));
  if (moment != nullptr) {
    move =
        mul_add(V(static_cast<T>(1 - block.beta)), move, V(static_cast<T>(block.beta)) * load<V>(moment, j));
    store(moment, j, move);
  }
  store(weight, j, load<V>(weight, j) * V(static_cast<T>(block.keep)) - move);
}

template <class Weight, class Grad>
void factored_apply(const FactoredBlock& block) {
  using T = typename Codec<Weight>::Compute;
  using V = Pack<T>;
  BlockRow<Weight> weights;
  BlockRow<Grad> grads;
  BlockRow<T> moments;
  const FactoredBlock copy = block;  // no store can change it
  const int64_t columns = copy.columns;
  for (int64_t r = 0; r < copy.rows; ++r) {
    Weight* const weight = weights.load(copy.weight, r, columns);
    T* const moment = copy.moment.first ? moments.load(copy.moment, r, columns) : nullptr;
    const RowUpdate<Grad, T> update(copy, r, grads.load(copy.grad, r, columns));
    int64_t j = 0;
    for (; j + V::size() <= columns; j += V::size()) factored_apply_at<V>(copy, update, weight, moment, j);
    for (; j < columns; ++j) factored_apply_at<T>(copy, update, weight, moment, j);
    weights.store(copy.weight, columns);
    if (moment) moments.store(copy.moment, columns);
  }
}

inline const FactoredKernels* factored(FactoredFormat format) {
#define FUSEDSTEP_KERNELS(name, Weight, Grad) \
  {{factored_sums<Weight, Grad>, factored_norms<Weight, Grad>, factored_apply<Weight, Grad>}},
  static constexpr FactoredKernels table[] = {FUSEDSTEP_FACTORED_FORMATS(FUSEDSTEP_KERNELS)};
#undef FUSEDSTEP_KERNELS
  return &table[static_cast<int>(format)];
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
