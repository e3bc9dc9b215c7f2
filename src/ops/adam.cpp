#include "src/ops/native_plan.h"

namespace fusedstep::ops {
namespace {

BoundRule adam(double lr, double beta1, double beta2, double eps, double weight_decay, bool amsgrad,
               bool decoupled) {
  const bool coupled_decay = weight_decay != 0 && !decoupled;
  const unsigned flags = amsgrad * rules::kAdamAmsgrad | coupled_decay * rules::kAdamCoupledDecay;
  return bind_rule<rules::Adam>({lr, beta1, beta2, eps, weight_decay, decoupled}, flags);
}

FUSEDSTEP_STEP_OPERATORS(
    adam, "float lr, float beta1, float beta2, float eps, float weight_decay, bool amsgrad, bool decoupled")

}  // namespace
}  // namespace fusedstep::ops
