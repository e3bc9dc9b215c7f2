// Compiled once for each instruction set and each rule of the list, which FUSEDSTEP_RULE names and
// FUSEDSTEP_RULE_HEADER has: every combination of its flags, for every format.
#include <array>
#include <utility>

#include "cpu_kernels/by_rule.h"
#include "cpu_kernels/elementwise_coded.h"
#include "cpu_kernels/reduce.h"
#include FUSEDSTEP_RULE_HEADER

namespace fusedstep::cpu::FUSEDSTEP_ISA {
namespace {

template <class Rule, class Weight, class State>
constexpr RuleKernels kernels_for() {
  if constexpr (kHasNorms<Rule>) {
    return two_phase_kernels<Rule, Weight, State>();
  } else {
    return elementwise_kernels<Rule, Weight, State>();
  }
}

using PerFormat = std::array<RuleKernels, static_cast<int>(Format::kCount)>;

template <class Rule>
constexpr PerFormat formats_of() {
#define FUSEDSTEP_KERNELS(name, Weight, State) kernels_for<Rule, Weight, State>(),
  return {FUSEDSTEP_FORMATS(FUSEDSTEP_KERNELS)};
#undef FUSEDSTEP_KERNELS
}

template <template <unsigned> class Rule, unsigned... kFlags>
const RuleKernels* pick(std::integer_sequence<unsigned, kFlags...>, unsigned flags, Format format) {
  static constexpr PerFormat table[] = {formats_of<Rule<kFlags>>()...};
  return &table[flags][static_cast<int>(format)];
}

}  // namespace

template <>
const RuleKernels* kernels_of<rules::FUSEDSTEP_RULE>(unsigned flags, Format format) {
  constexpr unsigned kCombinations = rules::FUSEDSTEP_RULE<0>::kFlagCombinations;
  return pick<rules::FUSEDSTEP_RULE>(std::make_integer_sequence<unsigned, kCombinations>{}, flags, format);
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
