// The kernels of the instruction set in use.
#pragma once
#include "cpu_kernels/kernel_table.h"
#include "cpu_kernels/matrix_passes.h"
#include "cpu_kernels/products.h"

namespace fusedstep {

// They throw std::invalid_argument if FUSEDSTEP_ISA names an instruction set that this machine does not run.
const cpu::KernelTable& kernels();
const cpu::PassTable& pass_kernels();

// Those of matrix products; null where the instruction set in use has none. Throws as kernels() does.
const cpu::ProductKernels* product_kernels();

}  // namespace fusedstep
