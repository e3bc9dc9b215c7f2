// Kernels over rows that have one second moment each (src/core/rowwise.h).
#pragma once
#include "cpu_kernels/kernel_table.h"
#include "cpu_kernels/reduce.h"
#include "src/core/rowwise.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// The elements of a piece.
template <class Stored>
struct PieceOf {
  using T = typename Codec<Stored>::Compute;
  Stored* weight;
  const Stored* grad;
  T factor;

  FUSEDSTEP_FN explicit PieceOf(const RowPiece& piece)
      : weight(static_cast<Stored*>(piece.weight)),
        grad(static_cast<const Stored*>(piece.grad)),
        factor(static_cast<T>(piece.grad_factor)) {}

  template <class V>
  FUSEDSTEP_FN V grad_at(int64_t i) const {
    return load<V>(grad, i) * V(factor);
  }
  template <class V, bool kDecays>
  FUSEDSTEP_FN V decayed_grad_at(int64_t i, T in_gradient) const {
    using rules::mul_add;
    const V g = grad_at<V>(i);
    if constexpr (kDecays) return mul_add(V(in_gradient), load<V>(weight, i), g);
    return g;
  }
};

template <class Stored, bool kDecays>
FUSEDSTEP_FN void add_squares_of(const RowPiece& piece, double in_gradient, double* lanes) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  const PieceOf<Stored> elements(piece);
  const T decay = static_cast<T>(in_gradient);
  const int64_t whole = piece.count - piece.count % kLanes;
  LaneSums<double> sums;
  sums.restore(lanes);
  for (int64_t i = 0; i < whole; i += kLanes) {
#pragma GCC unroll kUnrolledLanes
    for (int lane = 0; lane < kLanes; lane += V::size()) {
      sums.add_squares(lane, elements.template decayed_grad_at<V, kDecays>(i + lane, decay));
    }
  }
  sums.save(lanes);
  for (int64_t i = whole; i < piece.count; ++i) {
    const T x = elements.template decayed_grad_at<T, kDecays>(i, decay);
    lanes[i - whole] = with_square(lanes[i - whole], static_cast<double>(x));
  }
}

template <class Stored>
void add_squares_of_row(const RowPiece& piece, double in_gradient, double* lanes) {
  const auto run = in_gradient != 0 ? add_squares_of<Stored, true> : add_squares_of<Stored, false>;
  run(piece, in_gradient, lanes);
}

template <class V, class Stored, class T>
FUSEDSTEP_FN void apply_to_row_at(const PieceOf<Stored>& piece, int64_t i, T keep, T length) {
  using rules::mul_add;
  store(piece.weight, i,
        mul_add(V(-length), piece.template grad_at<V>(i), V(keep) * load<V>(piece.weight, i)));
}

template <class Stored>
void apply_to_row(const RowPiece& piece, const RowwiseMove& move) {
  using T = typename Codec<Stored>::Compute;
  using V = Pack<T>;
  const PieceOf<Stored> elements(piece);
  const T keep = static_cast<T>(move.keep), length = static_cast<T>(move.length);
  int64_t i = 0;
  for (; i + V::size() <= piece.count; i += V::size()) apply_to_row_at<V>(elements, i, keep, length);
  for (; i < piece.count; ++i) apply_to_row_at<T>(elements, i, keep, length);
}

// By the type of a weight alone: its sums are in the precision of the maths.
inline const RowKernels* rowwise(Format format) {
#define FUSEDSTEP_KERNELS(name, Weight, State) \
  {add_squares_of_row<typename StoredOf<Weight>::Type>, apply_to_row<typename StoredOf<Weight>::Type>},
  static constexpr RowKernels table[] = {FUSEDSTEP_FORMATS(FUSEDSTEP_KERNELS)};
#undef FUSEDSTEP_KERNELS
  return &table[static_cast<int>(format)];
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
