// The passes around the matrix products of a step (src/core/matrix_passes.h), on the CPU's threads. Bits do
// not depend on their number. Each allocates before it writes.
#pragma once
#include <cstddef>
#include <span>

#include "src/core/matrix_passes.h"

namespace fusedstep {

// Writes updates, and leaves the averages as they are.
void write_updates(PassFormat format, std::span<const PassTensor> tensors, const AverageOptions& options,
                   int threads);
// Takes gradients into averages, and decays and moves weights.
void advance_tensors(PassFormat format, std::span<const AdvanceTensor> tensors, const AdvanceOptions& options,
                     int threads);

// The numbers that normalize_matrices() needs room for.
size_t norm_sums(std::span<const NormTensor> tensors);
void normalize_matrices(NormFormat format, std::span<const NormTensor> tensors, const NormOptions& options,
                        float* sums, int threads);

}  // namespace fusedstep
