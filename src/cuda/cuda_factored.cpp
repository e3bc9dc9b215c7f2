// A step of weights with factored second moments on a CUDA device: the tables of its kernels, and their
// launches.
#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda_kernels/factored.h"
#include "src/cuda/memory.h"
#include "src/run/backend.h"

namespace fusedstep::cuda {
namespace {

// Pinned memory that a device's tables are copied from: as many slots as there are copies under way, up to a
// number that no training loop is ahead of its device.
class Staging {
 public:
  void send(std::byte* to, const std::vector<std::byte>& from, cudaStream_t stream) {
    Slot& slot = free_slot();
    if (slot.bytes < from.size()) {
      slot.bytes = 0;
      slot.memory = new_pinned_bytes(from.size());
      slot.bytes = from.size();
    }
    std::memcpy(slot.memory.get(), from.data(), from.size());
    check(cudaMemcpyAsync(to, slot.memory.get(), from.size(), cudaMemcpyHostToDevice, stream),
          "copying a step's tables");
    check(cudaEventRecord(slot.copied, stream), "recording an event");
  }

 private:
  static constexpr size_t kMostSlots = 64;
  struct Slot {
    PinnedBytes memory;
    size_t bytes = 0;
    cudaEvent_t copied = nullptr;
  };

  Slot& free_slot() {
    for (Slot& slot : slots_) {
      if (cudaEventQuery(slot.copied) == cudaSuccess) return slot;
      static_cast<void>(cudaGetLastError());  // that it is not ready is no error of a step
    }
    if (slots_.size() < kMostSlots) {
      Slot slot;
      check(cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming), "making an event");
      slots_.push_back(std::move(slot));
      return slots_.back();
    }
    Slot& slot = slots_[next_++ % kMostSlots];
    check(cudaEventSynchronize(slot.copied), "waiting for an earlier copy");
    return slot;
  }

  std::vector<Slot> slots_;
  size_t next_ = 0;
};

void send_tables(int device, std::byte* to, const std::vector<std::byte>& from, cudaStream_t stream) {
  static std::mutex mutex;
  // Left to the end of the process, where the CUDA runtime may have gone before it.
  static auto& of_device = *new std::map<int, Staging>;
  const std::lock_guard lock(mutex);
  of_device[device].send(to, from, stream);
}

class CudaFactoredStep final : public PreparedStep {
 public:
  CudaFactoredStep(int device, std::vector<FactoredTensor> tensors, const OptionsOfTensors& options,
                   FactoredPart part, const DeviceInputs& inputs)
      : device_(device), tensors_(std::move(tensors)), options_(options), part_(part), inputs_(inputs) {
    const DeviceGuard guard(device_);
    stream_ = current_stream(device_);
    if (is_capturing(stream_)) {
      throw std::runtime_error("a step with factored second moments cannot be captured in a graph");
    }
    list_units();
    place();
  }

  size_t scratch_bytes() const override { return offsets_.bytes(); }

  void use(std::byte* scratch) override { scratch_ = scratch; }

  void run(const Aside& aside) override {
    if (aside) aside();  // first: a launch may wait for what needs Python's lock
    if (tensors_.empty()) return;
    const DeviceGuard guard(device_);
    std::byte* const scratch = scratch_;
    send_tables(device_, scratch, tables(scratch), stream_);
    FactoredLaunch launch{};
    launch.tasks = reinterpret_cast<const FactoredTask*>(scratch + tasks_at_);
    launch.options = reinterpret_cast<const FactoredOptions*>(scratch + options_at_);
    launch.more_factor = inputs_.grad_factor;
    launch.found_inf = inputs_.found_inf;
    launch.part = part_;
    launch.queue.stream = stream_;
    const auto over = [&](size_t units_at, size_t first, size_t last, auto pass) {
      if (first == last) return;
      launch.units = reinterpret_cast<const FactoredUnit*>(scratch + units_at) + first;
      launch.unit_count = static_cast<int64_t>(last - first);
      pass(launch);
      launch.queue.early = early_;
    };
    const auto over_tiles = [&](auto phase) {
      for (size_t f = 0; f < kFormats; ++f) {
        over(tiles_at_, first_tile_[f], first_tile_[f + 1],
             factored_passes(static_cast<FactoredFormat>(f)).*phase);
      }
    };
    const auto is_in = [&](auto... parts) {
      return part_ == FactoredPart::kWhole || ((part_ == parts) || ...);
    };
    if (is_in(FactoredPart::kSums)) over_tiles(&FactoredPasses::sums);
    over(moments_at_, 0, moments_.size(), launch_moments);
    if (part_ != FactoredPart::kSums) over(matrices_at_, 0, matrices_.size(), launch_means);
    if (is_in(FactoredPart::kNorms)) over_tiles(&FactoredPasses::norms);
    if (is_in(FactoredPart::kNorms, FactoredPart::kApply)) {
      launch.unit_count = static_cast<int64_t>(tensors_.size());
      launch_lengths(launch);
    }
    if (is_in(FactoredPart::kApply)) over_tiles(&FactoredPasses::apply);
    check(cudaGetLastError(), "launching a step, or in a kernel before it");
  }

 private:
  static constexpr auto kFormats = static_cast<size_t>(FactoredFormat::kCount);

  void list_units() {
    const auto add = [](std::vector<FactoredUnit>& units, size_t tensor, int64_t count, int64_t first = 0) {
      for (int64_t i = first; i < first + count; ++i) {
        units.push_back({static_cast<uint32_t>(tensor), static_cast<uint32_t>(i)});
      }
    };
    for (size_t f = 0; f < kFormats; ++f) {
      for (size_t t = 0; t < tensors_.size(); ++t) {
        const FactoredTensor& tensor = tensors_[t];
        if (static_cast<size_t>(tensor.format) != f) continue;
        const FactoredCut cut(tensor);
        add(tiles_, t, tensor.count * cut.row_tiles * cut.column_tiles);
      }
      first_tile_[f + 1] = tiles_.size();
    }
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const FactoredTensor& tensor = tensors_[t];
      const FactoredCut cut(tensor);
      const bool has_rows = tensor.row_moments != nullptr;
      const bool is_given = part_ == FactoredPart::kRows || part_ == FactoredPart::kNorms;
      const int64_t of_rows =
          has_rows ? tensor.count * moment_units(tensor.rows, is_given ? 1 : cut.column_tiles) : 0;
      const int64_t of_columns = tensor.count * moment_units(tensor.columns, is_given ? 1 : cut.row_tiles);
      if (part_ != FactoredPart::kNorms && part_ != FactoredPart::kApply) add(moments_, t, of_rows);
      if (part_ != FactoredPart::kRows && part_ != FactoredPart::kApply)
        add(moments_, t, of_columns, of_rows);
      if (has_rows) add(matrices_, t, tensor.count);
    }
  }

  // Locates a tensor's parts in the memory, by offsets instead of pointers.
  struct Places {
    size_t row_sums, column_sums, mean_sums, means, norms, lengths;
  };

  void place() {
    tasks_at_ = offsets_.place<FactoredTask>(tensors_.size());
    options_at_ = offsets_.place<FactoredOptions>(options_.options.size());
    size_t dims = 0;
    for (const FactoredTensor& tensor : tensors_) dims += kDimLists * tensor.outer.size();
    dims_at_ = offsets_.place<int64_t>(dims);
    tiles_at_ = offsets_.place<FactoredUnit>(tiles_.size());
    moments_at_ = offsets_.place<FactoredUnit>(moments_.size());
    matrices_at_ = offsets_.place<FactoredUnit>(matrices_.size());
    table_bytes_ = offsets_.bytes();
    // The parts of all tensors side by side: each by itself would begin at a multiple of the alignment.
    size_t row_sums = 0, column_sums = 0, mean_sums = 0, means = 0, norms = 0;
    for (const FactoredTensor& tensor : tensors_) {
      const FactoredCut cut(tensor);
      const auto count = static_cast<size_t>(tensor.count);
      places_.push_back({row_sums, column_sums, mean_sums, means, norms, places_.size()});
      row_sums += count * cut.column_tiles * tensor.rows;
      // In units of a double.
      column_sums += parts(count * cut.row_tiles * tensor.columns * size_of_maths(tensor.format), 8);
      mean_sums += kPartials * count * parts(tensor.rows, kMeanRows);
      means += count;
      norms += kPartials * count * cut.row_tiles * cut.column_tiles;
    }
    const Places at{offsets_.place<double>(row_sums),  offsets_.place<double>(column_sums),
                    offsets_.place<double>(mean_sums), offsets_.place<double>(means),
                    offsets_.place<double>(norms),     offsets_.place<FactoredLengths>(tensors_.size())};
    for (Places& of : places_) {
      of.row_sums = at.row_sums + of.row_sums * sizeof(double);
      of.column_sums = at.column_sums + of.column_sums * sizeof(double);
      of.mean_sums = at.mean_sums + of.mean_sums * sizeof(double);
      of.means = at.means + of.means * sizeof(double);
      of.norms = at.norms + of.norms * sizeof(double);
      of.lengths = at.lengths + of.lengths * sizeof(FactoredLengths);
    }
  }

  // The tables as they are to be in this memory.
  std::vector<std::byte> tables(std::byte* scratch) const {
    std::vector<std::byte> all(table_bytes_);
    std::vector<FactoredTask> tasks;
    std::vector<int64_t> dims;
    const auto* const dims_there = reinterpret_cast<const int64_t*>(scratch + dims_at_);
    const auto copied = [&](Dims from) {
      dims.insert(dims.end(), from.begin(), from.end());
      return dims_there + dims.size() - from.size();
    };
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const FactoredTensor& tensor = tensors_[t];
      const FactoredCut cut(tensor);
      const Places& at = places_[t];
      const auto array = [&](const Matrices& of) {
        return FactoredArray{of.data, of.row, of.column, copied(of.outer)};
      };
      FactoredTask task{};
      task.weight = array(tensor.weight);
      task.grad = array(tensor.grad);
      task.moment = tensor.moment.data != nullptr ? array(tensor.moment) : task.weight;
      task.moment.data = tensor.moment.data;
      task.outer_sizes = copied(tensor.outer);
      task.outer_dims = static_cast<int>(tensor.outer.size());
      task.options = options_.number_of(t);
      task.as_double = tensor.format == FactoredFormat::kDouble;
      task.count = tensor.count;
      task.rows = tensor.rows;
      task.columns = tensor.columns;
      task.row_tiles = cut.row_tiles;
      task.column_tiles = cut.column_tiles;
      const FactoredShare& share = tensor.share;
      task.whole = {share.rows, share.columns, share.elements};
      if (part_ == FactoredPart::kWhole) {
        task.whole = {tensor.rows, tensor.columns, tensor.count * tensor.rows * tensor.columns};
      }
      task.share_of_rows = share.row_sums;
      task.share_of_columns = share.column_sums;
      task.share_of_means = share.mean_sums;
      task.share_of_norms = share.norms2;
      task.row_moments = tensor.row_moments;
      task.column_moments = tensor.column_moments;
      task.row_sums = reinterpret_cast<double*>(scratch + at.row_sums);
      task.column_sums = scratch + at.column_sums;
      task.mean_sums = reinterpret_cast<double*>(scratch + at.mean_sums);
      task.means = reinterpret_cast<double*>(scratch + at.means);
      task.norms = reinterpret_cast<double*>(scratch + at.norms);
      task.lengths = reinterpret_cast<FactoredLengths*>(scratch + at.lengths);
      tasks.push_back(task);
    }
    const auto put = [&](size_t at, const auto& list) {
      if (!list.empty()) std::memcpy(all.data() + at, list.data(), list.size() * sizeof list[0]);
    };
    put(tasks_at_, tasks);
    put(options_at_, options_.options);
    put(dims_at_, dims);
    put(tiles_at_, tiles_);
    put(moments_at_, moments_);
    put(matrices_at_, matrices_);
    return all;
  }

  static constexpr size_t kDimLists = 4;  // sizes, and the strides of weight, gradient and moment

  int device_;
  std::vector<FactoredTensor> tensors_;
  OptionsOfTensors options_;
  FactoredPart part_;
  DeviceInputs inputs_;
  std::byte* scratch_ = nullptr;
  cudaStream_t stream_ = nullptr;
  bool early_ = can_start_early(device_);  // a kernel may start before the one ahead has ended
  std::vector<FactoredUnit> tiles_, moments_, matrices_;
  size_t first_tile_[kFormats + 1] = {};  // of each format
  TableOffsets offsets_;
  size_t tasks_at_ = 0, options_at_ = 0, dims_at_ = 0, tiles_at_ = 0, moments_at_ = 0, matrices_at_ = 0,
         table_bytes_ = 0;
  std::vector<Places> places_;
};

[[maybe_unused]] const bool registered = [] {
  register_cuda_factored([](int device, std::vector<FactoredTensor> tensors, const OptionsOfTensors& options,
                            FactoredPart part, const DeviceInputs& inputs) -> std::unique_ptr<PreparedStep> {
    return std::make_unique<CudaFactoredStep>(device, std::move(tensors), options, part, inputs);
  });
  return true;
}();

}  // namespace
}  // namespace fusedstep::cuda
