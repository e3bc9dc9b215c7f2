#include "src/ops/native_plan.h"

namespace fusedstep::ops {
namespace {

void adagrad_(int64_t plan, double lr, double lr_decay, double weight_decay, double eps, bool maximize,
              double grad_factor, int64_t grads) {
  const unsigned flags = (weight_decay != 0) * rules::kAdagradDecay;
  const rules::AdagradHyper hyper{lr, lr_decay, weight_decay, eps};
  take_step(plan, bind_rule<rules::Adagrad>(hyper, flags), {maximize, grad_factor, grads});
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def("adagrad_(int plan, float lr, float lr_decay, float weight_decay, float eps, " FUSEDSTEP_GRAD_SCHEMA
        ") -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CompositeExplicitAutograd, m) {
  m.impl("adagrad_", TORCH_BOX(&adagrad_));
}

}  // namespace
}  // namespace fusedstep::ops
