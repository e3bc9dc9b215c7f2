// Functions that fusedstep._bind calls directly, past the dispatcher.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "fusedstep/isa.h"
#include "src/plan/bound.h"
#include "src/plan/plan.h"
#include "src/run/session.h"

namespace fusedstep::ops {

// Takes note of where a plan's weights, gradients and states are. Throws std::runtime_error, naming the
// operand, if they cannot be updated together. Returns false, with nothing noted, if a weight is not on the
// plan's device any more. `rows` are those of sparse gradients (see TensorOperands); none given: all are
// dense.
FUSEDSTEP_API bool bind_plan(int64_t handle, std::span<const TensorView> weights,
                             std::span<const TensorView> grads,
                             std::span<const std::optional<RowIndex>> rows = {});

// Frees a plan, if it exists.
FUSEDSTEP_API void drop_plan(int64_t handle);

struct NativePlan;

// bind_plan() for weights and gradients that are nearly always those of the last time: they are looked at one
// by one, no list of them is made.
class Rebinding {
 public:
  FUSEDSTEP_API explicit Rebinding(int64_t plan);
  explicit Rebinding(NativePlan& native);

  size_t tensors() const { return bound_->tensors(); }
  // Compares tensor i's operands with those bound; false if bind_plan() has to look at them. `grad_held_by`
  // is the object by which the caller gets to the gradient.
  bool compare(size_t i, const TensorView& weight, const TensorView& grad,
               const void* grad_held_by = nullptr) {
    if (i >= bound_->tensors()) return false;
    bound_->note_addresses(i, grad, grad_held_by);
    const Bound::Change change = bound_->compare(i, weight, grad);
    if (change == Bound::Change::kGradMoved) moved_.emplace_back(i, grad.data);
    return change != Bound::Change::kOther;
  }
  void prefetch(size_t i) const { bound_->prefetch(i); }
  // Takes note of where all are, once they have been compared. False, with nothing noted, if bind_plan() has
  // to. `look_at_states` unless they cannot have moved.
  FUSEDSTEP_API bool finish(bool look_at_states = true);

 private:
  std::shared_ptr<NativePlan> held_;
  NativePlan* native_;
  Bound* bound_;
  std::vector<std::pair<size_t, void*>> moved_;
};

// The gradients that a step over these plans will not write, as they share memory: pairs of the plan's and
// the tensor's index.
FUSEDSTEP_API std::vector<int64_t> aliasing_grads(const std::vector<int64_t>& handles);

// To be called before steps of several plans that write gradients.
FUSEDSTEP_API void find_aliasing_grads(const std::vector<int64_t>& handles);

struct Rule;

// The rule of a name; null if there is none.
FUSEDSTEP_API const Rule* find_rule(std::string_view name);

// Prepares a step of a rule over a plan: does all that may fail, and changes nothing. `options` are the
// rule's, in its order, and behind them whether to maximize. `grads` is a GradUse. `aside` is run on the
// calling thread, once all of that is checked which can be without a device, if the plan is on one. Throws
// std::runtime_error if the number of options is wrong, or the plan does not exist.
FUSEDSTEP_API void prepare_step(int64_t plan, const Rule& rule, std::span<const double> options,
                                double grad_factor, int64_t grads, const Aside& aside);

// Takes the steps that have been prepared. Those of plans on the CPU cannot fail once one is taken. `aside`
// is run on the calling thread, beside the first of them. Throws std::runtime_error if none is prepared of a
// plan.
FUSEDSTEP_API void take_steps(std::span<const int64_t> handles, const Aside& aside = {});

}  // namespace fusedstep::ops
