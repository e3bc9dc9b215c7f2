#include "src/ops/native_plan.h"

namespace fusedstep::ops {
namespace {

void adam_(int64_t plan, const Tensors& weights, const Tensors& grads, double lr, double beta1, double beta2,
           double eps, double weight_decay, bool amsgrad, bool maximize, bool decoupled) {
  const bool coupled_decay = weight_decay != 0 && !decoupled;
  const unsigned flags = amsgrad * rules::kAdamAmsgrad | maximize * rules::kAdamMaximize |
                         coupled_decay * rules::kAdamCoupledDecay;
  const rules::AdamHyper hyper{lr, beta1, beta2, eps, weight_decay, decoupled};
  take_step(plan, weights, grads, bind_rule<rules::Adam>(hyper, flags), /*keep_grad=*/true);
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def(
      "adam_(int plan, Tensor(a!)[] weights, Tensor(b!)[] grads, float lr, float beta1, float beta2, float "
      "eps, "
      "float weight_decay, bool amsgrad, bool maximize, bool decoupled) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) { m.impl("adam_", TORCH_BOX(&adam_)); }

}  // namespace
}  // namespace fusedstep::ops
