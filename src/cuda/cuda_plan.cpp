// Steps on a CUDA device: the tables that kernels read, and the launches of a step.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda_kernels/kernel_table.h"
#include "fusedstep/rules/list.h"
#include "src/backend.h"
#include "src/code_maps.h"
#include "src/cuda/code_table.h"
#include "src/cuda/memory.h"

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
  static_assert(sizeof(Scalars) == BoundRule::kScalarsBytes);
  Scalars scalars{};
  std::memcpy(scalars.bytes, block.bytes, sizeof block.bytes);
  return scalars;
}

// The passes that tensors need: those of PassKernels for codes, or others.
enum class Coding : uint8_t { kNone, kStates, kWeight };

// Tensors that one launch of a pass can take together.
struct LaunchKind {
  Format format;
  Access access;
  bool can_store;  // the update between two phases
  Coding coding;

  auto operator<=>(const LaunchKind&) const = default;
};

// Chunks [first, last) of the device's list, which are of tensors of one kind.
struct LaunchGroup {
  LaunchKind of;
  int64_t first, last;
  bool one_chunk;  // true if each tensor has one
};

// The device's tables of gradients, and the chunks in the order of the launches.
struct GradTables {
  Grad* grads;
  GradRows* rows;
  int64_t* row_dims;
  NumberedChunk* chunks;
};
struct PlacedGradTables {
  size_t grads, rows, row_dims, chunks;  // offsets in the memory

  PlacedGradTables(TableOffsets& offsets, size_t tensors, size_t chunk_count, size_t row_dim_count)
      : grads(offsets.place<Grad>(tensors)),
        rows(offsets.place<GradRows>(tensors)),
        row_dims(offsets.place<int64_t>(row_dim_count)),
        chunks(offsets.place<NumberedChunk>(chunk_count)) {}
  GradTables in(std::byte* memory) const {
    return {reinterpret_cast<Grad*>(memory + grads), reinterpret_cast<GradRows*>(memory + rows),
            reinterpret_cast<int64_t*>(memory + row_dims), reinterpret_cast<NumberedChunk*>(memory + chunks)};
  }
};

// The gradients that a step takes: their tables, and the launches that they need.
struct Grads {
  GradTables tables;
  std::vector<LaunchKind> classes;
  std::vector<LaunchGroup> groups;
  bool has_rows = false;
};

struct Tables {
  TensorTask* tensors;
  int64_t* dims;
  unsigned long long* found_indices;
  double *partials, *ratios;
  Scalars* scalars;
  uint64_t* draws;
  float** numbers;
  TensorProgress* progress;
  WaitingChunk* waiting;
  ChunkQueue* queue;
  CodeTable* codes;  // of code_maps()
};

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
    refresh(plan, options, stream);
    Launch launch = launch_of(options, inputs, stream);
    const fusedstep::Scalars scalars = prepare_scalars(plan, rule, numbers);
    if (scalars.blocks.size() == 1) {
      launch.scalars = scalars_of(scalars.blocks[0]);
    } else {
      std::vector<Scalars> of_tensor;
      for (const uint32_t block : scalars.of_tensor) of_tensor.push_back(scalars_of(scalars.blocks[block]));
      upload(tables_.scalars, of_tensor);
      launch.scalars_of_tensor = tables_.scalars;
    }
    if (plan.rounds_at_random()) find_draws(plan, numbers, launch);
    uploads_.send(stream);
    return prepared(plan, rule, launch, {});
  }

  std::unique_ptr<PreparedStep> prepare_counted(Plan& plan, const BoundRule& rule,
                                                std::span<float* const> numbers, const StepOptions& options,
                                                const DeviceInputs& inputs) override {
    const DeviceGuard guard(device_);
    const cudaStream_t stream = current_stream(device_);
    plan.use_signs(rule.not_negative);
    refresh(plan, options, stream);
    if (!std::ranges::equal(numbers, numbers_)) {
      refuse_if_capturing(stream);
      std::vector<float*> places(numbers.begin(), numbers.end());
      upload(tables_.numbers, places);
      numbers_.clear();  // until the device has the new ones
      uploads_.send(stream);
      numbers_ = std::move(places);
    }
    PrepareLaunch count{};
    count.tensors = tables_.tensors;
    count.tensor_count = static_cast<int64_t>(plan.tensors());
    count.numbers = tables_.numbers;
    count.hyper = hyper_of(rule);
    count.lr = inputs.lr;
    count.found_inf = inputs.found_inf;
    count.scalars = tables_.scalars;
    count.stream = stream;
    Launch launch = launch_of(options, inputs, stream);
    launch.scalars_of_tensor = tables_.scalars;
    if (plan.rounds_at_random()) {
      count.seed = plan.seed();
      launch.draws_of_tensor = count.draws = tables_.draws;
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
    refresh(plan, {}, stream);
    const size_t bytes = plan.tensors() * sizeof *tables_.found_indices;
    check(cudaMemsetAsync(tables_.found_indices, 0xff, bytes, stream), "preparing to look at indices");
    check_indices(
        {grads_->tables.grads, static_cast<int64_t>(plan.tensors()), tables_.found_indices, stream});
    std::vector<unsigned long long> found(plan.tensors());
    fetch(found.data(), tables_.found_indices, found.size(), stream);
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
    refresh(plan, {}, stream);
    Launch launch = launch_of({}, {}, stream);
    for_launches([&](const LaunchGroup& group) {
      select(launch, group);
      sum_grad_chunks(group.of.format, group.of.access, launch);
    });
    add_chunks(tables_.partials, static_cast<int64_t>(plan.chunks().size()), sum, stream);
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
    if (!std::ranges::all_of(grads_->groups, takes)) {
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
    upload(tables_.draws, of_tensor);
    launch.draws_of_tensor = tables_.draws;
  }

  static const PassKernels& kernels_of(const RuleTable& rules, const BoundRule& rule,
                                       const LaunchGroup& group) {
    return rules.of_flags[rule.flags].of[static_cast<int>(group.of.format)][group.of.access];
  }
  using Pass = void (*)(const Launch&);
  Pass update_of(const PassKernels& kernels, const LaunchGroup& group) const {
    if (group.of.coding != Coding::kNone) return coded_passes(kernels, group).update;
    return grads_->has_rows ? kernels.update_rows : kernels.update;
  }

  static const CodedPasses& coded_passes(const PassKernels& kernels, const LaunchGroup& group) {
    return group.of.coding == Coding::kStates ? kernels.coded_states : kernels.coded_weight;
  }

  // Brings the device's tables up to date with what was bound.
  void refresh(Plan& plan, const StepOptions& options, cudaStream_t stream) {
    uploads_.clear();
    plan.refresh(std::numeric_limits<int64_t>::max());
    if (options.grads != GradUse::kLeave && !plan.aliasing_is_known()) {
      Plan* const alone[] = {&plan};
      Plan::find_aliasing_grads(alone);
    }
    const bool moved = !is_current_ || plan.operands_version() != operands_version_;
    if (moved) {
      refuse_if_capturing(stream);
      is_current_ = false;
      describe_tensors(plan);
      operands_version_ = plan.operands_version();
    }
    if (is_capturing(stream)) {
      // A graph has to find the tables that it was captured with, whatever steps are taken later. It has a
      // copy of its own, so that running it copies nothing.
      captured_ = true;
      TableOffsets offsets;
      const PlacedGradTables placed(offsets, plan.tensors(), plan.chunks().size(), row_dims_of(plan));
      kept_.push_back(new_device_bytes(offsets.bytes()));
      captured_grads_ = {.tables = placed.in(kept_.back().get())};
      grads_ = &captured_grads_;
      describe_grads(plan, captured_grads_, true);
      uploads_.send_apart();
      return;
    }
    grads_ = &eager_grads_;
    if (!moved && plan.grads_version() == grads_version_) return;
    is_current_ = false;
    describe_grads(plan, eager_grads_, moved);
    uploads_.send(stream);
    grads_version_ = plan.grads_version();
    is_current_ = true;
  }

  static size_t row_dims_of(const Plan& plan) {
    size_t dims = 0;
    for (size_t i = 0; i < plan.tensors(); ++i) {
      const int lists = 1 + plan.task(i).operands;  // sizes, and an operand's strides
      if (const RowIndex* index = plan.row_index(i)) dims += index->dims * lists;
    }
    return dims;
  }

  void refuse_if_capturing(cudaStream_t stream) const {
    if (is_capturing(stream)) {
      throw std::runtime_error(
          "the step to be captured has other weights or states than those before: take a step of this kind "
          "before the capture");
    }
  }

  void describe_tensors(const Plan& plan) {
    const size_t tensors = plan.tensors(), chunks = plan.chunks().size();
    size_t dims = 0;
    for (size_t i = 0; i < tensors; ++i) {
      const int lists = 1 + plan.task(i).operands;  // sizes, and an operand's strides
      if (const BlockLayout* layout = plan.task(i).layout) dims += layout->dims * lists;
    }
    allocate(tensors, chunks, dims, row_dims_of(plan));

    std::vector<TensorTask> tasks(tensors);
    std::vector<int64_t> all_dims;
    all_dims.reserve(dims);
    for (size_t i = 0; i < tensors; ++i) {
      const fusedstep::TensorTask& known = plan.task(i);
      std::copy_n(known.data, kMaxOperands, tasks[i].data);
      for (int k = 0; k < kMaxStates; ++k) tasks[i].coded[k] = on_device(known.coded[k]);
      tasks[i].as_double = plan.format(i) == Format::kDouble;
      tasks[i].weight_code = known.weight_code;
      if (plan.rounds_at_random()) tasks[i].place = plan.place(i);
      tasks[i].in_order = known.is_on_tiles();
      if (known.layout == nullptr) continue;
      const auto copied = [&](const int64_t* from, int64_t count) {
        all_dims.insert(all_dims.end(), from, from + count);
        return tables_.dims + all_dims.size() - count;
      };
      tasks[i].layout = *known.layout;
      tasks[i].layout.sizes = copied(known.layout->sizes, known.layout->dims);
      tasks[i].layout.strides = copied(known.layout->strides, known.layout->dims * known.operands);
    }
    for (size_t c = 0; c < chunks; ++c) {
      TensorTask& task = tasks[plan.chunks()[c].tensor];
      if (task.last_chunk == 0) task.first_chunk = static_cast<int64_t>(c);
      task.last_chunk = static_cast<int64_t>(c) + 1;
    }
    upload(tables_.dims, all_dims);
    std::vector<CodeTable> codes;
    for (const CodeMap& map : code_maps()) codes.push_back(code_table(map));
    upload(tables_.codes, codes);
    upload(tables_.tensors, tasks);
    upload(tables_.progress, std::vector<TensorProgress>(tensors));
    upload(tables_.queue, std::vector<ChunkQueue>(1));
    numbers_.clear();
  }

  CodedTask on_device(const CodedState& state) const {
    if (state.map == nullptr) return {};
    return {tables_.codes + (state.map - code_maps().data()), state.absmax,
            state.map->elements_per_byte() == 2};
  }

  void describe_grads(const Plan& plan, Grads& known, bool with_chunks) {
    std::vector<Grad> grads(plan.tensors());
    std::vector<LaunchKind> classes(plan.tensors());
    std::vector<GradRows> rows;
    std::vector<int64_t> row_dims;
    for (size_t i = 0; i < plan.tensors(); ++i) {
      const fusedstep::TensorTask& task = plan.task(i);
      grads[i] = {task.data[kGrad], nullptr, plan.grad_is_writable(i)};
      if (const RowIndex* index = plan.row_index(i)) {
        const auto copied = [&](Dims from) {
          row_dims.insert(row_dims.end(), from.begin(), from.end());
          return known.tables.row_dims + row_dims.size() - from.size();
        };
        const int64_t* const sizes = copied(plan.row_sizes(i));
        const int64_t* const strides = known.tables.row_dims + row_dims.size();
        for (int k = 0; k < task.operands; ++k) copied(plan.row_strides(i, k));
        rows.push_back({*index, sizes, strides, plan.units_of_row(i), plan.elements_of_row(i)});
        grads[i].rows = known.tables.rows + (rows.size() - 1);
      }
      classes[i] = {plan.format(i), is_in_words(plan, i) ? kInWords : kByElement, plan.grad_can_store(i),
                    coding_of(task)};
    }
    upload(known.tables.grads, grads);
    upload(known.tables.rows, rows);
    upload(known.tables.row_dims, row_dims);
    known.has_rows = !rows.empty();
    if (!with_chunks && classes == known.classes) return;
    known.classes = std::move(classes);

    std::vector<NumberedChunk> chunks;
    for (const Chunk& chunk : plan.chunks()) chunks.push_back({chunk, static_cast<int64_t>(chunks.size())});
    const auto of = [&](const NumberedChunk& chunk) { return known.classes[chunk.chunk.tensor]; };
    std::ranges::stable_sort(chunks, {}, of);
    known.groups.clear();
    for (size_t c = 0; c < chunks.size(); ++c) {
      const auto position = static_cast<int64_t>(c);
      if (known.groups.empty() || known.groups.back().of != of(chunks[c])) {
        known.groups.push_back({of(chunks[c]), position, 0, true});
      } else if (chunks[c].chunk.tensor == chunks[c - 1].chunk.tensor) {
        known.groups.back().one_chunk = false;
      }
      known.groups.back().last = position + 1;
    }
    upload(known.tables.chunks, chunks);
  }

  static Coding coding_of(const fusedstep::TensorTask& task) {
    if (task.has_codes) return Coding::kStates;
    return task.weight_code != WeightCode::kPlain ? Coding::kWeight : Coding::kNone;
  }

  static bool is_in_words(const Plan& plan, size_t i) {
    const fusedstep::TensorTask& task = plan.task(i);
    const auto is_aligned = [](const void* data) {
      return reinterpret_cast<uintptr_t>(data) % kWordBytes == 0;
    };
    if (task.layout != nullptr || !std::all_of(task.data, task.data + task.operands, is_aligned))
      return false;
    if (plan.row_index(i) == nullptr) return true;
    // Each row begins and ends where a word does.
    for (int k = 0; k < task.operands; ++k) {
      const auto is_of_words = [&](int64_t elements) {
        return elements * task.element_size[k] % kWordBytes == 0;
      };
      if (!is_of_words(plan.elements_of_row(i)) ||
          !std::ranges::all_of(plan.row_strides(i, k), is_of_words)) {
        return false;
      }
    }
    return true;
  }

  void allocate(size_t tensors, size_t chunks, size_t dims, size_t row_dims) {
    TableOffsets offsets;
    const size_t at_tensors = offsets.place<TensorTask>(tensors), at_dims = offsets.place<int64_t>(dims),
                 at_found_indices = offsets.place<unsigned long long>(tensors),
                 at_partials = offsets.place<double>(kPartials * chunks),
                 at_ratios = offsets.place<double>(tensors), at_scalars = offsets.place<Scalars>(tensors),
                 at_draws = offsets.place<uint64_t>(tensors),
                 at_numbers = offsets.place<float*>(kMaxNumbers * tensors),
                 at_progress = offsets.place<TensorProgress>(tensors),
                 at_waiting = offsets.place<WaitingChunk>(chunks), at_queue = offsets.place<ChunkQueue>(1),
                 at_codes = offsets.place<CodeTable>(code_maps().size());
    const PlacedGradTables at_eager_grads(offsets, tensors, chunks, row_dims);
    if (offsets.bytes() > bytes_) {
      // More than is needed now, but for the first time: sparse gradients may have more entries at every
      // step.
      const size_t bytes = offsets.bytes() + (bytes_ > 0 ? offsets.bytes() / 2 : 0);
      DeviceBytes memory = new_device_bytes(bytes);
      // Freeing waits for the kernels that read the memory. A graph may read it again, so it is kept.
      if (captured_) kept_.push_back(std::move(memory_));
      memory_ = std::move(memory);
      bytes_ = bytes;
    }
    std::byte* const base = memory_.get();
    tables_.tensors = reinterpret_cast<TensorTask*>(base + at_tensors);
    tables_.dims = reinterpret_cast<int64_t*>(base + at_dims);
    eager_grads_.tables = at_eager_grads.in(base);
    tables_.found_indices = reinterpret_cast<unsigned long long*>(base + at_found_indices);
    tables_.partials = reinterpret_cast<double*>(base + at_partials);
    tables_.ratios = reinterpret_cast<double*>(base + at_ratios);
    tables_.scalars = reinterpret_cast<Scalars*>(base + at_scalars);
    tables_.draws = reinterpret_cast<uint64_t*>(base + at_draws);
    tables_.numbers = reinterpret_cast<float**>(base + at_numbers);
    tables_.progress = reinterpret_cast<TensorProgress*>(base + at_progress);
    tables_.waiting = reinterpret_cast<WaitingChunk*>(base + at_waiting);
    tables_.queue = reinterpret_cast<ChunkQueue*>(base + at_queue);
    tables_.codes = reinterpret_cast<CodeTable*>(base + at_codes);
  }

  template <class T>
  void upload(T* to, const std::vector<T>& from) {
    const void* const bytes = static_cast<const void*>(from.data());
    if (!from.empty()) uploads_.add(reinterpret_cast<std::byte*>(to), bytes, from.size() * sizeof(T));
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
    launch.tensors = tables_.tensors;
    launch.grads = grads_->tables.grads;
    launch.sign = options.maximize ? -1 : 1;
    launch.grad_factor = options.grad_factor;
    launch.more_factor = inputs.grad_factor;
    launch.found_inf = inputs.found_inf;
    launch.use = options.grads == GradUse::kScale && as_it_is ? GradUse::kLeave : options.grads;
    launch.partials = tables_.partials;
    launch.ratios = tables_.ratios;
    launch.queue.stream = stream;
    return launch;
  }

  void select(Launch& launch, const LaunchGroup& group) const {
    launch.chunks = grads_->tables.chunks + group.first;
    launch.chunk_count = group.last - group.first;
    launch.stores = group.of.can_store && (launch.use == GradUse::kScratch || launch.use == GradUse::kClear);
  }

  // Calls launch(group) for each launch of a pass that stores no updates.
  template <class Launch>
  void for_launches(Launch launch) const {
    const std::vector<LaunchGroup>& groups = grads_->groups;
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
      for (const LaunchGroup& group : grads_->groups) {
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
      both.progress = tables_.progress;
      both.waiting = tables_.waiting;
      both.queue = tables_.queue;
      both.device = device_;
      for_groups(in_words, [&](const PassKernels& kernels, const LaunchGroup& group) {
        both.pass = launch;
        (group.one_chunk ? kernels.one_chunk : kernels.two_phases)(both);
      });
      if (!std::ranges::all_of(grads_->groups, in_words)) {
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
    for (const LaunchGroup& group : grads_->groups) {
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
    for (const LaunchGroup& group : grads_->groups) {
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
    ratio.tensors = tables_.tensors;
    ratio.tensor_count = static_cast<int64_t>(plan.tensors());
    ratio.hyper = hyper_of(rule);
    ratio.partials = tables_.partials;
    ratio.ratios = tables_.ratios;
    ratio.stream = stream;
    return ratio;
  }

  int device_;
  bool starts_early_;                                  // a kernel may start before the one ahead has ended
  uint64_t operands_version_ = 0, grads_version_ = 0;  // of the plan, as the device has it
  bool is_current_ = false;                            // false: the device may have only a part of it
  DeviceBytes memory_;
  size_t bytes_ = 0;
  Tables tables_{};
  Grads eager_grads_{}, captured_grads_{};
  const Grads* grads_ = &eager_grads_;  // those of the step under way
  std::vector<float*> numbers_;
  Uploads uploads_;
  bool captured_ = false;
  std::vector<DeviceBytes> kept_;  // for graphs captured with them
};

[[maybe_unused]] const bool registered = [] {
  register_cuda([](int device) -> std::unique_ptr<DevicePlan> { return std::make_unique<CudaPlan>(device); });
  return true;
}();

}  // namespace
}  // namespace fusedstep::cuda
