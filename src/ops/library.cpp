// The operators that belong to no optimizer: plans and instruction sets.
#include <stdexcept>
#include <string>

#include "fusedstep/isa.h"
#include "src/ops/native_plan.h"

namespace fusedstep::ops {
namespace {

int64_t plan_new(const Tensors& weights, const Tensors& states, const Tensors& steps) {
  const size_t count = weights.size();
  if (count == 0) throw std::runtime_error("weights must not be empty");
  check(states.size() % count == 0 && states.size() / count <= cpu::kMaxStates,
        "states must be slot-major, the same number for each weight");
  check(steps.size() == count, "steps must have one tensor for each weight");
  for (size_t i = 0; i < count; ++i) {
    const std::string who = "tensor " + std::to_string(i) + " of the list: ";
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(steps[i].get(), &dtype));
    check(steps[i].is_cpu() && steps[i].numel() == 1 && dtype == aoti_torch_dtype_float32(),
          who + "the step count must be one float32 number on the CPU");
    const TensorView weight = view(weights[i], "weight");
    check(!overlaps_itself(weight.sizes, weight.strides),
          who + "the weight overlaps itself in memory (an expanded tensor?); clone() it first");
  }
  return register_plan(std::make_unique<NativePlan>(states, steps, static_cast<int>(states.size() / count)));
}

void plan_check(int64_t plan, const Tensors& weights, const Tensors& grads) {
  bind(*find_plan(plan), weights, grads);
}

void plan_delete(int64_t plan) { drop_plan(plan); }

std::string plan_isa(int64_t plan) { return find_plan(plan)->plan.ran_on; }

std::string isa_in_use() { return isa(); }

std::vector<std::string> isas_here() { return isas(); }

void use_isa(std::string_view name) { force_isa(std::string(name)); }

std::vector<std::string> capabilities() {
  return {std::string("compiler=") + __VERSION__, "onednn=" FUSEDSTEP_ONEDNN_VERSION};
}

STABLE_TORCH_LIBRARY(fusedstep, m) {
  m.def("plan_new(Tensor[] weights, Tensor[] states, Tensor[] steps) -> int");
  m.def("plan_check(int plan, Tensor[] weights, Tensor[] grads) -> ()");
  m.def("plan_delete(int plan) -> ()");
  m.def("plan_isa(int plan) -> str");
  m.def("isa() -> str");
  m.def("isas() -> str[]");
  m.def("force_isa(str name) -> ()");
  m.def("capabilities() -> str[]");
}

STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) {
  m.impl("plan_new", TORCH_BOX(&plan_new));
  m.impl("plan_check", TORCH_BOX(&plan_check));
}

STABLE_TORCH_LIBRARY_IMPL(fusedstep, CompositeExplicitAutograd, m) {
  m.impl("plan_delete", TORCH_BOX(&plan_delete));
  m.impl("plan_isa", TORCH_BOX(&plan_isa));
  m.impl("isa", TORCH_BOX(&isa_in_use));
  m.impl("isas", TORCH_BOX(&isas_here));
  m.impl("force_isa", TORCH_BOX(&use_isa));
  m.impl("capabilities", TORCH_BOX(&capabilities));
}

}  // namespace
}  // namespace fusedstep::ops
