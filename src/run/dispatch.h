// The kernels of the instruction set in use.
#pragma once
#include "cpu_kernels/kernel_table.h"

namespace fusedstep {

// Throws std::invalid_argument if FUSEDSTEP_ISA names an instruction set that this machine does not run.
const cpu::KernelTable& kernels();

}  // namespace fusedstep
