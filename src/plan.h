// The plan of a step over a fixed list of tensors: where their operands are, how they lie, which chunks there
// are, and which run of tensors goes through the cache together. Worked out when something moves, reused
// otherwise.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu_kernels/kernel_table.h"
#include "src/layout.h"

namespace fusedstep {

enum class DType : uint8_t { kFloat, kDouble, kBFloat16, kHalf };

int element_size(DType dtype);

// A tensor as the caller holds it: borrowed for the call. Strides in elements.
struct TensorView {
  void* data;
  DType dtype;
  Dims sizes, strides;
};

// All operands of one tensor's update. `states` has the plan's number of slots.
struct TensorOperands {
  TensorView weight, grad;
  std::array<TensorView, cpu::kMaxStates> states;
};

struct Chunk {
  uint32_t tensor;
  int64_t begin, end;  // units of the tensor's layout
};

// Tensors whose operands fit in the cache together: chunks [first_chunk, last_chunk) of tensors [first,
// last).
struct Wave {
  size_t first, last;
  int64_t first_chunk, last_chunk;
};

class Plan {
 public:
  // `slots` states for each of `tensors` tensors.
  Plan(size_t tensors, int slots);

  size_t tensors() const { return entries_.size(); }
  int slots() const { return slots_; }

  // Takes note of tensor i's operands. Only addresses may differ from the last time for this to be cheap.
  // Throws std::runtime_error, naming the operand, if they cannot be updated together; the plan then still
  // describes the operands of before.
  void bind(size_t i, const TensorOperands& operands);

  // Brings chunks and waves up to date with what was bound. Waves are cut at `wave_bytes` of operands.
  void refresh(int64_t wave_bytes);

  cpu::Format format(size_t i) const { return entries_[i].format; }
  cpu::TensorTask& task(size_t i) { return entries_[i].task; }
  bool empty(size_t i) const { return entries_[i].layout->units() == 0; }
  // Whether the gradient can hold the update between the phases of a step: same precision as the maths, no
  // two elements in one place, and no other operand of the list in its memory.
  bool grad_can_store(size_t i) const { return entries_[i].grad_can_store; }
  // Computes grad_can_store for all tensors; needed only before a step that stores.
  void find_aliases();

  const std::vector<Chunk>& chunks() const { return chunks_; }
  const std::vector<Wave>& waves() const { return waves_; }
  // cost()[c] is the number of elements in the chunks before c.
  const std::vector<int64_t>& cost() const { return cost_; }

  // What a step leaves for the next or for the curious.
  std::vector<double> partial_norms;  // [chunks][2], scratch of a two-phase step
  const char* ran_on = "";            // the instruction set that ran the last step

 private:
  struct Entry {
    cpu::TensorTask task{};
    cpu::Format format{};
    std::unique_ptr<Layout> layout;
    std::vector<int64_t> shape;                // dtypes, sizes and strides that the layout was made from
    int64_t grad_bytes = 0, weight_bytes = 0;  // from first to last byte
    bool grad_overlaps = false;
    bool grad_can_store = false;
  };

  int slots_;
  bool stale_ = true;
  int64_t wave_bytes_ = 0;
  std::vector<Entry> entries_;
  std::vector<Chunk> chunks_;
  std::vector<Wave> waves_;
  std::vector<int64_t> cost_;
  std::vector<int64_t> scratch_;
  std::vector<std::array<const char*, 2>>
      addresses_;  // weight and gradient when aliases were last looked for
};

}  // namespace fusedstep
