// Tensors as the caller holds them.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "src/core/operands.h"
#include "src/core/walk.h"
#include "src/plan/layout.h"

namespace fusedstep {

// kInt16 is that of the lower bits of a weight, the last two are those of codes.
enum class DType : uint8_t { kFloat, kDouble, kBFloat16, kHalf, kInt16, kUInt8, kFloat8 };

int element_size(DType dtype);
const char* name_of(DType dtype);

// The index of a CUDA device, or the host's memory.
constexpr int kHost = -1;

// A tensor, borrowed for the call. Strides are in elements.
struct TensorView {
  void* data;
  DType dtype;
  Dims sizes, strides;
  int device = kHost;
  float* absmax = nullptr;  // of codes: each block's
  int64_t blocks = 0;       // as many as there are

  bool has_codes() const { return dtype == DType::kUInt8 || dtype == DType::kFloat8; }
};

// The most sizes that a torch tensor keeps in itself, with the strides behind room for so many.
constexpr size_t kMostSizesInTensor = 5;

// Returns whether these are sizes and strides that lie in a torch tensor. Two arrays from an allocator never
// lie so: they are a multiple of 16 bytes apart.
inline bool lie_in_tensor(Dims sizes, Dims strides) {
  const auto from = reinterpret_cast<uintptr_t>(sizes.data()),
             to = reinterpret_cast<uintptr_t>(strides.data());
  return to - from == kMostSizesInTensor * sizeof(int64_t);
}

// Returns the bytes from a tensor's first element to the end of its last.
int64_t span_bytes(const TensorView& view);

// Returns the strides of a tensor of these sizes by rows and columns, without a gap.
std::vector<int64_t> strides_in_order(Dims sizes);
// Returns whether a tensor's elements lie in memory by rows and columns, without a gap.
bool is_in_order(Dims sizes, Dims strides);
// Returns the number of a tensor's elements.
int64_t elements_of(Dims sizes);

// The parts of a weight that have one number each in a state.
enum class Role : uint8_t {
  kElement,  // the elements: the state has the shape of the weight
  // The states of the other roles are contiguous, and have the type of the maths.
  kIndex,   // the indices of the first dimension
  kRow,     // the rows of the matrices in the last two dimensions; none if the weight has less than two
  kColumn,  // the columns of these matrices; the elements if the weight has less than two dimensions
};

// All operands of one tensor's update. `states` has the plan's number of slots. With `rows` the gradient is
// sparse: `grad` is the first of its entries, expanded over all rows, and the others lie behind it, one by
// one.
struct TensorOperands {
  TensorView weight, grad;
  std::array<TensorView, kMaxStates> states;
  std::optional<RowIndex> rows = std::nullopt;
};

}  // namespace fusedstep
