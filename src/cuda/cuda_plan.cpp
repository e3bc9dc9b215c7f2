// The launches of a step on a CUDA device.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda_kernels/kernel_table.h"
#include "fusedstep/rules/list.h"
#include "src/cuda/device_tables.h"
#include "src/cuda/memory.h"
#include "src/run/backend.h"

namespace fusedstep::cuda {
namespace {

const RuleTable& table(rules::RuleId id) {
  switch (id) {
#define FUSEDSTEP_CASE(Rule)   \
  case rules::RuleId::k##Rule: \
    return table_of<rules::Rule>();
    FUSEDSTEP_RULES(FUSEDSTEP_CASE)
#undef FUSEDSTEP_CASE
  }
  throw std::logic_error("no such rule");
}

Hyper hyper_of(const BoundRule& rule) {
  static_assert(sizeof(Hyper) == BoundRule::kHyperBytes);
  Hyper hyper{};
  std::memcpy(hyper.bytes, rule.hyper, sizeof rule.hyper);
  return hyper;
}

Scalars scalars_of(const ScalarsBlock& block) {
  Scalars scalars{};
  static_assert(sizeof scalars.bytes == BoundRule::kScalarsBytes);
  std::memcpy(scalars.bytes, block.bytes, sizeof block.bytes);
  scalars.rounding = block.rounding;
  return scalars;
}

class CudaPlan final : public DevicePlan {
 public:
  explicit CudaPlan(int device) : device_(device), starts_early_(can_start_early(device)) {}

  std::unique_ptr<PreparedStep> prepare(Plan& plan, const BoundRule& rule, std::span<double> numbers,
                                        const StepOptions& options, const DeviceInputs& inputs) override {
    const DeviceGuard guard(device_);
    const cudaStream_t stream = current_stream(device_);
    if (is_capturing(stream)) {
      throw std::runtime_error(
          "a step can be captured in a graph only with its count on the device: capturable=True");
    }
    if (inputs.lr != nullptr) throw std::runtime_error("lr on the device needs the step count there");
    plan.use_signs(rule.not_negative);
    tables_.refresh(plan, options, stream);
    Launch launch = launch_of(options, inputs, stream);
    const fusedstep::Scalars scalars = prepare_scalars(plan, rule, numbers);
    if (scalars.blocks.size() == 1) {
      launch.scalars = scalars_of(scalars.blocks[0]);
    } else {
      std::vector<Scalars> of_tensor;
      for (const uint32_t block : scalars.of_tensor) of_tensor.push_back(scalars_of(scalars.blocks[block]));
      tables_.upload(tables_.plan().scalars, of_tensor);
      launch.scalars_of_tensor = tables_.plan().scalars;
    }
    if (plan.rounds_at_random()) find_draws(plan, numbers, launch);
    tables_.send(stream);
    return prepared(plan, rule, launch, {});
  }

  std::unique_ptr<PreparedStep> prepare_counted(Plan& plan, const BoundRule& rule,
                                                std::span<float* const> numbers, const StepOptions& options,
                                                const DeviceInputs& inputs) override {
    const DeviceGuard guard(device_);
    const cudaStream_t stream = current_stream(device_);
    plan.use_signs(rule.not_negative);
    tables_.refresh(plan, options, stream);
    tables_.find_numbers(numbers, stream);
    PrepareLaunch count{};
    count.tensors = tables_.plan().tensors;
    count.tensor_count = static_cast<int64_t>(plan.tensors());
    count.numbers = tables_.plan().numbers;
    count.hyper = hyper_of(rule);
    count.lr = inputs.lr;
    count.found_inf = inputs.found_inf;
    count.scalars = tables_.plan().scalars;
    count.stream = stream;
    Launch launch = launch_of(options, inputs, stream);
    launch.scalars_of_tensor = tables_.plan().scalars;
    if (plan.rounds_at_random()) {
      count.seed = plan.seed();
      launch.draws_of_tensor = count.draws = tables_.plan().draws;
    }
    launch.queue.early = starts_early_;
    return prepared(plan, rule, launch, count);
  }

  void check_rows(Plan& plan) override {
    const auto is_ordered = [&](size_t i) {
      const RowIndex* const index = plan.row_index(i);
      return index != nullptr && index->order != nullptr;
    };
    size_t first = 0;
    while (first < plan.tensors() && !is_ordered(first)) ++first;
    if (first == plan.tensors()) return;

    const DeviceGuard guard(device_);
    const cudaStream_t stream = current_stream(device_);
    if (is_capturing(stream)) throw std::runtime_error("a step with sparse gradients cannot be captured");
    tables_.refresh(plan, {}, stream);
    const size_t bytes = plan.tensors() * sizeof *tables_.plan().found_indices;
    check(cudaMemsetAsync(tables_.plan().found_indices, 0xff, bytes, stream), "preparing to look at indices");
    check_indices({tables_.grads().tables.grads, static_cast<int64_t>(plan.tensors()),
                   tables_.plan().found_indices, stream});
    std::vector<unsigned long long> found(plan.tensors());
    fetch(found.data(), tables_.plan().found_indices, found.size(), stream);
    for (size_t i = first; i < found.size(); ++i) {
      if (found[i] == kNoIndex || !is_ordered(i)) continue;
      const RowIndex& index = *plan.row_index(i);
      const auto entries = static_cast<unsigned long long>(index.entries);
      const auto dim = static_cast<int>(found[i] / entries);
      const auto entry = static_cast<int64_t>(found[i] % entries);
      int64_t at = 0;
      fetch(&at, index.data + dim * index.dim_stride + entry * index.entry_stride, 1, stream);
      plan.refuse_row(i, dim, at);
    }
  }

  void add_grad_norm2(Plan& plan, double* sum) override {
    const DeviceGuard guard(device_);
    const cudaStream_t stream = current_stream(device_);
    tables_.refresh(plan, {}, stream);
    Launch launch = launch_of({}, {}, stream);
    for_launches([&](const LaunchGroup& group) {
      select(launch, group);
      sum_grad_chunks(group.of.format, group.of.access, launch);
    });
    add_chunks(tables_.plan().partials, static_cast<int64_t>(plan.chunks().size()), sum, stream);
    check(cudaGetLastError(), "summing gradients");
  }

 private:
  // A step that only launches kernels.
  class CudaStep final : public PreparedStep {
   public:
    CudaStep(CudaPlan& on_device, Plan& plan, const BoundRule& rule, const Launch& launch,
             const std::optional<PrepareLaunch>& count)
        : on_device_(on_device), plan_(plan), rule_(rule), launch_(launch), count_(count) {}

    void run(const Aside& aside) override {
      if (aside) aside();  // first: a launch may wait for what needs Python's lock
      const DeviceGuard guard(on_device_.device_);
      if (count_) table(rule_.id).prepare(*count_);
      on_device_.run(plan_, rule_, launch_);
    }

    void run_direction(double* norms2) override {
      if (table(rule_.id).ratio == nullptr) return PreparedStep::run_direction(norms2);
      const DeviceGuard guard(on_device_.device_);
      if (count_) table(rule_.id).prepare(*count_);
      launch_.queue.early = false;
      on_device_.run_direction(plan_, rule_, launch_, norms2);
    }

    void run_apply(const double* norms2) override {
      if (table(rule_.id).ratio == nullptr) return PreparedStep::run_apply(norms2);
      const DeviceGuard guard(on_device_.device_);
      on_device_.run_apply(plan_, rule_, launch_, norms2);
    }

   private:
    CudaPlan& on_device_;
    Plan& plan_;
    BoundRule rule_;
    Launch launch_;
    std::optional<PrepareLaunch> count_;  // of the steps, on the device
  };

  std::unique_ptr<PreparedStep> prepared(Plan& plan, const BoundRule& rule, const Launch& launch,
                                         const std::optional<PrepareLaunch>& count) {
    const RuleTable& rules = table(rule.id);
    const auto takes = [&](const LaunchGroup& group) {
      return rules.ratio != nullptr || update_of(kernels_of(rules, rule, group), group) != nullptr;
    };
    if (!std::ranges::all_of(tables_.grads().groups, takes)) {
      throw std::runtime_error("this rule takes no sparse gradients on CUDA");
    }
    return std::make_unique<CudaStep>(*this, plan, rule, launch, count);
  }

  // The keys of random numbers, of the step number of each tensor.
  void find_draws(const Plan& plan, std::span<const double> numbers, Launch& launch) {
    std::vector<uint64_t> of_tensor(plan.tensors());
    std::ranges::transform(numbers.first(plan.tensors()), of_tensor.begin(), [&](double number) {
      return key_of_step(plan.seed(), static_cast<uint64_t>(number));
    });
    if (std::ranges::adjacent_find(of_tensor, std::not_equal_to<>()) == of_tensor.end()) {
      if (!of_tensor.empty()) launch.draws = of_tensor[0];
      return;
    }
    tables_.upload(tables_.plan().draws, of_tensor);
    launch.draws_of_tensor = tables_.plan().draws;
  }

  static const PassKernels& kernels_of(const RuleTable& rules, const BoundRule& rule,
                                       const LaunchGroup& group) {
    return rules.of_flags[rule.flags].of[static_cast<int>(group.of.format)][group.of.access];
  }
  using Pass = void (*)(const Launch&);
  Pass update_of(const PassKernels& kernels, const LaunchGroup& group) const {
    if (group.of.coding != Coding::kNone) return coded_passes(kernels, group).update;
    return tables_.grads().has_rows ? kernels.update_rows : kernels.update;
  }

  static const CodedPasses& coded_passes(const PassKernels& kernels, const LaunchGroup& group) {
    return group.of.coding == Coding::kStates ? kernels.coded_states : kernels.coded_weight;
  }

  // Waits for the device.
  template <class T>
  static void fetch(T* to, const T* from, size_t count, cudaStream_t stream) {
    check(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDeviceToHost, stream), "looking at indices");
    check(cudaStreamSynchronize(stream), "looking at indices");
  }

  Launch launch_of(const StepOptions& options, const DeviceInputs& inputs, cudaStream_t stream) const {
    const bool as_it_is = options.grad_factor == 1 && inputs.grad_factor == nullptr;
    Launch launch{};
    launch.tensors = tables_.plan().tensors;
    launch.grads = tables_.grads().tables.grads;
    launch.sign = options.maximize ? -1 : 1;
    launch.grad_factor = options.grad_factor;
    launch.more_factor = inputs.grad_factor;
    launch.found_inf = inputs.found_inf;
    launch.use = options.grads == GradUse::kScale && as_it_is ? GradUse::kLeave : options.grads;
    launch.partials = tables_.plan().partials;
    launch.ratios = tables_.plan().ratios;
    launch.queue.stream = stream;
    return launch;
  }

  void select(Launch& launch, const LaunchGroup& group) const {
    launch.chunks = tables_.grads().tables.chunks + group.first;
    launch.chunk_count = group.last - group.first;
    launch.stores = group.of.can_store && (launch.use == GradUse::kScratch || launch.use == GradUse::kClear);
  }

  // Calls launch(group) for each launch of a pass that stores no updates.
  template <class Launch>
  void for_launches(Launch launch) const {
    const std::vector<LaunchGroup>& groups = tables_.grads().groups;
    for (auto first = groups.begin(); first != groups.end();) {
      const auto end = std::find_if(first, groups.end(), [&](const LaunchGroup& group) {
        return group.of.format != first->of.format || group.of.access != first->of.access ||
               group.of.coding != first->of.coding;
      });
      LaunchGroup together = *first;
      together.last = std::prev(end)->last;
      launch(together);
      first = end;
    }
  }

  void run(Plan& plan, const BoundRule& rule, Launch launch) {
    const RuleTable& rules = table(rule.id);
    const auto for_groups = [&](auto among, auto pass) {
      for (const LaunchGroup& group : tables_.grads().groups) {
        if (!among(group)) continue;
        select(launch, group);
        pass(kernels_of(rules, rule, group), group);
        launch.queue.early = false;
      }
    };
    const auto in_codes = [](const LaunchGroup& group) { return group.of.coding != Coding::kNone; };
    const auto in_words = [&](const LaunchGroup& group) {
      return !in_codes(group) && group.of.access == kInWords;
    };
    const auto by_element = [&](const LaunchGroup& group) {
      return !in_codes(group) && group.of.access == kByElement;
    };
    if (rules.ratio == nullptr) {
      for_launches([&](const LaunchGroup& group) {
        select(launch, group);
        update_of(kernels_of(rules, rule, group), group)(launch);
        launch.queue.early = false;
      });
    } else {
      TwoPhaseLaunch both{};
      both.hyper = hyper_of(rule);
      both.progress = tables_.plan().progress;
      both.waiting = tables_.plan().waiting;
      both.queue = tables_.plan().queue;
      both.device = device_;
      for_groups(in_words, [&](const PassKernels& kernels, const LaunchGroup& group) {
        both.pass = launch;
        (group.one_chunk ? kernels.one_chunk : kernels.two_phases)(both);
      });
      if (!std::ranges::all_of(tables_.grads().groups, in_words)) {
        for_groups(by_element, [&](const PassKernels& kernels, auto&) { kernels.accumulate(launch); });
        for_groups(in_codes, [&](const PassKernels& kernels, const LaunchGroup& group) {
          coded_passes(kernels, group).accumulate(launch);
        });
        rules.ratio(ratio_launch(plan, rule, launch.queue.stream));
        for_groups(by_element, [&](const PassKernels& kernels, auto&) {
          (launch.stores ? kernels.apply_stored : kernels.apply_recomputed)(launch);
        });
        for_groups(in_codes, [&](const PassKernels& kernels, const LaunchGroup& group) {
          coded_passes(kernels, group).update(launch);
        });
      }
    }
    check(cudaGetLastError(), "launching a step, or in a kernel before it");
    plan.memory().ran_on = "cuda";
  }

  // The phases apart, in passes that go over tensors element by element. Those for codes find words
  // themselves.
  void run_direction(const Plan& plan, const BoundRule& rule, Launch launch, double* norms2) {
    for (const LaunchGroup& group : tables_.grads().groups) {
      select(launch, group);
      const PassKernels& kernels = apart(rule, group);
      const bool coded = group.of.coding != Coding::kNone;
      (coded ? coded_passes(kernels, group).accumulate : kernels.accumulate)(launch);
    }
    RatioLaunch sums = ratio_launch(plan, rule, launch.queue.stream);
    sums.asked = norms2;
    table(rule.id).ratio(sums);
    check(cudaGetLastError(), "launching the first phase of a step, or in a kernel before it");
  }

  void run_apply(Plan& plan, const BoundRule& rule, Launch launch, const double* norms2) {
    RatioLaunch ratios = ratio_launch(plan, rule, launch.queue.stream);
    ratios.given = norms2;
    table(rule.id).ratio(ratios);
    for (const LaunchGroup& group : tables_.grads().groups) {
      select(launch, group);
      const PassKernels& kernels = apart(rule, group);
      const auto apply = launch.stores ? kernels.apply_stored : kernels.apply_recomputed;
      const bool coded = group.of.coding != Coding::kNone;
      (coded ? coded_passes(kernels, group).update : apply)(launch);
    }
    check(cudaGetLastError(), "launching the second phase of a step, or in a kernel before it");
    plan.memory().ran_on = "cuda";
  }

  static const PassKernels& apart(const BoundRule& rule, const LaunchGroup& group) {
    const Access access = group.of.coding != Coding::kNone ? group.of.access : kByElement;
    return table(rule.id).of_flags[rule.flags].of[static_cast<int>(group.of.format)][access];
  }

  RatioLaunch ratio_launch(const Plan& plan, const BoundRule& rule, Stream stream) const {
    RatioLaunch ratio{};
    ratio.tensors = tables_.plan().tensors;
    ratio.tensor_count = static_cast<int64_t>(plan.tensors());
    ratio.hyper = hyper_of(rule);
    ratio.partials = tables_.plan().partials;
    ratio.ratios = tables_.plan().ratios;
    ratio.stream = stream;
    return ratio;
  }

  int device_;
  bool starts_early_;  // a kernel may start before the one ahead has ended
  DeviceTables tables_;
};

[[maybe_unused]] const bool registered = [] {
  register_cuda([](int device) -> std::unique_ptr<DevicePlan> { return std::make_unique<CudaPlan>(device); });
  return true;
}();

}  // namespace
}  // namespace fusedstep::cuda
