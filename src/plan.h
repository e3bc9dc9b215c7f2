// The plan of a step over a fixed list of tensors: where their operands are, how they lie, which chunks there
// are, and which runs of large tensors go through the cache together. Worked out when something moves, reused
// otherwise.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fusedstep/isa.h"
#include "src/core/task.h"
#include "src/extents.h"
#include "src/layout.h"
#include "src/load_balance.h"
#include "src/rows.h"

namespace fusedstep {

enum class DType : uint8_t { kFloat, kDouble, kBFloat16, kHalf };

int element_size(DType dtype);

// The index of a CUDA device, or the host's memory.
constexpr int kHost = -1;

// A tensor as the caller holds it: borrowed for the call. Strides in elements.
struct TensorView {
  void* data;
  DType dtype;
  Dims sizes, strides;
  int device = kHost;
};

// All operands of one tensor's update. `states` has the plan's number of slots. With `rows` the gradient is
// sparse: `grad` is the first of its entries, expanded over all rows; the others lie behind it, one by one.
struct TensorOperands {
  TensorView weight, grad;
  std::array<TensorView, kMaxStates> states;
  std::optional<RowIndex> rows = std::nullopt;
};

// Tensors of several chunks whose operands fit in the cache together: chunks [first, last). Those of tensors
// with one chunk, which may lie between, are not in it.
struct Wave {
  int64_t first, last;
};

class Plan {
 public:
  // `slots` states for each of `tensors` tensors, all on one device. With `masters` the last one is a master
  // copy of the weight (see Mastered).
  Plan(size_t tensors, int slots, int device = kHost, bool masters = false);

  size_t tensors() const { return entries_.size(); }
  int slots() const { return slots_; }
  bool has_masters() const { return masters_; }
  int device() const { return device_; }

  // Takes note of tensor i's operands. Only addresses may differ from the last time for this to be cheap.
  // Throws std::runtime_error, naming the operand, if they cannot be updated together; the plan then still
  // describes the operands of before.
  void bind(size_t i, const TensorOperands& operands);
  // The same where nothing but a dense gradient's address differs.
  void move_grad(size_t i, void* data);
  // To be called when all are bound. Throws std::runtime_error, naming them, if two weights share an element,
  // or if a gradient shares one with a weight. A gradient may be its own weight, element by element.
  void check_weights_apart();
  // Whether gradient i, once it is at `data`, shares no memory with a weight. False if that has to be looked
  // at.
  bool grad_is_apart(size_t i, const void* data) const {
    const char* const begin = static_cast<const char*>(data);
    return !weight_extents_.meet(begin, begin + entries_[i].grad_bytes);
  }

  // Brings chunks and waves up to date with what was bound. Waves are cut at `wave_bytes` of operands, those
  // that the team's second-level caches hold: where all are in them, prefetches are near or none.
  FUSEDSTEP_API void refresh(int64_t wave_bytes);

  Format format(size_t i) const { return formats_[i]; }
  TensorTask& task(size_t i) { return entries_[i].task; }
  const TensorTask& task(size_t i) const { return entries_[i].task; }
  bool empty(size_t i) const { return entries_[i].units() == 0; }
  // The rows of a sparse gradient on the host; null for a dense one, and on a device.
  Rows* rows(size_t i) {
    std::optional<Rows>& rows = entries_[i].rows;
    return rows ? &*rows : nullptr;
  }
  // Which rows a sparse gradient has entries for; null for a dense one.
  const RowIndex* row_index(size_t i) const {
    const std::optional<RowIndex>& index = entries_[i].index;
    return index ? &*index : nullptr;
  }
  // The part of a tensor's walk that a row is, and the elements in it. `task` has the layout of one row.
  int64_t units_of_row(size_t i) const { return entries_[i].layout->units(); }
  FUSEDSTEP_API int64_t elements_of_row(size_t i) const;
  // Sizes of the dimensions that rows are counted in, and an operand's strides there.
  Dims row_sizes(size_t i) const { return entries_[i].sizes(kWeight).first(row_index(i)->dims); }
  Dims row_strides(size_t i, int operand) const {
    return entries_[i].strides(operand).first(row_index(i)->dims);
  }
  // Throws std::runtime_error, naming tensor i: it has no such row.
  [[noreturn]] FUSEDSTEP_API void refuse_row(size_t i, int dim, int64_t at) const;
  // Whether gradient i may be written: it is dense, no two of its elements are in one place, and no other
  // gradient and no weight of the step is in its memory. Told by find_shared_grads().
  bool grad_is_writable(size_t i) const { return entries_[i].grad_is_writable; }
  // Whether it can hold the update between the phases of a step, in the precision of the maths.
  FUSEDSTEP_API bool grad_can_store(size_t i) const;
  // Looks for gradients that share memory, over all plans of a step. Cheap if nothing has moved since.
  FUSEDSTEP_API static void find_shared_grads(std::span<Plan* const> plans);
  // Whether that has been done since the last operand moved.
  bool shares_are_known() const { return !shared_with_.empty(); }

  const std::vector<Chunk>& chunks() const { return chunks_; }
  // Tensor i has chunks [first_chunk(i), first_chunk(i + 1)).
  int64_t first_chunk(size_t i) const { return first_chunks_[i]; }
  // Calls run(task, begin, end) for a chunk: once, or for each row that it has a part of.
  template <class Run>
  void run_parts(const Chunk& chunk, Run run) const {
    const Entry& entry = entries_[chunk.tensor];
    if (!entry.rows) return run(entry.task, chunk.begin, chunk.end);
    const int64_t per_row = entry.layout->units();
    for (int64_t begin = chunk.begin, end; begin < chunk.end; begin = end) {
      const int64_t row = begin / per_row, first = row * per_row;
      end = std::min(chunk.end, first + per_row);
      run(entry.rows->task(entry.task, row), begin - first, end - first);
    }
  }
  // A number that changes with the address or layout of a weight or state, and with the chunks; one that
  // changes with what is told about gradients. Never 0: for whoever keeps a copy.
  uint64_t operands_version() const { return operands_version_; }
  uint64_t grads_version() const { return grads_version_; }

  bool has_one_chunk(size_t i) const { return first_chunk(i + 1) - first_chunk(i) == 1; }

  const std::vector<Wave>& waves() const { return waves_; }
  // cost()[c] is the number of elements in the chunks before c; of these, in tensors that are in waves; and
  // in those that are not.
  const std::vector<int64_t>& cost() const { return cost_; }
  const std::vector<int64_t>& wave_cost() const { return wave_cost_; }
  const std::vector<int64_t>& single_cost() const { return single_cost_; }

  // What a step leaves for the next or for the curious.
  std::vector<double> partial_norms;       // [chunks][2], scratch of a step with norms
  std::vector<double> ratios;              // [tensors], of a step with norms
  LoadBalance step_balance, norm_balance;  // of the threads: in steps, and in sums over gradients
  const char* ran_on = "";                 // the instruction set that ran the last step

 private:
  struct Entry {
    TensorTask task{};
    std::unique_ptr<Layout> layout;  // of one row if the gradient is sparse
    std::optional<RowIndex> index;
    std::optional<Rows> rows;
    std::vector<int64_t> shape;                // dtypes, sizes and strides that the layout was made from
    int64_t grad_bytes = 0, weight_bytes = 0;  // from first to last byte
    bool grad_overlaps = false;
    bool grad_is_writable = false;

    int64_t units() const { return layout->units() * (rows ? rows->count() : index ? index->entries : 1); }
    const char* address(Operand operand) const { return static_cast<const char*>(task.data[operand]); }
    // All operands have the weight's dimensions.
    Dims sizes(int operand) const { return Dims(shape).subspan(operand * (2 + 2 * shape[1]) + 2, shape[1]); }
    Dims strides(int operand) const {
      return Dims(shape).subspan(operand * (2 + 2 * shape[1]) + 2 + shape[1], shape[1]);
    }
  };

  void bind_rows(Entry& entry, const TensorOperands& operands, const RowIndex& index);
  void note_weights();
  static bool has_the_same_walk(const Entry& entry);
  void check_grad_apart(size_t i) const;

  int slots_, device_;
  bool masters_;
  bool stale_ = true;
  bool weights_moved_ = true;
  uint64_t operands_version_ = 1, grads_version_ = 1;
  int64_t wave_bytes_ = 0;
  std::vector<Entry> entries_;
  std::vector<Format> formats_;  // apart from the entries: every step looks at all of them
  std::vector<Chunk> chunks_;
  std::vector<int64_t> first_chunks_;
  std::vector<Wave> waves_;
  std::vector<int64_t> cost_, wave_cost_, single_cost_;
  Extents weight_extents_;                   // of those that have elements
  std::vector<uint32_t> by_weight_address_;  // in the same order
  std::vector<Plan*> shared_with_;           // the plans among which shared gradients were last looked for
};

}  // namespace fusedstep
