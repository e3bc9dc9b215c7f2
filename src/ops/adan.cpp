#include "src/ops/native_plan.h"

namespace fusedstep::ops {
namespace {

BoundRule adan(double lr, double beta1, double beta2, double beta3, double eps, double weight_decay,
               bool no_prox) {
  return bind_rule<rules::Adan>({lr, beta1, beta2, beta3, eps, weight_decay, no_prox}, 0);
}

FUSEDSTEP_STEP_OPERATORS(adan,
                         "float lr, float beta1, float beta2, float beta3, float eps, float weight_decay, "
                         "bool no_prox")

}  // namespace
}  // namespace fusedstep::ops
