// Operators of libfusedstep.so, and the native plan that they work on.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/types.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fusedstep/drop_plan.h"
#include "fusedstep/isa.h"

namespace fusedstep::optim::detail {

using Tensors = std::vector<torch::Tensor>;

// An operator of libfusedstep.so, whose kernel takes its arguments boxed. So does a call here: a compiler
// takes long for a call of each signature.
class Op {
 public:
  explicit Op(const char* name) : handle_(find(name)) {}

  // Returns the results.
  std::vector<c10::IValue> operator()(std::vector<c10::IValue> arguments) const {
    handle_.callBoxed(arguments);
    return arguments;
  }

 private:
  // The call to fusedstep_abi_version() ties the program to libfusedstep.so, which it would otherwise reach
  // through the dispatcher only, so that the linker could drop it.
  static c10::OperatorHandle find(const char* name) {
    TORCH_CHECK(fusedstep_abi_version() == FUSEDSTEP_ABI_VERSION, "libfusedstep.so has interface version ",
                fusedstep_abi_version(), ", the headers have ", FUSEDSTEP_ABI_VERSION);
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  }

  c10::OperatorHandle handle_;
};

// The number by which operators know a rule of the list.
inline int64_t rule_index(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return Op("fusedstep::rule_index")({name})[0].toInt();
}

// Zeroed states of the weights, slot-major, then the absmax of each that is in codes. The storage of a slot
// is "weight" for numbers of the weight's dtype, "float32", "int16" for the lower bits of weights, or "int8",
// "int4" or "fp8" for codes: after "unsigned " if the states are never negative.
inline Tensors new_states(const Tensors& weights, const std::vector<std::string>& storage) {
  static const Op op("fusedstep::new_states");
  return op({weights, storage})[0].toTensorVector();
}

// The random numbers by which a step rounds weights follow from these.
struct Draws {
  int64_t seed;
  std::vector<int64_t> places;  // of each weight among those of the optimizer

  bool operator==(const Draws&) const = default;
};

// The tensors of a plan. `states` are slot-major, then the absmax of each that is in codes. The last slot is
// what the weights keep beside them, if `has_beside`.
struct PlanOperands {
  Tensors weights, states, steps;
  bool has_beside = false;
  std::optional<Draws> draws;
};

// A native plan, and who its tensors are.
class Plan {
 public:
  explicit Plan(const PlanOperands& of) : key_(key(of)), draws_(of.draws), handle_{make(of)} {
    if (!draws_) return;
    static const Op round_at_random("fusedstep::plan_round_at_random");
    round_at_random({handle_.value, draws_->seed, draws_->places});
  }

  int64_t handle() const { return handle_.value; }
  bool is_of(const PlanOperands& operands) const { return key_ == key(operands) && draws_ == operands.draws; }

 private:
  // Frees the plan, also where the constructor of its owner throws.
  struct Handle {
    int64_t value;

    explicit Handle(int64_t plan) : value(plan) {}
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;
    ~Handle() { fusedstep_drop_plan(value); }
  };
  using Key = std::vector<const void*>;

  static int64_t make(const PlanOperands& of) {
    static const Op op("fusedstep::plan_new");
    return op({of.weights, of.states, of.steps, of.has_beside})[0].toInt();
  }
  static Key key(const PlanOperands& of) {
    Key impls;
    impls.reserve(of.weights.size() + of.states.size() + of.steps.size());
    for (const auto* list : {&of.weights, &of.states, &of.steps}) {
      for (const torch::Tensor& tensor : *list) impls.push_back(tensor.unsafeGetTensorImpl());
    }
    return impls;
  }

  Key key_;
  std::optional<Draws> draws_;
  Handle handle_;
};

}  // namespace fusedstep::optim::detail
