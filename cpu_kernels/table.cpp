// Compiled once for each instruction set: the table of its kernels, and those that do not depend on a rule.
#include "cpu_kernels/by_rule.h"
#include "cpu_kernels/chunk.h"
#include "cpu_kernels/factored.h"
#include "cpu_kernels/gradients.h"
#include "cpu_kernels/rowwise.h"
#include "fusedstep/rules/list.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {
namespace {

const RuleKernels* find(rules::RuleId rule, unsigned flags, Format format) {
  switch (rule) {
#define FUSEDSTEP_CASE(Rule)   \
  case rules::RuleId::k##Rule: \
    return kernels_of<rules::Rule>(flags, format);
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
  const auto walk = task.is_on_tiles()       ? run_coded
                    : task.layout == nullptr ? run_dense
                    : task.layout->long_rows ? run_rows
                                             : run_packed;
  walk(TreatedKernel{kernel, treatment, task, norms}, begin, end);
  return FUSEDSTEP_STRING(FUSEDSTEP_ISA);
}

}  // namespace

extern const KernelTable kTable = {
    FUSEDSTEP_STRING(FUSEDSTEP_ISA), find, grads, run, decode, encode, factored, rowwise};

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
