// What the operators share: plans by handle, torch's tensors as views, one way to take a step.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "src/step.h"

namespace fusedstep::ops {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

// A torch tensor as the engine sees it. Throws std::runtime_error, naming `what`, unless it is float32,
// float64, bfloat16 or float16. The dispatcher has seen to device and layout: the kernels registered for the
// CPU meet dense CPU tensors only.
TensorView view(const Tensor& tensor, const char* what);

// torch's thread count, asked anew: the user may have changed it.
int num_threads();

// A plan with the states that it updates. The states are held, so that their memory outlives the plan.
struct NativePlan {
  NativePlan(Tensors states, Tensors steps, int slots)
      : plan(steps.size(), slots), states(std::move(states)), steps(std::move(steps)) {}

  Plan plan;
  Tensors states;  // slot-major
  Tensors steps;   // one float32 number a tensor
  std::vector<double> counts;
};

int64_t register_plan(std::unique_ptr<NativePlan> plan);
std::shared_ptr<NativePlan> find_plan(int64_t handle);
void drop_plan(int64_t handle);

// Throws std::runtime_error with this text unless `condition` holds.
void check(bool condition, const std::string& text);

// What the operators of all optimizers end in: the arguments that say how gradients are taken (see
// StepOptions). `grads` is a GradUse.
#define FUSEDSTEP_GRAD_SCHEMA "bool maximize, float grad_factor, int grads"
struct GradArguments {
  bool maximize;
  double factor;
  int64_t use;
};

// Raises every step count by one, and updates what was bound last by plan_bind.
void take_step(int64_t plan, const BoundRule& rule, const GradArguments& grads);

}  // namespace fusedstep::ops
