#include "src/ops/native_plan.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "fusedstep/drop_plan.h"
#include "src/ops/negative_bit.h"
#include "src/plan/code_maps.h"
#include "src/plan/operand_checks.h"
#include "src/run/session.h"

namespace fusedstep::ops {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<NativePlan>> plans;
  int64_t next = 1;
};

// Never freed: threads may step until the process ends.
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

// Which one this is in a line of children of fork().
std::atomic<int> process = 1;

// A child of fork() has none of the threads that may hold the lock: the one that forks takes it.
void before_fork() { registry().mutex.lock(); }
void after_fork() { registry().mutex.unlock(); }
void after_fork_in_child() {
  registry().mutex.unlock();
  ++process;
}
[[maybe_unused]] const int watch_fork = pthread_atfork(before_fork, after_fork, after_fork_in_child);

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
  for (const auto& [theirs, ours] : known) {
    if (code == theirs) return ours;
  }
  throw std::runtime_error(std::string(what) + " must be float32, float64, bfloat16 or float16");
}

// The dtype of codes; nothing if a tensor has another.
std::optional<DType> dtype_of_codes(const Tensor& tensor) {
  const int32_t code = dtype_code(tensor);
  if (code == aoti_torch_dtype_uint8()) return DType::kUInt8;
  if (code == aoti_torch_dtype_float8_e4m3fn()) return DType::kFloat8;
  return {};
}

// The dtype of a state: as codes and the lower bits of weights have it, or one of numbers.
DType dtype_of_state(const Tensor& tensor) {
  if (const std::optional<DType> codes = dtype_of_codes(tensor)) return *codes;
  return dtype_code(tensor) == aoti_torch_dtype_int16() ? DType::kInt16 : dtype_of(tensor, "state");
}

// A number that a step reads on the plan's device; null if there is none.
template <class T>
const T* number(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const T*>(tensor->data_ptr()) : nullptr;
}

std::string of_list(size_t i) { return "tensor " + std::to_string(i) + " of the list: "; }

struct Shape {
  Dims sizes, strides;
};

Shape shape_of(const Tensor& tensor) {
  int64_t *sizes = nullptr, *strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
  const auto dims = static_cast<size_t>(tensor.dim());
  return {{sizes, dims}, {strides, dims}};
}

// True if the tensor, which has this shape, has the negative bit.
bool is_negated(const Tensor& tensor, const Shape& shape) {
  const std::optional<bool> known = negative_bit.of(shape.sizes, shape.strides);
  return known ? *known : call<bool>("aten::is_neg", "", tensor);
}

// Checks steps[i]. The list has the step counts of `count` tensors, then the numbers beside these.
void check_step(const Tensors& steps, size_t i, size_t count, int device) {
  const Tensor& step = steps[i];
  const bool is_one = step.numel() == 1 && dtype_code(step) == aoti_torch_dtype_float32() &&
                      !is_negated(step, shape_of(step));
  const bool is_there = steps[0].is_cpu() ? step.is_cpu() : view(step, "step").device == device;
  if (is_one && is_there) return;
  throw std::runtime_error(of_list(i % count) + (i < count ? "the step count" : "a number beside it") +
                           " must be one float32 number on the CPU" +
                           (device == kHost ? "" : ", or all of them on the weights' device"));
}

// To look where a tensor is costs as much as this many elements: a few accesses to memory, one after another.
constexpr int64_t kLookElements = 64;

// The same as Tensor::data_ptr(), with null for an error.
void* data_of(const Tensor& tensor) {
  void* data = nullptr;
  return aoti_torch_get_data_ptr(tensor.get(), &data) == AOTI_TORCH_SUCCESS ? data : nullptr;
}

// Takes note of where the counts are. An assignment to the `data` of one may have made it a number of another
// kind.
void note_counts(NativePlan& native) {
  native.count_places.resize(native.steps.size());
  const bool on_host = native.steps[0].is_cpu();
  const size_t tensors = native.plan.tensors();
  for (size_t i = 0; i < native.steps.size(); ++i) {
    auto* const count = static_cast<float*>(data_of(native.steps[i]));
    check(count != nullptr, "a step count has no memory");
    check_step(native.steps, i, tensors, native.plan.device());
    if (on_host && i < tensors && !(*count >= 0)) {
      throw std::runtime_error(of_list(i) + "the step count must be at least 0, not " +
                               std::to_string(*count));
    }
    native.count_places[i] = count;
  }
}

bool is_as_bound(const NativePlan& native, size_t i) try {
  const Tensor& state = native.states[i];
  const NativePlan::State& known = native.bound_states[i];
  const int64_t* const shape = native.state_shapes.data() + known.shape;
  const Shape now = shape_of(state);
  return data_of(state) == known.data && dtype_code(state) == known.dtype && now.sizes.size() == known.dims &&
         std::equal(now.sizes.begin(), now.sizes.end(), shape) &&
         std::equal(now.strides.begin(), now.strides.end(), shape + known.dims) && !is_negated(state, now);
} catch (const std::exception&) {
  return false;
}

constexpr const char* kIsStepped = "another thread is stepping this optimizer";

// A step, or what changes its plan, that is under way. In a child of fork() one of the parent's never ends,
// and does not count.
class Stepping {
 public:
  explicit Stepping(NativePlan& native) : native_(native) {
    check(native.stepped_by.exchange(process) != process, kIsStepped);
  }
  Stepping(const Stepping&) = delete;
  ~Stepping() { native_.stepped_by = 0; }

 private:
  NativePlan& native_;
};

std::unique_ptr<PreparedStep> prepare_on_device(NativePlan& native, const BoundRule& rule,
                                                const StepOptions& options) {
  const DeviceInputs inputs{number<float>(native.lr), number<double>(native.grad_factor),
                            number<float>(native.found_inf)};
  if (rule.make_step != nullptr) {
    check(native.steps[0].is_cpu(), "a rule over rows counts its steps on the host");
    std::unique_ptr<PreparedStep> step = rule.make_step(native.plan, rule, native.counts, options, inputs);
    native.scratch = new_device_memory(step->scratch_bytes(), native.plan.device());
    step->use(static_cast<std::byte*>(native.scratch->data_ptr()));
    return step;
  }
  if (!native.steps[0].is_cpu()) {
    return native.device->prepare_counted(native.plan, rule, native.count_places, options, inputs);
  }
  return native.device->prepare(native.plan, rule, native.counts, options, inputs);
}

// Forgets a step that has been taken, or has been prepared only.
void forget_step(NativePlan& native) {
  native.prepared.reset();
  native.scratch = std::nullopt;
  native.lr = native.grad_factor = native.found_inf = std::nullopt;
}

}  // namespace

void check_idle(const NativePlan& native) { check(native.stepped_by != process, kIsStepped); }

namespace {

TensorView view_as(const Tensor& tensor, DType dtype, const char* what) {
  const Shape shape = shape_of(tensor);
  const int device = tensor.is_cuda() ? tensor.get_device_index() : kHost;
  const TensorView found{tensor.data_ptr(), dtype, shape.sizes, shape.strides, device};
  check(found.data != nullptr || tensor.numel() == 0, std::string(what) + " has no memory");
  if (is_negated(tensor, shape)) {
    throw std::runtime_error(std::string(what) +
                             " is a negated view, whose memory holds other values; clone() it first");
  }
  return found;
}

}  // namespace

TensorView view(const Tensor& tensor, const char* what) {
  return view_as(tensor, dtype_of(tensor, what), what);
}

std::vector<TensorView> state_views(const Tensors& states, size_t in_slots) {
  std::vector<TensorView> found;
  found.reserve(states.size());
  for (const Tensor& state : states) found.push_back(view_as(state, dtype_of_state(state), "state"));
  size_t next = in_slots;
  for (size_t i = 0; i < in_slots; ++i) {
    if (!found[i].has_codes()) continue;
    const TensorView& absmax = found[next++];
    check(absmax.dtype == DType::kFloat && absmax.device == found[i].device &&
              is_in_order(absmax.sizes, absmax.strides),
          "the absmax of a state must be contiguous float32 numbers, on the device of its codes");
    found[i].absmax = static_cast<float*>(absmax.data);
    found[i].blocks = elements_of(absmax.sizes);
  }
  return found;
}

std::vector<TensorView> views(const Tensors& tensors, const char* what) {
  std::vector<TensorView> found;
  found.reserve(tensors.size());
  for (const Tensor& tensor : tensors) found.push_back(view(tensor, what));
  return found;
}

CodesShape codes_shape(Storage storage, Dims sizes) {
  const CodeMap& map = code_map(storage, /*is_signed=*/true);
  CodesShape shape{aoti_torch_dtype_uint8(), {sizes.begin(), sizes.end()}, sizes_in_units(sizes, map.block)};
  if (storage == Storage::kFloat8) shape.dtype = aoti_torch_dtype_float8_e4m3fn();
  if (storage == Storage::kInt4) shape.sizes = sizes_in_units(sizes, map.elements_per_byte());
  return shape;
}

int num_threads() {
  uint32_t threads = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return static_cast<int>(threads);
}

int64_t register_plan(std::unique_ptr<NativePlan> plan) {
  Registry& all = registry();
  std::shared_ptr<NativePlan> shared = std::move(plan);
  const std::lock_guard lock(all.mutex);
  all.plans.emplace(all.next, std::move(shared));
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

Tensor new_device_memory(size_t bytes, int device) {
  const auto size = static_cast<int64_t>(bytes), stride = int64_t{1};
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(),
                                                        aoti_torch_device_type_cuda(), device, &handle);
  check(error == AOTI_TORCH_SUCCESS, "there is no memory on cuda:" + std::to_string(device) +
                                         " for the sums of a step: " + std::to_string(bytes) + " bytes");
  return Tensor(handle);
}

void check(bool condition, std::string_view text) {
  if (!condition) throw std::runtime_error(std::string(text));
}

int slots_of(const Tensors& states, size_t weights) {
  const auto in_codes = static_cast<size_t>(
      std::ranges::count_if(states, [](const Tensor& state) { return dtype_of_codes(state).has_value(); }));
  const size_t in_slots = states.size() - std::min(in_codes, states.size());
  check(in_slots % weights == 0 && in_slots / weights <= kMaxStates && in_codes <= in_slots,
        "states must be slot-major, the same number for each weight, and behind them the absmax of each that "
        "is in codes");
  return static_cast<int>(in_slots / weights);
}

std::unique_ptr<NativePlan> make_plan(const Tensors& weights, const Tensors& states, const Tensors& steps,
                                      bool masters) {
  const size_t count = weights.size();
  if (count == 0) throw std::runtime_error("weights must not be empty");
  const int slots = slots_of(states, count);
  check(!steps.empty() && steps.size() % count == 0 && steps.size() / count <= kMaxNumbers,
        "steps must have one tensor for each weight, and one for each of its other numbers");
  const int device = view(weights[0], "weight").device;
  for (size_t i = 0; i < steps.size(); ++i) check_step(steps, i, count, device);
  for (size_t i = 0; i < count; ++i) {
    const TensorView weight = view(weights[i], "weight");
    check_no_overlap(i, "the weight", weight.sizes, weight.strides);
  }
  auto native = std::make_unique<NativePlan>(count, states, steps, slots, device, masters);
  if (device != kHost) native->device = new_device_plan(device);
  return native;
}

bool bind_plan(NativePlan& native, std::span<const TensorView> weights, std::span<const TensorView> grads,
               std::span<const std::optional<RowIndex>> rows) {
  check_idle(native);
  Plan& plan = native.plan;
  const size_t count = plan.tensors();
  check(weights.size() == count && grads.size() == count,
        "weights and grads must have the plan's " + std::to_string(count) + " tensors, not " +
            std::to_string(weights.size()) + " and " + std::to_string(grads.size()));
  if (rows.empty()) {
    Rebinding again(native);
    size_t same = 0;
    while (same < count && again.compare(same, weights[same], grads[same])) ++same;
    if (same == count && again.finish()) return true;
  }
  const auto moved = [&](const TensorView& weight) { return weight.device != plan.device(); };
  if (std::ranges::any_of(weights, moved)) return false;
  const Stepping stepping(native);
  native.bound.clear();
  native.counts.clear();  // until all is bound
  forget_step(native);
  note_counts(native);
  const std::vector<TensorView> states = state_views(native.states, plan.slots() * count);
  const int threads = rows.empty() ? 1 : num_threads();
  for (size_t i = 0; i < count; ++i) {
    TensorOperands operands{weights[i], grads[i], {}};
    for (int k = 0; k < plan.slots(); ++k) operands.states[k] = states[k * count + i];
    if (!rows.empty()) operands.rows = rows[i];
    plan.bind(i, operands, threads);
  }
  plan.check_weights_apart();
  if (!rows.empty()) {
    if (native.device) {
      native.device->check_rows(plan);
    } else {
      sum_entries(plan, threads);
    }
    native.counts.resize(native.steps.size());
    return true;
  }
  native.counts.resize(native.steps.size());
  native.bound_states.clear();
  native.state_shapes.clear();
  for (size_t i = 0; i < states.size(); ++i) {
    const TensorView& state = states[i];
    native.bound_states.push_back({state.data, dtype_code(native.states[i]), state.sizes.size(),
                                   native.state_shapes.size(), TensorAddresses(state, words_before_sizes)});
    for (const Dims& dims : {state.sizes, state.strides}) {
      native.state_shapes.insert(native.state_shapes.end(), dims.begin(), dims.end());
    }
  }
  native.bound.note(weights, grads);  // last: it tells that all of this is there
  return true;
}

bool states_are_in_place(const NativePlan& native) {
  constexpr int64_t kAhead = 16;
  const auto count = static_cast<int64_t>(native.states.size());
  // Shared among the CPU's threads: a step on a device would have them spin where a program's own may be at
  // work. Torch is asked for their number only where it matters: that costs as much as a look.
  const bool alone = native.device || count * kLookElements < kSerialElements;
  std::atomic<bool> all = true;
  run_ranges(alone ? 1 : num_threads(), count, kLookElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < count) {
        __builtin_prefetch(native.states[i + kAhead].get());
        native.bound_states[i + kAhead].addresses.prefetch();
      }
      if (!is_as_bound(native, i)) all = false;
    }
  });
  return all;
}

Rebinding::Rebinding(int64_t plan) : held_(find_plan(plan)), native_(held_.get()), bound_(&native_->bound) {
  check_idle(*native_);
}

Rebinding::Rebinding(NativePlan& native) : native_(&native), bound_(&native.bound) {}

bool Rebinding::finish(bool look_at_states) {
  if (bound_->tensors() == 0) return false;
  if (look_at_states) {
    if (!states_are_in_place(*native_)) return false;
    note_counts(*native_);
  }
  const Stepping stepping(*native_);
  forget_step(*native_);
  for (const auto& [i, data] : moved_) {
    if (!native_->plan.grad_is_apart(i, data)) return false;
  }
  for (const auto& [i, data] : moved_) {
    native_->plan.move_grad(i, data);
    native_->bound.move_grad(i, data);
  }
  return true;
}

namespace {

// float32 has every integer up to 2^24. From there on a count is the largest float32 number that is not above
// it, and behind that number in its memory is -1 minus the rest: no other number of a state is below 0.
// python/fusedstep/_state/counts.py does the same.
constexpr double kLastCount = 1 << 24;
constexpr float kNoRest = -1;

bool has_rest(const Tensor& step, const float* place) {
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(step.get(), &bytes));
  return bytes == 2 * sizeof(float) && step.storage_offset() == 0 && place[1] <= kNoRest;
}

double read_count(const Tensor& step, const float* place) {
  const double count = place[0];
  return std::isfinite(count) && has_rest(step, place) ? count + (kNoRest - place[1]) : count;
}

void write_count(const Tensor& step, double count, float* place) {
  auto floor = static_cast<float>(count);
  if (floor > count) floor = std::nextafter(floor, 0.0F);
  place[0] = floor;
  if (std::isfinite(count) && has_rest(step, place)) place[1] = static_cast<float>(kNoRest - (count - floor));
}

// Checks that the plan is ready for a step of the rule, and reads its counts.
StepOptions checked_options(NativePlan& native, const BoundRule& rule, const GradArguments& grads) {
  const size_t rule_numbers = rule.numbers.size();
  const int states = rule.states + (native.plan.has_masters() ? 1 : 0);
  if (native.plan.slots() != states) {
    throw std::runtime_error("the plan has " + std::to_string(native.plan.slots()) +
                             " states for each weight, the rule needs " + std::to_string(states));
  }
  check(std::ranges::equal(native.plan.roles(), rule.roles), "the plan's states are those of another rule");
  check(!native.counts.empty(), "the plan has not been bound");
  const size_t tensors = native.plan.tensors();
  if (native.counts.size() != (1 + rule_numbers) * tensors) {
    throw std::runtime_error("the plan has " + std::to_string(native.counts.size() / tensors) +
                             " numbers for each weight, the rule needs " + std::to_string(1 + rule_numbers));
  }
  if (grads.use < 0 || grads.use > static_cast<int64_t>(GradUse::kClear)) {
    throw std::runtime_error("grads must be from 0 to 3, not " + std::to_string(grads.use));
  }
  const bool host_counts = native.steps[0].is_cpu();
  check(!(host_counts && native.found_inf), "the count of a step that may be skipped must be on its device");
  for (size_t i = 0; host_counts && i < native.counts.size(); ++i) {
    const double value = *native.count_places[i];
    if (i >= tensors) {
      native.counts[i] = value;
    } else {
      native.counts[i] =
          1 + (value < kLastCount ? value : read_count(native.steps[i], native.count_places[i]));
    }
  }
  return {.threads = num_threads(),
          .grad_factor = grads.factor,
          .maximize = grads.maximize,
          .grads = static_cast<GradUse>(grads.use)};
}

// Writes the counts, each one more than before.
void raise_counts(NativePlan& native) {
  if (!native.steps[0].is_cpu()) return;
  const size_t tensors = native.plan.tensors();
  for (size_t i = 0; i < native.counts.size(); ++i) {
    if (i < tensors && native.counts[i] >= kLastCount) {
      write_count(native.steps[i], native.counts[i], native.count_places[i]);
    } else {
      *native.count_places[i] = static_cast<float>(native.counts[i]);
    }
  }
}

}  // namespace

void prepare_step(NativePlan& native, const BoundRule& rule, const GradArguments& grads, const Aside& aside) {
  const Stepping stepping(native);
  const StepOptions options = checked_options(native, rule, grads);
  if (native.device) {
    if (aside) aside();  // first: what is queued may wait for what needs Python's lock
    native.prepared = prepare_on_device(native, rule, options);
  } else {
    native.prepared = fusedstep::prepare_step(native.plan, rule, native.counts, options);
  }
}

void take_step(NativePlan& native, const Aside& aside) {
  if (native.device) {
    native.prepared->run(aside);
    raise_counts(native);  // last: a launch may fail
  } else {
    raise_counts(native);  // first: they are in the cache yet
    native.prepared->run(aside);
  }
  native.parts.clear();
  forget_step(native);
}

namespace {

PreparedStep& prepared_step(const NativePlan& native) {
  if (native.prepared == nullptr) throw std::runtime_error("no step over the plan is prepared");
  return *native.prepared;
}

double* checked_norms2(const NativePlan& native, const Tensor& norms2) {
  const TensorView found = view(norms2, "norms2");
  check(found.dtype == DType::kDouble && norms2.is_contiguous() && found.device == native.plan.device() &&
            norms2.numel() == 2 * static_cast<int64_t>(native.plan.tensors()),
        "norms2 must be two float64 numbers for each tensor, on the plan's device");
  return static_cast<double*>(found.data);
}

}  // namespace

void take_direction(NativePlan& native, const Tensor& norms2) {
  const Stepping stepping(native);
  prepared_step(native).run_direction(checked_norms2(native, norms2));
}

void take_application(NativePlan& native, const Tensor& norms2) {
  const Stepping stepping(native);
  prepared_step(native).run_apply(checked_norms2(native, norms2));
  raise_counts(native);
  native.parts.clear();
  forget_step(native);
}

void take_steps(std::span<const int64_t> handles, const Aside& aside) {
  std::vector<std::shared_ptr<NativePlan>> plans;
  plans.reserve(handles.size());
  std::deque<Stepping> under_way;  // all of them before the first changes anything
  for (const int64_t handle : handles) {
    plans.push_back(find_plan(handle));
    const bool is_named_twice = plans.back()->stepped_by == process &&
                                std::find(plans.begin(), plans.end() - 1, plans.back()) != plans.end() - 1;
    if (!is_named_twice) under_way.emplace_back(*plans.back());
    if (plans.back()->prepared == nullptr) {
      throw std::runtime_error("no step over plan " + std::to_string(handle) +
                               " is prepared: none was, or another thread is stepping this optimizer");
    }
  }
  const Aside none;
  for (const auto& plan : plans) {
    if (plan->prepared != nullptr)
      take_step(*plan, plan == plans[0] ? aside : none);  // one named twice: once
  }
}

std::span<const double> numbers(const Tensor& options, size_t count) {
  check(options.is_cpu() && dtype_code(options) == aoti_torch_dtype_float64() && options.dim() == 1 &&
            options.is_contiguous() && options.numel() == static_cast<int64_t>(count),
        "options must be " + std::to_string(count) + " float64 numbers on the CPU");
  return {static_cast<const double*>(options.data_ptr()), count};
}

}  // namespace fusedstep::ops

void fusedstep_drop_plan(int64_t handle) noexcept { fusedstep::ops::drop_plan(handle); }
