// Kernels over blocks of matrices with factored second moments: sums of squares by rows and columns, norms,
// and the step. A block's rows and columns are those of the matrix, whatever its layout in memory is, so that
// all layouts have the same bits. A row that is not contiguous goes through a tile on the stack.
#pragma once
#include "cpu_kernels/kernel_table.h"
#include "cpu_kernels/reduce.h"
#include "src/core/factored.h"

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

// The index of a lane is then a constant, as with norms of rules.
constexpr int kUnrolledTileLanes = kIsFallback ? 1 : 2 * kUnrolledLanes;

// The sums of squares of a row in a tile, lane by lane.
template <class T>
class TileSums {
 public:
  FUSEDSTEP_FN void add_squares(int lane, const Pack<T>& x) {
    half_[lane / kLanes].add_squares(lane % kLanes, x);
  }
  FUSEDSTEP_FN void save(T* lanes) const {
    half_[0].save(lanes);
    half_[1].save(lanes + kLanes);
  }

 private:
  static_assert(kTileLanes == 2 * kLanes);
  LaneSums<T> half_[2];
};

// Adds up the lanes in a tree. The upper levels of the tree add packs, the lower levels add numbers.
FUSEDSTEP_FN double sum_of_lanes(const double* lanes) {
  using V = Pack<double>;
  V sums[kTileLanes / V::size()];
  for (int i = 0; i < kTileLanes / V::size(); ++i) sums[i] = load<V>(lanes, i * V::size());
  alignas(64) double last[V::size()];
  store(last, 0, sum_in_tree<kTileLanes / V::size()>(sums));
  return sum_in_tree<V::size()>(last);
}
FUSEDSTEP_FN double sum_of_lanes(const float* lanes) {
  using V = Pack<float>;
  using W = Pack<double>;
  alignas(64) double sums[kTileLanes];
  for (int lane = 0; lane < kTileLanes; lane += V::size()) {
    W low, high;
    widen(load<V>(lanes, lane), low, high);
    store(sums, lane, low);
    store(sums, lane + W::size(), high);
  }
  return sum_of_lanes(sums);
}

// The columns [begin, end) of a tile, of which those from `whole` on fill no group of lanes.
struct TileColumns {
  int64_t begin, end, whole;

  FUSEDSTEP_FN TileColumns(const FactoredBlock& block, int64_t tile)
      : begin(tile * kTileColumns),
        end(std::min(begin + kTileColumns, block.columns)),
        whole(end - (end - begin) % kTileLanes) {}
};
FUSEDSTEP_FN int64_t tiles_of(const FactoredBlock& block) {
  return (block.columns + kTileColumns - 1) / kTileColumns;
}

// Calls run(kind, j) for the columns that fill no group of lanes: by packs first, then column by column.
// `kind` is a null pointer to a pack or to a number.
template <class T, class Run>
FUSEDSTEP_FN void for_rest(const TileColumns& in, Run run) {
  using V = Pack<T>;
  int64_t j = in.whole;
  for (; j + V::size() <= in.end; j += V::size()) run(static_cast<V*>(nullptr), j);
  for (; j < in.end; ++j) run(static_cast<T*>(nullptr), j);
}

// Adds the square of `x` to a number, or to a pack of them.
template <class T, class X>
FUSEDSTEP_FN void add_square_to(T* numbers, int64_t j, const X& x) {
  store(numbers, j, with_square(load<X>(numbers, j), x));
}

// Rows [r, r + kRows): column sums are loaded and stored once for all of them.
template <int kRows, class Grad>
FUSEDSTEP_FN void sum_rows(const FactoredBlock& block, int64_t r, BlockRow<Grad>* rows) {
  using T = typename Codec<Grad>::Compute;
  using V = Pack<T>;
  auto* __restrict const column_sums = static_cast<T*>(block.column_sums);
  const T factor = static_cast<T>(block.grad_factor);
  const Grad* grad[kRows];
  for (int k = 0; k < kRows; ++k) grad[k] = rows[k].load(block.grad, r + k, block.columns);
  for (int64_t tile = 0; tile < tiles_of(block); ++tile) {
    const TileColumns in(block, tile);
    TileSums<T> sums[kRows];
    for (int64_t j = in.begin; j < in.whole; j += kTileLanes) {
#pragma GCC unroll kUnrolledTileLanes
      for (int lane = 0; lane < kTileLanes; lane += V::size()) {
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
      alignas(64) T lanes[kTileLanes];
      sums[k].save(lanes);
      for_rest<T>(
          in, [&]<class X>(X*, int64_t j) __attribute__((always_inline)) {
            const X x = load<X>(grad[k], j) * X(factor);
            add_square_to(lanes, j - in.whole, x);
            add_square_to(column_sums, j, x);
          });
      block.row_sums[tile * block.row_sums_of_tile + r + k] = sum_of_lanes(lanes);
    }
  }
}

// A matrix of so few columns has the same sums without packs, and without the lanes that stay zero.
constexpr int kNarrowColumns = 8;

template <class Grad>
FUSEDSTEP_FN void narrow_sums(const FactoredBlock& block) {
  using T = typename Codec<Grad>::Compute;
  auto* const column_sums = static_cast<T*>(block.column_sums);
  const T factor = static_cast<T>(block.grad_factor);
  BlockRow<Grad> rows;
  std::fill_n(column_sums, block.columns, T{0});
  for (int64_t r = 0; r < block.rows; ++r) {
    const Grad* const grad = rows.load(block.grad, r, block.columns);
    double lanes[kNarrowColumns] = {};
    for (int64_t j = 0; j < block.columns; ++j) {
      const T x = load<T>(grad, j) * factor;
      lanes[j] = static_cast<double>(with_square(T{0}, x));
      column_sums[j] = with_square(column_sums[j], x);
    }
    block.row_sums[r] = sum_in_tree<kNarrowColumns>(lanes);
  }
}

template <class Weight, class Grad>
FUSEDSTEP_FN void factored_sums(const FactoredBlock& block) {
  using T = typename Codec<Grad>::Compute;
  if (block.columns <= kNarrowColumns) return narrow_sums<Grad>(block);
  // As many as leave registers for the columns.
  constexpr int kRows = std::max(1, Pack<T>::size() / 4);
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
FUSEDSTEP_FN void narrow_norms(const FactoredBlock& block) {
  using T = typename Codec<Weight>::Compute;
  BlockRow<Weight> weights;
  BlockRow<Grad> grads;
  double totals[2][kNarrowColumns] = {};
  for (int64_t r = 0; r < block.rows; ++r) {
    const Weight* const weight = weights.load(block.weight, r, block.columns);
    const RowUpdate<Grad, T> update(block, r, grads.load(block.grad, r, block.columns));
    for (int64_t j = 0; j < block.columns; ++j) {
      totals[0][j] += static_cast<double>(with_square(T{0}, load<T>(weight, j)));
      totals[1][j] += static_cast<double>(with_square(T{0}, update.template at<T>(j)));
    }
  }
  for (int norm = 0; norm < 2; ++norm) block.norms[norm] = sum_in_tree<kNarrowColumns>(totals[norm]);
}

template <class Weight, class Grad>
FUSEDSTEP_FN void factored_norms(const FactoredBlock& block) {
  using T = typename Codec<Weight>::Compute;
  using V = Pack<T>;
  if (block.columns <= kNarrowColumns) return narrow_norms<Weight, Grad>(block);
  BlockRow<Weight> weights;
  BlockRow<Grad> grads;
  alignas(64) double totals[kBlockTiles][2][kTileLanes];
  std::fill_n(&totals[0][0][0], tiles_of(block) * 2 * kTileLanes, 0.0);
  for (int64_t r = 0; r < block.rows; ++r) {
    const Weight* const weight = weights.load(block.weight, r, block.columns);
    const RowUpdate<Grad, T> update(block, r, grads.load(block.grad, r, block.columns));
    for (int64_t tile = 0; tile < tiles_of(block); ++tile) {
      const TileColumns in(block, tile);
      TileSums<T> of_weight, of_update;
      for (int64_t j = in.begin; j < in.whole; j += kTileLanes) {
#pragma GCC unroll kUnrolledTileLanes
        for (int lane = 0; lane < kTileLanes; lane += V::size()) {
          of_weight.add_squares(lane, load<V>(weight, j + lane));
          of_update.add_squares(lane, update.template at<V>(j + lane));
        }
      }
      alignas(64) T lanes[2][kTileLanes];
      of_weight.save(lanes[0]);
      of_update.save(lanes[1]);
      for_rest<T>(
          in, [&]<class X>(X*, int64_t j) __attribute__((always_inline)) {
            add_square_to(lanes[0], j - in.whole, load<X>(weight, j));
            add_square_to(lanes[1], j - in.whole, update.template at<X>(j));
          });
      for (int norm = 0; norm < 2; ++norm) {
        for (int lane = 0; lane < kTileLanes; ++lane) {
          totals[tile][norm][lane] += static_cast<double>(lanes[norm][lane]);
        }
      }
    }
  }
  for (int64_t tile = 0; tile < tiles_of(block); ++tile) {
    for (int norm = 0; norm < 2; ++norm) block.norms[2 * tile + norm] = sum_of_lanes(totals[tile][norm]);
  }
}

template <class V, class Weight, class Update, class T>
FUSEDSTEP_FN void factored_apply_at(const FactoredBlock& block, const Update& update, Weight* weight,
                                    T* moment, int64_t j) {
  using rules::mul_add;
  V move = update.template at<V>(j) * V(static_cast<T>(block.step));
  if (moment != nullptr) {
    move =
        mul_add(V(static_cast<T>(1 - block.beta)), move, V(static_cast<T>(block.beta)) * load<V>(moment, j));
    store(moment, j, move);
  }
  store(weight, j, load<V>(weight, j) * V(static_cast<T>(block.keep)) - move);
}

// The columns [0, count) of a row.
template <class Weight, class Update, class T>
FUSEDSTEP_FN void factored_apply_to(const FactoredBlock& block, const Update& update, Weight* weight,
                                    T* moment, int64_t count) {
  using V = Pack<T>;
  int64_t j = 0;
  for (; j + V::size() <= count; j += V::size()) factored_apply_at<V>(block, update, weight, moment, j);
  for (; j < count; ++j) factored_apply_at<T>(block, update, weight, moment, j);
}

template <class Weight, class Grad>
FUSEDSTEP_FN void factored_apply(const FactoredBlock& block) {
  using T = typename Codec<Weight>::Compute;
  BlockRow<Weight> weights;
  BlockRow<Grad> grads;
  BlockRow<T> moments;
  const int64_t columns = block.columns;
  for (int64_t r = 0; r < block.rows; ++r) {
    Weight* const weight = weights.load(block.weight, r, columns);
    T* const moment = block.moment.first ? moments.load(block.moment, r, columns) : nullptr;
    const RowUpdate<Grad, T> update(block, r, grads.load(block.grad, r, columns));
    factored_apply_to(block, update, weight, moment, columns);
    weights.store(block.weight, columns);
    if (moment) moments.store(block.moment, columns);
  }
}

// The updates of matrices of one element, which lie in a row: each has a row factor of its own.
template <class Grad, class T>
struct ElementUpdate {
  const Grad* grad;
  const T *row_factors, *column_factors;
  T grad_factor, least;

  FUSEDSTEP_FN ElementUpdate(const FactoredBlock& block, const Grad* elements)
      : grad(elements),
        row_factors(static_cast<const T*>(block.row_factors)),
        column_factors(static_cast<const T*>(block.column_factors)),
        grad_factor(static_cast<T>(-block.grad_factor)),
        least(static_cast<T>(-block.most)) {}

  template <class V>
  FUSEDSTEP_FN V at(int64_t j) const {
    const V row_factor = -load<V>(row_factors, j);
    const V factor = at_least(V(least), row_factor * load<V>(column_factors, j));
    return load<V>(grad, j) * V(grad_factor) * factor;
  }
};

// A phase over `count` matrices of one element. Their sums are the squares themselves.
template <FactoredPhase kPhase, class Weight, class Grad>
FUSEDSTEP_FN void factored_elements(const FactoredBlock& block, int64_t count) {
  using T = typename Codec<Weight>::Compute;
  const auto in_a_row = [](const BlockArray& array) { return BlockArray{array.first, 0, array.matrix, 0}; };
  BlockRow<Grad> grads;
  const Grad* const grad = grads.load(in_a_row(block.grad), 0, count);
  if constexpr (kPhase == kSums) {
    double* __restrict const row_sums = block.row_sums;
    T* __restrict const column_sums = static_cast<T*>(block.column_sums);
    const T factor = static_cast<T>(block.grad_factor);
    for (int64_t j = 0; j < count; ++j) {
      column_sums[j] = with_square(T{0}, load<T>(grad, j) * factor);
      row_sums[j] = static_cast<double>(column_sums[j]);
    }
    return;
  }
  BlockRow<Weight> weights;
  Weight* const weight = weights.load(in_a_row(block.weight), 0, count);
  const ElementUpdate<Grad, T> update(block, grad);
  if constexpr (kPhase == kNorms) {
    double* __restrict const norms = block.norms;
    for (int64_t j = 0; j < count; ++j) {
      norms[2 * j] = static_cast<double>(with_square(T{0}, load<T>(weight, j)));
      norms[2 * j + 1] = static_cast<double>(with_square(T{0}, update.template at<T>(j)));
    }
  } else {
    BlockRow<T> moments;
    T* const moment = block.moment.first ? moments.load(in_a_row(block.moment), 0, count) : nullptr;
    factored_apply_to(block, update, weight, moment, count);
    weights.store(in_a_row(block.weight), count);
    if (moment) moments.store(in_a_row(block.moment), count);
  }
}

template <class Stored>
FUSEDSTEP_FN void skip_matrices(BlockArray& array, int64_t count) {
  if (array.first != nullptr) array.first = static_cast<Stored*>(array.first) + count * array.matrix;
}

// Goes on to the matrix that is so many behind the first of the block.
template <class Weight, class Grad>
FUSEDSTEP_FN void skip_matrices(FactoredBlock& block, int64_t count) {
  using T = typename Codec<Weight>::Compute;
  skip_matrices<Weight>(block.weight, count);
  skip_matrices<Grad>(block.grad, count);
  skip_matrices<T>(block.moment, count);
  block.matrices -= count;
  block.row_sums += count * block.rows;
  block.column_sums = static_cast<T*>(block.column_sums) + count * block.columns;
  if (block.row_factors != nullptr) {
    block.row_factors = static_cast<const T*>(block.row_factors) + count * block.rows;
  }
  block.column_factors = static_cast<const T*>(block.column_factors) + count * block.columns;
  block.norms += 2 * count;
}

// Runs a phase over all matrices of a block.
template <FactoredPhase kPhase, class Weight, class Grad>
void factored_phase(const FactoredBlock& first) {
  FactoredBlock block = first;  // no store of a kernel can change it
  if (block.matrices > 1 && block.rows == 1 && block.columns == 1) {
    while (block.matrices > 0) {
      const int64_t count = std::min(block.matrices, kBlockColumns);
      factored_elements<kPhase, Weight, Grad>(block, count);
      skip_matrices<Weight, Grad>(block, count);
    }
    return;
  }
  while (block.matrices > 0) {
    if constexpr (kPhase == kSums) {
      factored_sums<Weight, Grad>(block);
    } else if constexpr (kPhase == kNorms) {
      factored_norms<Weight, Grad>(block);
    } else {
      factored_apply<Weight, Grad>(block);
    }
    skip_matrices<Weight, Grad>(block, 1);
  }
}

inline const FactoredKernels* factored(FactoredFormat format) {
#define FUSEDSTEP_KERNELS(name, Weight, Grad)                                  \
  {{factored_phase<kSums, Weight, Grad>, factored_phase<kNorms, Weight, Grad>, \
    factored_phase<kApply, Weight, Grad>}},
  static constexpr FactoredKernels table[] = {FUSEDSTEP_FACTORED_FORMATS(FUSEDSTEP_KERNELS)};
#undef FUSEDSTEP_KERNELS
  return &table[static_cast<int>(format)];
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
