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

DType dtype_of(const Tensor& tensor, const char* what) {
  static const std::pair<int32_t, DType> known[] = {{aoti_torch_dtype_float32(), DType::kFloat},
                                                    {aoti_torch_dtype_bfloat16(), DType::kBFloat16},
                                                    {aoti_torch_dtype_float16(), DType::kHalf},
                                                    {aoti_torch_dtype_float64(), DType::kDouble}};
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
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

void take_step(int64_t handle, const BoundRule& rule, const GradArguments& grads) {
  const std::shared_ptr<NativePlan> native = find_plan(handle);
  check(native->plan.slots() == rule.states, "the plan has " + std::to_string(native->plan.slots()) +
                                                 " states for each weight, the rule needs " +
                                                 std::to_string(rule.states));
  check(!native->counts.empty(), "the plan has not been bound");
  check(grads.use >= 0 && grads.use <= static_cast<int64_t>(GradUse::kClear),
        "grads must be from 0 to 3, not " + std::to_string(grads.use));
  for (size_t i = 0; i < native->counts.size(); ++i) {
    native->counts[i] = *step_count(native->steps[i]) + 1.0;
    *step_count(native->steps[i]) = static_cast<float>(native->counts[i]);
  }
  run_step(native->plan, rule, native->counts,
           {.threads = num_threads(),
            .grad_factor = grads.factor,
            .maximize = grads.maximize,
            .grads = static_cast<GradUse>(grads.use)});
}

}  // namespace fusedstep::ops
