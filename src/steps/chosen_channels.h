// The passes of a step that moves chosen rows or columns alone (src/core/chosen_channels.h), on the CPU's
// threads. Bits do not depend on their number. Each allocates before it writes.
#pragma once
#include <span>

#include "src/core/chosen_channels.h"
#include "src/core/matrix_passes.h"

namespace fusedstep {

// Chooses and writes updates, and leaves the averages as they are.
void choose_updates(PassFormat format, std::span<const ChosenTensor> tensors, const ChoiceMemory& memory,
                    bool maximizes, int threads);
// Takes gradients into averages and decays what is chosen of these; decays weights, and moves what is chosen.
// There is a weight for each tensor.
void advance_chosen(PassFormat format, std::span<const ChosenTensor> tensors, std::span<void* const> weights,
                    const ChoiceMemory& memory, const ChosenMove& options, int threads);

}  // namespace fusedstep
