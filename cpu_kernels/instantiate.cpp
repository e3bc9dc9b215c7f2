// Compiled once per instruction set: every rule of the list, with every combination of its flags, for every
// format.
#include <array>
#include <utility>

#include "cpu_kernels/chunk.h"
#include "cpu_kernels/elementwise.h"
#include "cpu_kernels/gradients.h"
#include "cpu_kernels/reduce.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {
namespace {

template <class Rule, class Weight, class State>
constexpr RuleKernels kernels_of() {
  if constexpr (requires { &Rule::trust_ratio; }) {
    return two_phase_kernels<Rule, Weight, State>();
  } else {
    return elementwise_kernels<Rule, Weight, State>();
  }
}

using PerFormat = std::array<RuleKernels, static_cast<int>(Format::kCount)>;

template <class Rule>
constexpr PerFormat formats_of() {
#define FUSEDSTEP_KERNELS(name, Weight, State) kernels_of<Rule, Weight, State>(),
  return {FUSEDSTEP_FORMATS(FUSEDSTEP_KERNELS)};
#undef FUSEDSTEP_KERNELS
}

template <template <unsigned> class Rule, unsigned... kFlags>
const RuleKernels* pick(std::integer_sequence<unsigned, kFlags...>, unsigned flags, Format format) {
  static constexpr PerFormat table[] = {formats_of<Rule<kFlags>>()...};
  return &table[flags][static_cast<int>(format)];
}

const RuleKernels* find(rules::RuleId rule, unsigned flags, Format format) {
  switch (rule) {
#define FUSEDSTEP_CASE(Rule)                                                                            \
  case rules::RuleId::k##Rule:                                                                          \
    return pick<rules::Rule>(std::make_integer_sequence<unsigned, rules::Rule<0>::kFlagCombinations>{}, \
                             flags, format);
    FUSEDSTEP_RULES(FUSEDSTEP_CASE)
#undef FUSEDSTEP_CASE
  }
  return nullptr;
}

#define FUSEDSTEP_STRING_(x) #x
#define FUSEDSTEP_STRING(x) FUSEDSTEP_STRING_(x)

const GradKernels* grads(Format format) {
#define FUSEDSTEP_KERNELS(name, Weight, State) grad_kernels<typename StoredOf<Weight>::Type>(),
  static constexpr GradKernels table[] = {FUSEDSTEP_FORMATS(FUSEDSTEP_KERNELS)};
#undef FUSEDSTEP_KERNELS
  return &table[static_cast<int>(format)];
}

const char* run(const SpanKernel& kernel, const TensorTask& task, const GradTreatment& treatment,
                int64_t begin, int64_t end, double* norms) {
  const auto walk = task.layout == nullptr ? run_dense : task.layout->long_rows ? run_rows : run_packed;
  walk(Work{kernel, treatment, task, norms}, begin, end);
  return FUSEDSTEP_STRING(FUSEDSTEP_ISA);
}

}  // namespace

extern const KernelTable kTable = {FUSEDSTEP_STRING(FUSEDSTEP_ISA), Pack<float>::size(), find, grads, run};

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
