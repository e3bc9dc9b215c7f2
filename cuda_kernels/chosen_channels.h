// The border between the kernels of chosen_channels.cu and the host code that launches them.
#pragma once
#include <cstdint>

#include "cuda_kernels/kernel_table.h"
#include "cuda_kernels/matrix_passes.h"
#include "src/core/chosen_channels.h"

namespace fusedstep::cuda {

// Tensors of one launch.
struct ChosenLaunch {
  static constexpr int kMostTensors = 56;
  ChosenTensor tensors[kMostTensors];
  uint32_t first_block[kMostTensors + 1];
  int count;
  ChoiceMemory memory;
  Queue queue;
};
static_assert(sizeof(ChosenLaunch) <= 4000);

struct ChosenPasses {
  // A pass reads the results of the pass before. `fold` adds up partial norms, for tensors that have partial
  // norms.
  void (*sum)(const ChosenLaunch&, bool maximizes);
  void (*fold)(const ChosenLaunch&);
  void (*choose)(const ChosenLaunch&);
  void (*take)(const ChosenLaunch&, double momentum);
  void (*move)(const ChosenLaunch&, double keep);
};
const ChosenPasses& chosen_passes(PassFormat format);

}  // namespace fusedstep::cuda
