#include "src/ops/native_plan.h"

#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace fusedstep::ops {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<NativePlan>> plans;
  int64_t next = 1;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

int32_t dtype_code(const Tensor& tensor) {
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

DType dtype_of(const Tensor& tensor, const char* what) {
  static const std::pair<int32_t, DType> known[] = {{aoti_torch_dtype_float32(), DType::kFloat},
                                                    {aoti_torch_dtype_bfloat16(), DType::kBFloat16},
                                                    {aoti_torch_dtype_float16(), DType::kHalf},
                                                    {aoti_torch_dtype_float64(), DType::kDouble}};
  const int32_t code = dtype_code(tensor);
  for (const auto& [torchs, ours] : known) {
    if (code == torchs) return ours;
  }
  throw std::runtime_error(std::string(what) + " must be float32, float64, bfloat16 or float16");
}

float* step_count(const Tensor& step) { return static_cast<float*>(step.data_ptr()); }

}  // namespace

TensorView view(const Tensor& tensor, const char* what) {
  int64_t *sizes = nullptr, *strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
  const auto dims = static_cast<size_t>(tensor.dim());
  return {tensor.data_ptr(), dtype_of(tensor, what), {sizes, dims}, {strides, dims}};
}

std::vector<TensorView> views(const Tensors& tensors, const char* what) {
  std::vector<TensorView> found;
  found.reserve(tensors.size());
  for (const Tensor& tensor : tensors) found.push_back(view(tensor, what));
  return found;
}

int num_threads() {
  uint32_t threads = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return static_cast<int>(threads);
}

int64_t register_plan(std::unique_ptr<NativePlan> plan) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.plans[all.next] = std::move(plan);
  return all.next++;
}

std::shared_ptr<NativePlan> find_plan(int64_t handle) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.plans.find(handle);
  if (found == all.plans.end())
    throw std::runtime_error("plan " + std::to_string(handle) + " does not exist");
  return found->second;
}

void drop_plan(int64_t handle) {
  std::shared_ptr<NativePlan> dropped;  // its tensors are freed outside of the lock
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (const auto found = all.plans.find(handle); found != all.plans.end()) {
    dropped = std::move(found->second);
    all.plans.erase(found);
  }
}

void check(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error(text);
}

std::unique_ptr<NativePlan> make_plan(const Tensors& weights, const Tensors& states, const Tensors& steps) {
  const size_t count = weights.size();
  if (count == 0) throw std::runtime_error("weights must not be empty");
  check(states.size() % count == 0 && states.size() / count <= cpu::kMaxStates,
        "states must be slot-major, the same number for each weight");
  check(steps.size() == count, "steps must have one tensor for each weight");
  for (size_t i = 0; i < count; ++i) {
    const std::string who = "tensor " + std::to_string(i) + " of the list: ";
    check(steps[i].is_cpu() && steps[i].numel() == 1 && dtype_code(steps[i]) == aoti_torch_dtype_float32(),
          who + "the step count must be one float32 number on the CPU");
    const TensorView weight = view(weights[i], "weight");
    check(!overlaps_itself(weight.sizes, weight.strides),
          who + "the weight overlaps itself in memory (an expanded tensor?); clone() it first");
  }
  return std::make_unique<NativePlan>(states, steps, static_cast<int>(states.size() / count));
}

void bind_plan(NativePlan& native, std::span<const TensorView> weights, std::span<const TensorView> grads,
               std::span<const std::optional<RowIndex>> rows) {
  Plan& plan = native.plan;
  const size_t count = plan.tensors();
  check(weights.size() == count && grads.size() == count,
        "weights and grads must have the plan's " + std::to_string(count) + " tensors, not " +
            std::to_string(weights.size()) + " and " + std::to_string(grads.size()));
  for (size_t i = 0; i < count; ++i) {
    TensorOperands operands{weights[i], grads[i], {}};
    for (int k = 0; k < plan.slots(); ++k) operands.states[k] = view(native.states[k * count + i], "state");
    if (!rows.empty()) operands.rows = rows[i];
    plan.bind(i, operands);
  }
  plan.check_weights_apart();
  if (!rows.empty()) sum_entries(plan, num_threads());
  native.counts.resize(count);
}

void take_step(NativePlan& native, const BoundRule& rule, const GradArguments& grads) {
  check(native.plan.slots() == rule.states, "the plan has " + std::to_string(native.plan.slots()) +
                                                " states for each weight, the rule needs " +
                                                std::to_string(rule.states));
  check(!native.counts.empty(), "the plan has not been bound");
  check(grads.use >= 0 && grads.use <= static_cast<int64_t>(GradUse::kClear),
        "grads must be from 0 to 3, not " + std::to_string(grads.use));
  for (size_t i = 0; i < native.counts.size(); ++i) {
    native.counts[i] = *step_count(native.steps[i]) + 1.0;
    *step_count(native.steps[i]) = static_cast<float>(native.counts[i]);
  }
  run_step(native.plan, rule, native.counts,
           {.threads = num_threads(),
            .grad_factor = grads.factor,
            .maximize = grads.maximize,
            .grads = static_cast<GradUse>(grads.use)});
  native.parts.clear();
}

const double* numbers(const Tensor& options, size_t count) {
  check(options.is_cpu() && dtype_code(options) == aoti_torch_dtype_float64() && options.dim() == 1 &&
            options.is_contiguous() && options.numel() == static_cast<int64_t>(count),
        "options must be " + std::to_string(count) + " float64 numbers on the CPU");
  return static_cast<const double*>(options.data_ptr());
}

void step_shapes(const Tensors&, const Tensors&, const Tensors&, const Tensors&, const Tensor&) {}

}  // namespace fusedstep::ops
