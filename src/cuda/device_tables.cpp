#include "src/cuda/device_tables.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "src/cuda/code_table.h"
#include "src/plan/code_maps.h"

namespace fusedstep::cuda {
namespace {

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

size_t row_dims_of(const Plan& plan) {
  size_t dims = 0;
  for (size_t i = 0; i < plan.tensors(); ++i) {
    const int lists = 1 + plan.task(i).operands;  // sizes, and an operand's strides
    if (const RowIndex* index = plan.row_index(i)) dims += index->dims * lists;
  }
  return dims;
}

Coding coding_of(const fusedstep::TensorTask& task) {
  if (task.has_codes) return Coding::kStates;
  return task.weight_code != WeightCode::kPlain ? Coding::kWeight : Coding::kNone;
}

bool is_in_words(const Plan& plan, size_t i) {
  const fusedstep::TensorTask& task = plan.task(i);
  const auto is_aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % kWordBytes == 0;
  };
  if (task.layout != nullptr || !std::all_of(task.data, task.data + task.operands, is_aligned)) return false;
  if (plan.row_index(i) == nullptr) return true;
  // Each row begins and ends where a word does.
  for (int k = 0; k < task.operands; ++k) {
    const auto is_of_words = [&](int64_t elements) {
      return elements * task.element_size[k] % kWordBytes == 0;
    };
    if (!is_of_words(plan.elements_of_row(i)) || !std::ranges::all_of(plan.row_strides(i, k), is_of_words)) {
      return false;
    }
  }
  return true;
}

}  // namespace

void DeviceTables::refresh(Plan& plan, const StepOptions& options, cudaStream_t stream) {
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
    captured_grads_ = {};
    captured_grads_.tables = placed.in(kept_.back().get());
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

void DeviceTables::find_numbers(std::span<float* const> numbers, cudaStream_t stream) {
  if (std::ranges::equal(numbers, numbers_)) return;
  refuse_if_capturing(stream);
  std::vector<float*> places(numbers.begin(), numbers.end());
  upload(tables_.numbers, places);
  numbers_.clear();  // until the device has the new ones
  uploads_.send(stream);
  numbers_ = std::move(places);
}

void DeviceTables::refuse_if_capturing(cudaStream_t stream) const {
  if (is_capturing(stream)) {
    throw std::runtime_error(
        "the step to be captured has other weights or states than those before: take a step of this kind "
        "before the capture");
  }
}

void DeviceTables::describe_tensors(const Plan& plan) {
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

CodedTask DeviceTables::on_device(const CodedState& state) const {
  if (state.map == nullptr) return {};
  return {tables_.codes + (state.map - code_maps().data()), state.absmax,
          state.map->elements_per_byte() == 2};
}

void DeviceTables::describe_grads(const Plan& plan, Grads& known, bool with_chunks) {
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

void DeviceTables::allocate(size_t tensors, size_t chunks, size_t dims, size_t row_dims) {
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

}  // namespace fusedstep::cuda
