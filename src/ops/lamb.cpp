#include "src/ops/native_plan.h"

namespace fusedstep::ops {
namespace {

void lamb_(int64_t plan, double lr, double beta1, double beta2, double eps, double weight_decay,
           bool decoupled, bool debias, bool debias_lr, bool adapt, double max_weight_norm, double min_ratio,
           double max_ratio, bool maximize, double grad_factor, int64_t grads) {
  const unsigned flags = (weight_decay != 0) * (decoupled ? rules::kLambDecoupled : rules::kLambDecay);
  const rules::LambHyper hyper{lr,        beta1, beta2,           eps,       weight_decay, debias,
                               debias_lr, adapt, max_weight_norm, min_ratio, max_ratio};
  take_step(plan, bind_rule<rules::Lamb>(hyper, flags), {maximize, grad_factor, grads});
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def(
      "lamb_(int plan, float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled, "
      "bool debias, bool debias_lr, bool adapt, float max_weight_norm, float min_ratio, float "
      "max_ratio, " FUSEDSTEP_GRAD_SCHEMA ") -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CompositeExplicitAutograd, m) { m.impl("lamb_", TORCH_BOX(&lamb_)); }

}  // namespace
}  // namespace fusedstep::ops
