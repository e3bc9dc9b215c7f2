// The step of a rule on a projected gradient, in the epilogue of the product that projects it.
#pragma once
#include <array>
#include <cstdint>

#include "src/steps/step.h"

namespace fusedstep {

// All is float32 and on one device. Where rows of the gradient are contracted, the projected gradient is
// [rank][along], else [along][rank]; states and the update are like it, and contiguous.
struct ProjectedTensor {
  float *grad, *basis, *update;
  std::array<float*, kMaxStates> states;
  int64_t grad_stride;              // from a row of the gradient to the next
  int64_t along, rank, contracted;  // the sides of the projected gradient, and the one that is gone
  bool from_left;                   // rows of the gradient are contracted
  // The basis, [rank][contracted], is rounded to TF32; what that leaves lies behind it if `in_two`, and the
  // product is then as exact as one in float32.
  bool in_two;
  float grad_factor;
};

// Queues the step on the device's current stream: the update becomes what the rule makes of a weight that
// is 0. Throws std::runtime_error, before anything is changed, where no kernel does this.
using ProjectedStep = void (*)(int device, const BoundRule& rule, double step, const ProjectedTensor& tensor);

}  // namespace fusedstep
