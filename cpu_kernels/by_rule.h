// The kernels of each rule, which is compiled by itself.
#pragma once
#include "cpu_kernels/kernel_table.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

template <template <unsigned> class Rule>
const RuleKernels* kernels_of(unsigned flags, Format format);

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
