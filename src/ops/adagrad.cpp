#include "src/ops/native_plan.h"

namespace fusedstep::ops {
namespace {

BoundRule adagrad(double lr, double lr_decay, double weight_decay, double eps) {
  const unsigned flags = (weight_decay != 0) * rules::kAdagradDecay;
  return bind_rule<rules::Adagrad>({lr, lr_decay, weight_decay, eps}, flags);
}

FUSEDSTEP_STEP_OPERATORS(adagrad, "float lr, float lr_decay, float weight_decay, float eps")

}  // namespace
}  // namespace fusedstep::ops
