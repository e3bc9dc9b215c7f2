// Chains of matrix products on a CPU, in bfloat16: operands stay packed from product to product.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu_kernels/products.h"
#include "src/core/matrix_chain.h"

namespace fusedstep {

// The bytes of workspace for these chains.
int64_t packed_chain_bytes(std::span<const ChainBatch> batches);

// Runs the chains of all batches. X is read first; a result that no product reads is written to X or Y.
void run_packed_chains(const cpu::ProductKernels& kernels, int threads, std::span<const ChainBatch> batches,
                       std::byte* workspace);

}  // namespace fusedstep
