#include "src/ops/native_plan.h"

namespace fusedstep::ops {
namespace {

void adagrad_(int64_t plan, const Tensors& weights, const Tensors& grads, double lr, double lr_decay,
              double weight_decay, double eps, bool maximize) {
  const bool decay = weight_decay != 0;
  const unsigned flags = maximize * rules::kAdagradMaximize | decay * rules::kAdagradDecay;
  const rules::AdagradHyper hyper{lr, lr_decay, weight_decay, eps};
  take_step(plan, weights, grads, bind_rule<rules::Adagrad>(hyper, flags), /*keep_grad=*/true);
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def(
      "adagrad_(int plan, Tensor(a!)[] weights, Tensor(b!)[] grads, float lr, float lr_decay, float "
      "weight_decay, "
      "float eps, bool maximize) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) { m.impl("adagrad_", TORCH_BOX(&adagrad_)); }

}  // namespace
}  // namespace fusedstep::ops
