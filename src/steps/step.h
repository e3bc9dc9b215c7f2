// One step of one rule over a plan's tensors.
#pragma once
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "fusedstep/grad_use.h"
#include "fusedstep/rules/list.h"
#include "src/core/phases.h"
#include "src/plan/plan.h"
#include "src/run/session.h"

namespace fusedstep {

class PreparedStep;
struct DeviceInputs;
struct StepOptions;

// A rule with its hyper-parameters, as the engine sees it: it knows no optimizer by name.
struct BoundRule {
  static constexpr size_t kScalarsBytes = 128, kHyperBytes = 128;

  rules::RuleId id;
  unsigned flags;
  int states;                                  // that each tensor has
  uint32_t not_negative;                       // those that are never negative, a bit each
  bool rounds_by_step;                         // as in rules/specs.h
  std::span<const rules::NumberSpec> numbers;  // that it has beside the step count
  std::byte hyper[kHyperBytes]{};              // the rule's Hyper, for a device that prepares scalars itself
  // Writes the rule's Scalars<double> or Scalars<float> for a step count to `out`, which has kScalarsBytes.
  // The numbers become those after the step.
  void (*prepare)(const BoundRule& rule, double step, double* numbers, bool as_double, void* out);
  // Null for an elementwise rule.
  double (*trust_ratio)(const BoundRule& rule, double weight_norm2, double update_norm2);
  std::span<const Role> roles;  // of the states, as a plan has them
  // Makes the step of a rule over rows, as prepare_step() does. Null for a rule over elements, which has
  // kernels by its `id`.
  std::unique_ptr<PreparedStep> (*make_step)(Plan& plan, const BoundRule& rule, std::span<double> numbers,
                                             const StepOptions& options,
                                             const DeviceInputs& inputs) = nullptr;

  template <class Hyper>
  Hyper hyper_as() const {
    Hyper known;
    std::memcpy(&known, hyper, sizeof known);
    return known;
  }
};

template <template <unsigned> class Rule, unsigned... kFlags>
int states_of(unsigned flags, std::integer_sequence<unsigned, kFlags...>) {
  static constexpr int states[] = {Rule<kFlags>::kStates...};
  return states[flags];
}

// The states of a rule with these flags that are never negative, a bit each.
template <size_t kCount>
constexpr uint32_t not_negative(const rules::StateSpec (&states)[kCount], unsigned flags) {
  uint32_t bits = 0;
  int at = 0;
  for (const rules::StateSpec& state : states) {
    if (state.flag != 0 && (flags & state.flag) == 0) continue;
    bits |= uint32_t{state.sign == rules::Sign::kNotNegative} << at++;
  }
  return bits;
}

template <template <unsigned> class Rule>
BoundRule bind_rule(const typename Rule<0>::Hyper& hyper, unsigned flags) {
  using R = Rule<0>;  // scalars do not depend on the flags
  const int states = states_of<Rule>(flags, std::make_integer_sequence<unsigned, R::kFlagCombinations>{});
  BoundRule bound{.id = rules::kIdOf<Rule>,
                  .flags = flags,
                  .states = states,
                  .not_negative = not_negative(R::kAllStates, flags),
                  .rounds_by_step = rules::rounds_by_step(R::kAllStates),
                  .numbers = {},
                  .prepare = nullptr,
                  .trust_ratio = nullptr,
                  .roles = {}};
  static_assert(std::is_trivially_copyable_v<typename R::Hyper> && sizeof hyper <= BoundRule::kHyperBytes);
  static_assert(1 + rules::kNumbersOf<R> <= kMaxNumbers);
  if constexpr (rules::kNumbersOf<R> != 0) bound.numbers = R::kNumbers;
  std::memcpy(bound.hyper, &hyper, sizeof hyper);
  bound.prepare = [](const BoundRule& rule, double step, double* numbers, bool as_double, void* out) {
    const auto hyper = rule.hyper_as<typename R::Hyper>();
    static_assert(sizeof(typename R::template Scalars<double>) <= BoundRule::kScalarsBytes);
    if (as_double) {
      new (out) typename R::template Scalars<double>(rules::prepare<R, double>(hyper, step, numbers));
    } else {
      new (out) typename R::template Scalars<float>(rules::prepare<R, float>(hyper, step, numbers));
    }
  };
  if constexpr (kHasNorms<R>) {
    bound.trust_ratio = [](const BoundRule& rule, double weight_norm2, double update_norm2) {
      return R::trust_ratio(rule.hyper_as<typename R::Hyper>(), weight_norm2, update_norm2);
    };
  }
  return bound;
}

struct StepOptions {
  int threads = 1;
  double grad_factor = 1;  // multiplies the gradients
  bool maximize = false;   // step up the gradient instead of down
  GradUse grads = GradUse::kLeave;
};

// Inputs that a step reads on its device. Null: the host's value is used.
struct DeviceInputs {
  const float* lr = nullptr;            // instead of the rule's
  const double* grad_factor = nullptr;  // multiplies StepOptions::grad_factor
  const float* found_inf = nullptr;     // not zero: the step is skipped
};

// The scalars of a tensor's step, and TensorTask::rounding.
struct alignas(64) ScalarsBlock {
  std::byte bytes[BoundRule::kScalarsBytes];
  float rounding;
};

// The scalars for each distinct step count, precision and numbers among a plan's tensors, prepared once.
struct Scalars {
  std::vector<ScalarsBlock> blocks;
  std::vector<uint32_t> of_tensor;  // the block of each; empty if there is one block
  std::vector<uint64_t> draws;      // of each, the key of its random numbers; empty if there are none

  void complete(TensorTask& task, size_t tensor) const {
    const ScalarsBlock& block = blocks[of_tensor.empty() ? 0 : of_tensor[tensor]];
    task.scalars = block.bytes;
    task.rounding = block.rounding;
    if (!draws.empty()) task.draws = draws[tensor];
  }
};
// `numbers` has the step count of each tensor, this step included, then each of the rule's numbers of each
// tensor, which become those after the step.
FUSEDSTEP_API Scalars prepare_scalars(const Plan& plan, const BoundRule& rule, std::span<double> numbers);

// A step that has all it needs.
class PreparedStep {
 public:
  PreparedStep() = default;
  PreparedStep(const PreparedStep&) = delete;
  PreparedStep& operator=(const PreparedStep&) = delete;
  virtual ~PreparedStep() = default;

  // Updates weights and states of the plan, which is as it was when the step was prepared. On the CPU this
  // allocates nothing and cannot fail; on a device a launch may.
  virtual void run(const Aside& aside) = 0;

  // The memory on the device that run() needs, aligned to 256 bytes: given before the run, it may be used
  // again once what the run has queued is done.
  virtual size_t scratch_bytes() const { return 0; }
  virtual void use(std::byte* /*scratch*/) {}

  // The phases of a rule with norms apart, for what comes in between: norms over shards, say. The first
  // leaves new states, and updates in those gradients that may hold them, and writes the sums of squares of
  // each tensor's weight and update to norms2[tensors][2], which is where the plan is. The second moves the
  // weights along the updates by the ratios that follow from such sums; where no gradient holds an update it
  // computes that again, and the new states. Other rules throw std::runtime_error, with nothing changed.
  virtual void run_direction(double* /*norms2*/) { refuse_phases(); }
  virtual void run_apply(const double* /*norms2*/) { refuse_phases(); }

 private:
  [[noreturn]] static void refuse_phases() {
    throw std::runtime_error("the phases of a rule without norms are one");
  }
};

// Finds which gradients a step may write, unless that is known, or it writes none.
void find_aliasing(Plan& plan, const StepOptions& options);

// Does what may fail in a step, and changes no operand. `numbers` as for prepare_scalars(). The plan is
// bound.
std::unique_ptr<PreparedStep> prepare_step(Plan& plan, const BoundRule& rule, std::span<double> numbers,
                                           const StepOptions& options);

// The numbers of tensors with these step counts, where the others have their first values.
inline std::vector<double> with_first_numbers(const BoundRule& rule, std::span<const double> steps) {
  std::vector<double> numbers(steps.begin(), steps.end());
  for (const auto& number : rule.numbers) numbers.insert(numbers.end(), steps.size(), number.first);
  return numbers;
}

// Both at once, with the rule's numbers at their first values.
inline void run_step(Plan& plan, const BoundRule& rule, std::span<const double> steps,
                     const StepOptions& options) {
  std::vector<double> numbers = with_first_numbers(rule, steps);
  prepare_step(plan, rule, numbers, options)->run({});
}

// Adds up the entries that sparse gradients have for the same row: to be called when these are bound, before
// they are read.
void sum_entries(Plan& plan, int threads);

// The sum of the squares of all elements of the plan's gradients.
double grad_norm2(Plan& plan, int threads);

// Sets every element of the plan's states to zero, each by the thread that a step will update it on while
// shares are equal.
void zero_states(Plan& plan, int threads);

}  // namespace fusedstep
