// Base of the operators: plans by handle, torch's tensors as views, one way to take a step.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/core/code_map.h"
#include "src/ops/direct.h"
#include "src/ops/words_before_sizes.h"
#include "src/plan/bound.h"
#include "src/run/backend.h"
#include "src/steps/channel_moves.h"
#include "src/steps/step.h"

namespace fusedstep::ops {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

// Calls one of torch's operators, with arguments that are right: where it fails, memory has run out.
template <class Result = Tensor, class... Arguments>
Result call(const char* name, const char* overload, const Arguments&... arguments) {
  std::array stack{torch::stable::detail::from(arguments)...};
  if (torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error(std::string("torch's ") + name +
                             " has failed, as it does when memory runs out; torch has written why to stderr");
  }
  return torch::stable::detail::to<Result>(stack[0]);
}

// A torch tensor as the engine sees it. Throws std::runtime_error, naming `what`, unless it is float32,
// float64, bfloat16 or float16, and its memory holds its values. The dispatcher has seen to layout and kind
// of device: the kernels registered for CPU and CUDA meet dense tensors that are there only.
TensorView view(const Tensor& tensor, const char* what);
std::vector<TensorView> views(const Tensors& tensors, const char* what);

// The states of a list as a NativePlan has it, of which the first `in_slots` are no absmax.
std::vector<TensorView> state_views(const Tensors& states, size_t in_slots);

// The tensors that hold a state in codes: the dtype and sizes of the codes, and the sizes of their absmax.
struct CodesShape {
  int32_t dtype;
  std::vector<int64_t> sizes, absmax;
};
CodesShape codes_shape(Storage storage, Dims sizes);

// torch's thread count, asked anew: the user may have changed it.
int num_threads();

// A plan with the states that it updates. The states are held, so that their memory outlives the plan.
struct NativePlan {
  NativePlan(size_t tensors, Tensors states, Tensors steps, int slots, int device, bool masters)
      : plan(tensors, slots, device, masters), states(std::move(states)), steps(std::move(steps)) {}

  Plan plan;
  std::unique_ptr<DevicePlan> device;  // null on the CPU
  Tensors states;                      // slot-major, then the absmax of each that is in codes, in this order
  // The step counts, then each number that the rule keeps beside them, slot-major: one float32 number a
  // tensor, all on the host or all on the plan's device.
  Tensors steps;
  Tensors parts;                                     // of sparse gradients, from bind to step
  std::optional<Tensor> lr, grad_factor, found_inf;  // numbers that the next step reads on its device
  std::unique_ptr<ChannelMoves> moves;               // along gradients, by what a step leaves as updates
  std::unique_ptr<PreparedStep> prepared;            // the next step, once it can be taken
  std::optional<Tensor> scratch;                     // the memory that it needs on a device
  std::vector<double> counts;        // the values of `steps` after the next step; empty: nothing is bound
  std::vector<float*> count_places;  // where these are, since they were bound
  Bound bound{words_before_sizes};   // operands bound last, if no gradient was sparse
  struct State {
    const void* data;
    int32_t dtype;       // as torch counts them
    size_t dims, shape;  // in state_shapes: sizes, strides
    TensorAddresses addresses;
  };
  std::vector<State> bound_states;  // as the states were at that bind
  std::vector<int64_t> state_shapes;
  std::atomic<int> stepped_by = 0;  // the process that a step of it is under way in, as these are counted
};

int64_t register_plan(std::unique_ptr<NativePlan> plan);
std::shared_ptr<NativePlan> find_plan(int64_t handle);

// Throws std::runtime_error with this text unless `condition` holds.
void check(bool condition, std::string_view text);

// Memory of a CUDA device from torch, which gives it to no other stream before this one is done with it.
Tensor new_device_memory(size_t bytes, int device);

// The number of states that each of `weights` weights has in a list of them as a NativePlan has it. Throws
// std::runtime_error if it is not the same for all.
int slots_of(const Tensors& states, size_t weights);

// A plan over these states, of which the last may be `masters` (see Plan). Throws std::runtime_error, naming
// the argument, if they do not fit together.
std::unique_ptr<NativePlan> make_plan(const Tensors& weights, const Tensors& states, const Tensors& steps,
                                      bool masters);
// Takes note of where weights, gradients and states are. Throws std::runtime_error, naming the operand, if
// they cannot be updated together. Returns false if a weight is on another device than the plan.
bool bind_plan(NativePlan& native, std::span<const TensorView> weights, std::span<const TensorView> grads,
               std::span<const std::optional<RowIndex>> rows = {});
// Throws std::runtime_error if another thread is in a step of the plan.
void check_idle(const NativePlan& native);
// True if the states are as they were when they were bound.
bool states_are_in_place(const NativePlan& native);

// Arguments of a step that are about gradients (see StepOptions). `use` is a GradUse.
struct GradArguments {
  bool maximize;
  double factor = 1;
  int64_t use = static_cast<int64_t>(GradUse::kLeave);
};

// Does what may fail in a step over what was bound last, and changes nothing: neither operands nor counts.
// `aside` is run, once the arguments are known to be right, if the step is one on a device.
void prepare_step(NativePlan& native, const BoundRule& rule, const GradArguments& grads,
                  const Aside& aside = {});
// Takes the step that has been prepared: raises every step count by one, and updates weights and states. On
// the CPU this cannot fail.
void take_step(NativePlan& native, const Aside& aside = {});

// Takes the phases of the step that has been prepared apart (PreparedStep::run_direction()). `norms2` is a
// float64 tensor of two numbers for each tensor, on the plan's device. The second raises the counts.
void take_direction(NativePlan& native, const Tensor& norms2);
void take_application(NativePlan& native, const Tensor& norms2);

// The `count` numbers in `options`, a float64 tensor on the CPU. Throws std::runtime_error if it is another.
std::span<const double> numbers(const Tensor& options, size_t count);

}  // namespace fusedstep::ops
