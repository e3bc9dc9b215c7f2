// The border between the kernels of projected.cu and the host code that launches them.
#pragma once
#include <cstdint>

#include "cuda_kernels/kernel_table.h"

namespace fusedstep::cuda {

// As ProjectedTensor (src/steps/projected.h).
struct ProjectedLaunch {
  const float *grad, *basis;
  float* update;
  float* states[kMaxStates];
  int64_t grad_stride;
  int along, rank, contracted;
  int splits;  // blocks that share out what is contracted; the launch finds out
  float grad_factor;
  Scalars scalars;
};

// Launches the step of a rule without flags, and returns true; or returns false if the device cannot run it.
template <template <unsigned> class Rule>
bool launch_projected(const ProjectedLaunch& launch, bool from_left, bool in_two, int device, Stream stream);

}  // namespace fusedstep::cuda
