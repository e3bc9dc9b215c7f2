// The Newton–Schulz iteration as a chain of matrix products.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "src/core/matrix_chain.h"

namespace fusedstep {

// A step takes the singular values s of X to a s + b s³ + c s⁵. `ends`: X is multiplied after the step.
struct NewtonSchulzStep {
  double a, b, c;
  bool ends;
};

// The products that take X through these steps, of which the last ends. With G = X X' a run of steps up to an
// end computes, from P = b G + c G²,
//
//     Q <- Q (a I + P),  G <- (a I + P) G (a I + P)
//
// and at its end X <- Q X. An end at each step is the usual form, X <- a X + P X. X and Y are overwritten:
// the result is in X after an even number of ends, or in Y.
//
// With an `aol_side`, the shorter side of X, the iteration begins with F X in place of X. F is diagonal:
//
//     F_ii = 1 / sqrt(max(sum_j |G_ij|, kLeastRowSum / side))
//
// G is at most diag(sum_j |G_ij|), because the difference is diagonally dominant, so that F G F is at most 1.
// X itself is not scaled: the first run has G <- F G F, and ends by X <- (Q F) X. Numbers stay those of
// float16: G is computed times the side, so that the mean of its diagonal is 1 for an X of norm 1, and the
// factors, which are 2^10 at most then, are multiplied by the root of the side behind the sums of Q F X. The
// numbers of Q are at most the product of all a of its run, which is 35 where it has two steps or more.
//
// Source: Jordan et al., Muon, 2024; Boissin et al., Turbo-Muon, arXiv 2512.04632, for F.
std::vector<ChainProduct> newton_schulz_chain(std::span<const NewtonSchulzStep> steps, int64_t aol_side = 0);

}  // namespace fusedstep
