// The operators that belong to no optimizer: plans and instruction sets.
#include <cmath>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "fusedstep/isa.h"
#include "src/core/reduction.h"
#include "src/ops/direct.h"
#include "src/ops/native_plan.h"
#include "src/plan/operand_checks.h"
#include "src/plan/overlap.h"
#include "src/run/session.h"

namespace fusedstep::ops {
namespace {

int64_t plan_new(const Tensors& weights, const Tensors& states, const Tensors& steps, bool masters) {
  return register_plan(make_plan(weights, states, steps, masters));
}

bool plan_bind(int64_t plan, const Tensors& weights, const Tensors& grads) {
  return bind_plan(*find_plan(plan), views(weights, "weight"), views(grads, "gradient"));
}

// Makes steps over a plan round its weights at random. To be called before operands are bound.
void plan_round_at_random(int64_t plan, int64_t seed, const std::vector<int64_t>& places) {
  find_plan(plan)->plan.round_at_random(static_cast<uint64_t>(seed), places);
}

// Sets the numbers that the next step over a plan reads on its device, in place of arguments.
void plan_device_inputs(int64_t plan, std::optional<Tensor> lr, std::optional<Tensor> grad_factor,
                        std::optional<Tensor> found_inf) {
  const std::shared_ptr<NativePlan> native = find_plan(plan);
  const auto check_number = [&](const std::optional<Tensor>& tensor, const char* name, DType dtype) {
    if (!tensor) return;
    const TensorView number = view(*tensor, name);
    check(tensor->numel() == 1 && number.dtype == dtype && number.device == native->plan.device(),
          std::string(name) + " must be one number on the weights' device, of the dtype that it is read in");
  };
  check(native->device != nullptr, "the plan is one of the CPU: it is told what a step needs");
  check_number(lr, "lr", DType::kFloat);
  check_number(grad_factor, "grad_factor", DType::kDouble);
  check_number(found_inf, "found_inf", DType::kFloat);
  native->lr = std::move(lr);
  native->grad_factor = std::move(grad_factor);
  native->found_inf = std::move(found_inf);
}

// The plans of the handles, held for the call.
class Plans {
 public:
  explicit Plans(const std::vector<int64_t>& handles) {
    for (const int64_t handle : handles) {
      held_.push_back(find_plan(handle));
      plans_.push_back(&held_.back()->plan);
    }
  }
  std::span<Plan* const> all() const { return plans_; }

 private:
  std::vector<std::shared_ptr<NativePlan>> held_;
  std::vector<Plan*> plans_;
};

// The norm of all gradients of these plans on the CPU, summed in double in a fixed order.
double plans_grad_norm(const std::vector<int64_t>& handles) {
  const Plans plans(handles);
  double sum = 0;
  for (Plan* plan : plans.all()) sum += grad_norm2(*plan, num_threads());
  return std::sqrt(sum);
}

// The square of the norm of gradients on the CPU that no plan is for, summed as those of a plan are.
double grads_norm2(const Tensors& grads) {
  const std::vector<TensorView> found = views(grads, "gradient");
  Plan plan(found.size(), 0);
  for (size_t i = 0; i < found.size(); ++i) {
    // No weight is read: it only has the gradient's layout, if a weight may have it.
    TensorView weight = found[i];
    std::vector<int64_t> strides;
    if (overlaps_itself(weight.sizes, weight.strides)) {
      strides = strides_in_order(weight.sizes);
      weight.strides = strides;
    }
    plan.bind(i, {weight, found[i], {}});
  }
  return grad_norm2(plan, num_threads());
}

// Adds the square of the norm of a plan's gradients to a float64 number on its device.
void plan_add_grad_norm2(int64_t plan, const Tensor& sum) {
  const std::shared_ptr<NativePlan> native = find_plan(plan);
  const TensorView number = view(sum, "sum");
  check(native->device != nullptr && number.device == native->plan.device() && sum.numel() == 1 &&
            number.dtype == DType::kDouble,
        "sum must be one float64 number on the plan's device, which is not the CPU");
  native->device->add_grad_norm2(native->plan, static_cast<double*>(number.data));
}

// The elements of a tensor of any dtype, on any device.
Elements elements_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const auto* const begin = static_cast<const char*>(tensor.data_ptr());
  int64_t span = tensor.numel() == 0 ? 0 : 1;
  for (size_t d = 0; span > 0 && d < sizes.size(); ++d) span += (sizes[d] - 1) * strides[d];
  const auto size = static_cast<int>(tensor.element_size());
  return {begin, begin + span * size, size, {sizes.data(), sizes.size()}, {strides.data(), strides.size()}};
}

// Checks operands that no plan checks. `owners`: the number of each state's weight.
void check_apart(const Tensors& weights, const Tensors& states, const std::vector<int64_t>& owners) {
  check(owners.size() == states.size(), "owners must have an entry for each state");
  std::vector<Elements> elements;
  for (const Tensor& weight : weights) elements.push_back(elements_of(weight));
  for (size_t i = 0; i < weights.size(); ++i) {
    check_no_overlap(i, "the weight", elements[i].sizes, elements[i].strides);
  }
  check_none_shared(elements);
  for (size_t k = 0; k < states.size(); ++k) {
    const Elements state = elements_of(states[k]);
    check_no_overlap(owners[k], "a state", state.sizes, state.strides);
  }
}

void plan_delete(int64_t plan) { drop_plan(plan); }

void plan_check_idle(int64_t plan) { check_idle(*find_plan(plan)); }

std::string plan_isa(int64_t plan) { return find_plan(plan)->plan.memory().ran_on; }

std::string isa_in_use() { return isa(); }

std::vector<std::string> isas_here() { return isas(); }

std::string product_isa_in_use() { return product_isa(); }

std::vector<std::string> product_isas_here() { return product_isas(); }

void use_isa(std::string_view name) { force_isa(std::string(name)); }

std::vector<std::string> capabilities() {
  return {std::string("compiler=") + __VERSION__, "chunk=" + std::to_string(kChunkElements),
          "serial_elements=" + std::to_string(kSerialElements)};
}

STABLE_TORCH_LIBRARY(fusedstep, m) {
  m.def("plan_new(Tensor[] weights, Tensor[] states, Tensor[] steps, bool masters=False) -> int");
  m.def("plan_round_at_random(int plan, int seed, int[] places) -> ()");
  m.def("plan_bind(int plan, Tensor[] weights, Tensor[] grads) -> bool");
  m.def("plan_device_inputs(int plan, Tensor? lr, Tensor? grad_factor, Tensor? found_inf) -> ()");
  m.def("plan_add_grad_norm2(int plan, Tensor(a!) sum) -> ()");
  m.def("plans_aliasing_grads(int[] plans) -> int[]");
  m.def("plans_grad_norm(int[] plans) -> float");
  m.def("grads_norm2(Tensor[] grads) -> float");
  m.def("check_apart(Tensor[] weights, Tensor[] states, int[] owners) -> ()");
  m.def("plan_delete(int plan) -> ()");
  m.def("plan_check_idle(int plan) -> ()");
  m.def("plan_isa(int plan) -> str");
  m.def("isa() -> str");
  m.def("isas() -> str[]");
  m.def("product_isa() -> str");
  m.def("product_isas() -> str[]");
  m.def("force_isa(str name) -> ()");
  m.def("capabilities() -> str[]");
}

STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) {
  m.impl("plan_new", TORCH_BOX(&plan_new));
  m.impl("plan_bind", TORCH_BOX(&plan_bind));
  m.impl("grads_norm2", TORCH_BOX(&grads_norm2));
}

STABLE_TORCH_LIBRARY_IMPL(fusedstep, CUDA, m) {
  m.impl("plan_new", TORCH_BOX(&plan_new));
  m.impl("plan_bind", TORCH_BOX(&plan_bind));
}

// Takes tensors with the negative bit, and zero tensors, for view() to refuse. The dispatcher would otherwise
// make temporaries of them, and a plan keeps addresses.
STABLE_TORCH_LIBRARY_IMPL(fusedstep, Negative, m) {
  m.impl("plan_new", TORCH_BOX(&plan_new));
  m.impl("plan_bind", TORCH_BOX(&plan_bind));
}

STABLE_TORCH_LIBRARY_IMPL(fusedstep, ZeroTensor, m) {
  m.impl("plan_new", TORCH_BOX(&plan_new));
  m.impl("plan_bind", TORCH_BOX(&plan_bind));
}

STABLE_TORCH_LIBRARY_IMPL(fusedstep, CompositeExplicitAutograd, m) {
  m.impl("plan_round_at_random", TORCH_BOX(&plan_round_at_random));
  m.impl("plan_device_inputs", TORCH_BOX(&plan_device_inputs));
  m.impl("plan_add_grad_norm2", TORCH_BOX(&plan_add_grad_norm2));
  m.impl("check_apart", TORCH_BOX(&check_apart));
  m.impl("plan_delete", TORCH_BOX(&plan_delete));
  m.impl("plan_check_idle", TORCH_BOX(&plan_check_idle));
  m.impl("plan_isa", TORCH_BOX(&plan_isa));
  m.impl("plans_aliasing_grads", TORCH_BOX(&aliasing_grads));
  m.impl("plans_grad_norm", TORCH_BOX(&plans_grad_norm));
  m.impl("isa", TORCH_BOX(&isa_in_use));
  m.impl("isas", TORCH_BOX(&isas_here));
  m.impl("product_isa", TORCH_BOX(&product_isa_in_use));
  m.impl("product_isas", TORCH_BOX(&product_isas_here));
  m.impl("force_isa", TORCH_BOX(&use_isa));
  m.impl("capabilities", TORCH_BOX(&capabilities));
}

}  // namespace

void find_aliasing_grads(const std::vector<int64_t>& handles) {
  Plan::find_aliasing_grads(Plans(handles).all());
}

std::vector<int64_t> aliasing_grads(const std::vector<int64_t>& handles) {
  const Plans plans(handles);
  Plan::find_aliasing_grads(plans.all());
  std::vector<int64_t> found;
  for (size_t p = 0; p < handles.size(); ++p) {
    const Plan& plan = *plans.all()[p];
    for (size_t i = 0; i < plan.tensors(); ++i) {
      if (!plan.grad_is_writable(i))
        found.insert(found.end(), {static_cast<int64_t>(p), static_cast<int64_t>(i)});
    }
  }
  return found;
}

bool bind_plan(int64_t handle, std::span<const TensorView> weights, std::span<const TensorView> grads,
               std::span<const std::optional<RowIndex>> rows) {
  return bind_plan(*find_plan(handle), weights, grads, rows);
}

}  // namespace fusedstep::ops
