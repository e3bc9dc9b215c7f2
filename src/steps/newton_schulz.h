// The Newton–Schulz iteration as a chain of matrix products.
#pragma once
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
// Source: Jordan et al., Muon, 2024.
std::vector<ChainProduct> newton_schulz_chain(std::span<const NewtonSchulzStep> steps);

}  // namespace fusedstep
