// The maths of second moments of which each row has one: row-wise Adagrad. The sum of a row's squares decides
// the last bits, so its order is the same on every instruction set, in every layout and for every number of
// threads: element j of a row, in row-major order, is in lane j % kLanes; the lanes are added in a tree. All
// of it is in double.
#pragma once
#include <cstdint>

#include "fusedstep/vocabulary.h"

namespace fusedstep {

// For the gradient g of a row w, at step t:
//
//     g = g + weight_decay * w                                      unless decoupled
//     sum = sum + mean(g^2)
//     w = (1 - lr * weight_decay) * w                               if decoupled
//     w = w - lr / (1 + (t - 1) * lr_decay) / (sqrt(sum) + eps) * g
struct RowwiseOptions {
  double lr = 1e-2, lr_decay = 0, weight_decay = 0, eps = 1e-10, decoupled_weight_decay = 0;

  static constexpr const char* kNames[] = {"lr", "lr_decay", "weight_decay", "eps", "decoupled_weight_decay"};
};

// The numbers that all rows of a tensor share.
struct RowwiseScalars {
  double lr, eps;
  double in_gradient;  // what the weight is multiplied by in the gradient
  double keep;         // what decoupled decay leaves of the weight

  RowwiseScalars(const RowwiseOptions& options, double step)
      : lr(options.lr / (1 + (step - 1) * options.lr_decay)),
        eps(options.eps),
        in_gradient(options.decoupled_weight_decay != 0 ? 0 : options.weight_decay),
        keep(options.decoupled_weight_decay != 0 ? 1 - options.lr * options.weight_decay : 1) {}
};

// w = keep * w - length * g, with the gradient as it comes.
struct RowwiseMove {
  double keep, length;

  template <class T>
  RowwiseMove(const RowwiseScalars& scalars, T sum)
      : length(scalars.lr / (rules::square_root(static_cast<double>(sum)) + scalars.eps)) {
    keep = scalars.keep - length * scalars.in_gradient;
  }
};

// Elements that lie one behind another, the first of which is in the first lane.
struct RowPiece {
  void* weight;
  const void* grad;
  int64_t count;
  double grad_factor;  // multiplies the gradient as it is read
};

struct RowKernels {
  // Adds the squares of g + in_gradient * w to lanes[kLanes].
  void (*add_squares)(const RowPiece&, double in_gradient, double* lanes);
  void (*apply)(const RowPiece&, const RowwiseMove&);
};

}  // namespace fusedstep
