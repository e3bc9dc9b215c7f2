#include "src/ops/native_plan.h"

namespace fusedstep::ops {
namespace {

void lamb_(int64_t plan, const Tensors& weights, const Tensors& grads, double lr, double beta1, double beta2,
           double eps, double weight_decay, bool maximize, bool keep_grad) {
  const bool decay = weight_decay != 0;
  const unsigned flags = maximize * rules::kLambMaximize | decay * rules::kLambDecay;
  const rules::LambHyper hyper{lr, beta1, beta2, eps, weight_decay};
  take_step(plan, weights, grads, bind_rule<rules::Lamb>(hyper, flags), keep_grad);
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def(
      "lamb_(int plan, Tensor(a!)[] weights, Tensor(b!)[] grads, float lr, float beta1, float beta2, float "
      "eps, "
      "float weight_decay, bool maximize, bool keep_grad) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) { m.impl("lamb_", TORCH_BOX(&lamb_)); }

}  // namespace
}  // namespace fusedstep::ops
