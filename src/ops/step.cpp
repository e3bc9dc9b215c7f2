// The operators that take a step, whatever the rule: over a plan, and over lists.
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "src/ops/native_plan.h"
#include "src/ops/rules.h"

namespace fusedstep::ops {
namespace {

void plan_prepare(int64_t plan, int64_t rule, const std::vector<double>& options, double grad_factor,
                  int64_t grads) {
  prepare_step(plan, rule_at(rule), options, grad_factor, grads, {});
}

// Gives the states of a plan the roles that they have in a rule. To be called before it is bound.
void plan_roles(int64_t plan, int64_t rule) { find_plan(plan)->plan.use_roles(rule_at(rule).roles); }

// The phases of the step over a plan that has been prepared, of a rule with norms.
void plan_direction(int64_t plan, const Tensor& norms2) { take_direction(*find_plan(plan), norms2); }
void plan_apply(int64_t plan, const Tensor& norms2) { take_application(*find_plan(plan), norms2); }

// Takes the steps over these plans that have been prepared.
void plans_step(const std::vector<int64_t>& handles) { take_steps(handles); }

// Reads and writes nothing but its arguments, so that torch.compile can follow it. A number by itself would
// be a constant of the compiled graph: hence the tensor.
void step(const Tensors& weights, const Tensors& grads, const Tensors& states, const Tensors& steps,
          const Tensor& options, int64_t rule_index) {
  const Rule& rule = rule_at(rule_index);
  const std::span<const double> values = numbers(options, rule.options.size() + 1);
  const BoundRule bound = rule.bind(values);
  const bool masters = !weights.empty() && slots_of(states, weights.size()) > bound.states;
  const std::unique_ptr<NativePlan> native = make_plan(weights, states, steps, masters);
  native->plan.use_roles(rule.roles);
  check(bind_plan(*native, views(weights, "weight"), views(grads, "gradient")),
        "weights must all be on one device");
  prepare_step(*native, bound, {.maximize = values.back() != 0});
  take_step(*native);
}

// On tensors that have shapes and no memory, by which a compiler looks at an operator.
void step_shapes(const Tensors& /*weights*/, const Tensors& /*grads*/, const Tensors& /*states*/,
                 const Tensors& /*steps*/, const Tensor& /*options*/, int64_t /*rule*/) {}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def("plan_prepare(int plan, int rule, float[] options, float grad_factor, int grads) -> ()");
  m.def("plan_apply(int plan, Tensor norms2) -> ()");
  m.def("plan_direction(int plan, Tensor(a!) norms2) -> ()");
  m.def("plan_roles(int plan, int rule) -> ()");
  m.def("plans_step(int[] plans) -> ()");
  m.def(
      "step(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] states, Tensor(c!)[] steps, Tensor options, "
      "int rule) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fusedstep, CompositeExplicitAutograd, m) {
  m.impl("plan_apply", TORCH_BOX(&plan_apply));
  m.impl("plan_direction", TORCH_BOX(&plan_direction));
  m.impl("plan_prepare", TORCH_BOX(&plan_prepare));
  m.impl("plan_roles", TORCH_BOX(&plan_roles));
  m.impl("plans_step", TORCH_BOX(&plans_step));
}

STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) { m.impl("step", TORCH_BOX(&step)); }

STABLE_TORCH_LIBRARY_IMPL(fusedstep, CUDA, m) { m.impl("step", TORCH_BOX(&step)); }

STABLE_TORCH_LIBRARY_IMPL(fusedstep, Meta, m) { m.impl("step", TORCH_BOX(&step_shapes)); }

}  // namespace

void prepare_step(int64_t plan, const Rule& rule, std::span<const double> options, double grad_factor,
                  int64_t grads, const Aside& aside) {
  check(options.size() == rule.options.size() + 1, "an option is missing, or there is one too many");
  prepare_step(*find_plan(plan), rule.bind(options), {options.back() != 0, grad_factor, grads}, aside);
}

}  // namespace fusedstep::ops
