#include "src/ops/native_plan.h"

namespace fusedstep::ops {
namespace {

void adam_(int64_t plan, double lr, double beta1, double beta2, double eps, double weight_decay, bool amsgrad,
           bool decoupled, bool maximize, double grad_factor, int64_t grads) {
  const bool coupled_decay = weight_decay != 0 && !decoupled;
  const unsigned flags = amsgrad * rules::kAdamAmsgrad | coupled_decay * rules::kAdamCoupledDecay;
  const rules::AdamHyper hyper{lr, beta1, beta2, eps, weight_decay, decoupled};
  take_step(plan, bind_rule<rules::Adam>(hyper, flags), {maximize, grad_factor, grads});
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def(
      "adam_(int plan, float lr, float beta1, float beta2, float eps, float weight_decay, bool amsgrad, "
      "bool decoupled, " FUSEDSTEP_GRAD_SCHEMA ") -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CompositeExplicitAutograd, m) { m.impl("adam_", TORCH_BOX(&adam_)); }

}  // namespace
}  // namespace fusedstep::ops
