#include "src/ops/native_plan.h"

namespace fusedstep::ops {
namespace {

BoundRule lamb(double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled,
               bool debias, bool debias_lr, bool adapt, double max_weight_norm, double min_ratio,
               double max_ratio) {
  const unsigned flags = (weight_decay != 0) * (decoupled ? rules::kLambDecoupled : rules::kLambDecay);
  return bind_rule<rules::Lamb>(
      {lr, beta1, beta2, eps, weight_decay, debias, debias_lr, adapt, max_weight_norm, min_ratio, max_ratio},
      flags);
}

FUSEDSTEP_STEP_OPERATORS(lamb,
                         "float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled, "
                         "bool debias, bool debias_lr, bool adapt, float max_weight_norm, float min_ratio, "
                         "float max_ratio")

}  // namespace
}  // namespace fusedstep::ops
