// The plan of a step over a fixed list of tensors: the addresses and layouts of their operands, the chunks
// that threads take, and the waves of large tensors that go through the cache together. It is made when
// something moves, and reused otherwise.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "fusedstep/isa.h"
#include "src/core/task.h"
#include "src/plan/extents.h"
#include "src/plan/layout.h"
#include "src/plan/overlap.h"
#include "src/plan/rows.h"
#include "src/plan/tensor_view.h"
#include "src/run/load_balance.h"

namespace fusedstep {

// Tensors of several chunks whose operands fit in the cache together: chunks [first, last). Tensors with one
// chunk may lie between them, and are not in the wave.
struct Wave {
  int64_t first, last;
};

// Memory that is kept from step to step.
struct KeptBytes {
  std::unique_ptr<std::byte[]> memory;
  size_t bytes = 0;
};

// The memory that steps over a plan use, and what they leave in it for the next.
struct StepMemory {
  KeptBytes scratch;                       // of a step with factored moments
  std::vector<double> partial_norms;       // [chunks][2], scratch of a step with norms
  std::vector<double> ratios;              // [tensors], of a step with norms
  LoadBalance step_balance, norm_balance;  // of the threads in steps, and in sums over gradients
  const char* ran_on = "";                 // the instruction set that ran the last step
};

class Plan {
 public:
  // `slots` states for each of `tensors` tensors, all on one device. With `masters` the last one is a master
  // copy of the weight (see Mastered), or what the weight keeps beside itself (see WeightCode).
  Plan(size_t tensors, int slots, int device = kHost, bool masters = false);

  size_t tensors() const { return entries_.size(); }
  int slots() const { return slots_; }
  // Sets the roles of the states. Call it before the first tensor is bound. A plan may lack the last states
  // of a rule. Without roles all states are kElement. Throws std::runtime_error if there are more slots than
  // roles.
  void use_roles(std::span<const Role> roles);
  std::span<const Role> roles() const { return roles_; }
  bool has_masters() const { return masters_; }
  // Makes the plan round its weights, of bfloat16, at random. The numbers follow from the seed, the step
  // count of each tensor and its place.
  void round_at_random(uint64_t seed, std::vector<int64_t> places);
  bool rounds_at_random() const { return !places_.empty(); }
  uint64_t seed() const { return seed_; }
  // The place of tensor i among an optimizer's weights.
  uint64_t place(size_t i) const { return static_cast<uint64_t>(places_[i]); }
  // The key of tensor i's random numbers at a step.
  uint64_t draws(size_t i, double step) const;
  int device() const { return device_; }

  // Sets the operands of tensor i. This is cheap if only addresses differ from the last time. Throws
  // std::runtime_error, naming the operand, if they cannot be updated together; the plan then still describes
  // the operands from before. Entries of a sparse gradient are sorted on up to `threads` threads.
  void bind(size_t i, const TensorOperands& operands, int threads = 1);
  // Tells which states a rule keeps from being negative, a bit each: their codes need no sign.
  FUSEDSTEP_API void use_signs(uint32_t not_negative);
  // The memory of a state of tensor i that has another role than kElement.
  void* numbers_of(size_t i, int slot) const { return numbers_[i][slot]; }
  // Sets the address of a dense gradient, the rest of which is as it was bound.
  void move_grad(size_t i, void* data);
  // Throws std::runtime_error, naming them, if two weights share an element, or if a gradient shares one with
  // a weight. A gradient may be its own weight, element by element. Call it when all tensors are bound.
  void check_weights_apart();
  // Returns whether gradient i, once it is at `data`, meets no weight. False if check_weights_apart() has to
  // decide.
  bool grad_is_apart(size_t i, const void* data) const {
    const char* const begin = static_cast<const char*>(data);
    return !weight_extents_.meet(begin, begin + facts_[i].grad_bytes);
  }

  // Brings chunks and waves up to date with what was bound. A wave has up to `wave_bytes` of operands, those
  // that the team's second-level caches hold: if they hold all operands, prefetches are near or none.
  FUSEDSTEP_API void refresh(int64_t wave_bytes);

  Format format(size_t i) const { return facts_[i].format; }
  TensorTask& task(size_t i) { return tasks_[i]; }
  const TensorTask& task(size_t i) const { return tasks_[i]; }
  bool empty(size_t i) const { return entries_[i].units() == 0; }
  // The rows of a sparse gradient on the host. Null for a dense gradient, and on a device.
  SparseRows* rows(size_t i) {
    std::optional<SparseRows>& rows = entries_[i].rows;
    return rows ? &*rows : nullptr;
  }
  // The rows that the entries of a sparse gradient are for; null for a dense gradient.
  const RowIndex* row_index(size_t i) const {
    const std::optional<RowIndex>& index = entries_[i].index;
    return index ? &*index : nullptr;
  }
  // The units of a tensor's walk that are one row, and the elements in it. `task` has the layout of one row.
  int64_t units_of_row(size_t i) const { return entries_[i].layout->units(); }
  FUSEDSTEP_API int64_t elements_of_row(size_t i) const;
  // The sizes of the dimensions that count rows, and an operand's strides there.
  Dims row_sizes(size_t i) const { return sizes(i).first(row_index(i)->dims); }
  Dims row_strides(size_t i, int operand) const { return strides(i, operand).first(row_index(i)->dims); }
  // The weight's sizes, and an operand's strides.
  Dims sizes(size_t i) const { return entries_[i].sizes(kWeight); }
  Dims strides(size_t i, int operand) const { return entries_[i].strides(operand); }
  // Throws std::runtime_error: tensor i has no row at this index.
  [[noreturn]] FUSEDSTEP_API void refuse_row(size_t i, int dim, int64_t at) const;
  // Returns whether gradient i may be written: it is dense, no two of its elements share memory, and it meets
  // no other gradient and no weight of the step. find_aliasing_grads() decides that.
  bool grad_is_writable(size_t i) const { return facts_[i].grad_is_writable; }
  // Returns whether it can hold the update between the phases of a step, in the precision of the maths.
  FUSEDSTEP_API bool grad_can_store(size_t i) const;
  // Looks for gradients that alias another operand of a step over all these plans. Cheap if nothing has moved
  // since the last time.
  FUSEDSTEP_API static void find_aliasing_grads(std::span<Plan* const> plans);
  // Returns whether that has been done since an operand moved.
  bool aliasing_is_known() const { return !stepped_with_.empty(); }

  const std::vector<Chunk>& chunks() const { return chunks_; }
  // Tensor i has chunks [first_chunk(i), first_chunk(i + 1)).
  int64_t first_chunk(size_t i) const { return first_chunks_[i]; }
  bool has_one_chunk(size_t i) const { return first_chunk(i + 1) - first_chunk(i) == 1; }
  // Calls run(task, begin, end) for a chunk: once, or for each row that it has a part of.
  template <class Run>
  void run_parts(const Chunk& chunk, Run run) const {
    const TensorTask& task = tasks_[chunk.tensor];
    const SparseRows* const rows = facts_[chunk.tensor].rows;
    if (rows == nullptr) return run(task, chunk.begin, chunk.end);
    const int64_t per_row = units_of_row(chunk.tensor);
    for (int64_t begin = chunk.begin, end; begin < chunk.end; begin = end) {
      const int64_t row = begin / per_row, first = row * per_row;
      end = std::min(chunk.end, first + per_row);
      run(rows->task(task, row), begin - first, end - first);
    }
  }

  const std::vector<Wave>& waves() const { return waves_; }
  // cost()[c] is the number of elements in the chunks before chunk c. wave_cost() counts only those in
  // tensors that are in waves, single_cost() those in tensors of one chunk.
  const std::vector<int64_t>& cost() const { return cost_; }
  const std::vector<int64_t>& wave_cost() const { return wave_cost_; }
  const std::vector<int64_t>& single_cost() const { return single_cost_; }

  // Versions for copies of the plan, such as CUDA's tables. operands_version() changes with the address or
  // layout of a weight or a state and with the chunks, grads_version() with a gradient. They start at 1: a
  // holder of no copy has version 0.
  uint64_t operands_version() const { return operands_version_; }
  uint64_t grads_version() const { return grads_version_; }

  StepMemory& memory() { return memory_; }

 private:
  struct Entry {
    std::array<CodedState, kMaxStates> coded{};
    std::unique_ptr<Layout> layout;  // of one row if the gradient is sparse
    std::optional<RowIndex> index;
    std::optional<SparseRows> rows;
    std::vector<int64_t> shape;  // dtypes, sizes and strides that the layout was made from
    int64_t weight_bytes = 0;    // from first to last byte
    bool grad_overlaps = false;

    int64_t units() const { return layout->units() * (rows ? rows->count() : index ? index->entries : 1); }
    // All operands have the weight's dimensions.
    Dims sizes(int operand) const { return Dims(shape).subspan(operand * (2 + 2 * shape[1]) + 2, shape[1]); }
    Dims strides(int operand) const {
      return Dims(shape).subspan(operand * (2 + 2 * shape[1]) + 2 + shape[1], shape[1]);
    }
  };
  // Facts that every step reads of a tensor, beside its task.
  struct Facts {
    int64_t grad_bytes = 0;            // from first to last byte
    const SparseRows* rows = nullptr;  // of a sparse gradient on the host
    Format format{};
    bool grad_is_writable = false;
  };

  const char* address(size_t i, Operand operand) const {
    return static_cast<const char*>(tasks_[i].data[operand]);
  }
  // The elements of a weight, or of a dense gradient.
  Elements elements(size_t i, Operand operand) const {
    const char* const begin = address(i, operand);
    return {begin, begin + (operand == kGrad ? facts_[i].grad_bytes : entries_[i].weight_bytes),
            tasks_[i].element_size[operand], sizes(i), strides(i, operand)};
  }

  void bind_elements(size_t i, const TensorOperands& operands, int threads);
  void bind_rows(size_t i, const TensorOperands& operands, const RowIndex& index, int threads);
  void note_weights();
  static bool has_the_same_walk(const Entry& entry);
  void check_grad_apart(size_t i) const;

  int slots_, device_;
  int walked_;  // the number of states with the role kElement, which `tasks_` have
  bool masters_;
  std::vector<Role> roles_;                             // of each slot; empty: all are kElement
  std::vector<std::array<void*, kMaxStates>> numbers_;  // of each tensor, its states of other roles
  uint64_t seed_ = 0;
  std::vector<int64_t> places_;  // empty: weights are rounded to nearest
  uint32_t not_negative_ = 0;
  bool stale_ = true;
  bool weights_moved_ = true;
  uint64_t operands_version_ = 1, grads_version_ = 1;
  int64_t wave_bytes_ = 0;
  std::vector<Entry> entries_;
  // Apart from the entries, since every step reads all of them.
  std::vector<TensorTask> tasks_;
  std::vector<Facts> facts_;
  std::vector<Chunk> chunks_;
  std::vector<int64_t> first_chunks_;
  std::vector<Wave> waves_;
  std::vector<int64_t> cost_, wave_cost_, single_cost_;
  Extents weight_extents_;                   // of the weights that have elements
  std::vector<uint32_t> by_weight_address_;  // their tensors, in the same order
  std::vector<Plan*> stepped_with_;  // the plans that find_aliasing_grads() last had; empty: it has to look
  StepMemory memory_;
};

}  // namespace fusedstep
