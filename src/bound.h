// Operands as a plan has bound them, laid out to be compared with those of the next step in one pass: nearly
// always they are the same, and thousands of them lie in no cache.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "src/plan.h"

namespace fusedstep {

// Asks for the memory in which torch had a tensor, by the address that its sizes had. Whether it is still
// there is no matter.
inline void prefetch_tensor(uintptr_t sizes) {
  for (int line = -1; line <= 2; ++line) __builtin_prefetch(reinterpret_cast<const void*>(sizes + 64 * line));
}
inline uintptr_t address_of_sizes(const TensorView& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.sizes.data());
}

class Bound {
 public:
  enum class Change : uint8_t { kSame, kGradMoved, kOther };

  size_t tensors() const { return pairs_.size(); }
  void clear() { pairs_.clear(); }
  void note(std::span<const TensorView> weights, std::span<const TensorView> grads);

  // What has become of tensor i's weight and gradient. kGradMoved: nothing differs but the gradient's
  // address.
  Change compare(size_t i, const TensorView& weight, const TensorView& grad) const {
    const Pair& known = pairs_[i];
    const int64_t* const shape = shapes_.data() + known.shape;
    const auto matches = [&](const TensorView& view, size_t strides) {
      if (view.dtype != known.dtype || view.device != device_ || view.sizes.size() != known.dims)
        return false;
      bool same = true;  // by hand: most have two dimensions, and std::equal calls memcmp
      for (size_t d = 0; d < known.dims; ++d) {
        same &= view.sizes[d] == shape[d] && view.strides[d] == shape[strides + d];
      }
      return same;
    };
    if (weight.data != known.weight || !matches(weight, known.dims)) return Change::kOther;
    if (!matches(grad, 2 * size_t{known.dims})) return Change::kOther;
    return grad.data == known.grad ? Change::kSame : Change::kGradMoved;
  }
  void move_grad(size_t i, void* data) { pairs_[i].grad = data; }

  // Where tensor i's gradient is now, and what the caller holds it by: what prefetch() goes by.
  void note_places(size_t i, const TensorView& grad, const void* held_by) {
    pairs_[i].grad_sizes = address_of_sizes(grad);
    pairs_[i].grad_held_by = held_by;
  }
  void prefetch(size_t i) const {
    if (i >= pairs_.size()) return;
    prefetch_tensor(pairs_[i].weight_sizes);
    prefetch_tensor(pairs_[i].grad_sizes);
    __builtin_prefetch(pairs_[i].grad_held_by);
  }

 private:
  struct Pair {
    const void *weight, *grad;
    uintptr_t weight_sizes, grad_sizes;  // where their sizes were
    const void* grad_held_by;
    uint32_t shape;  // in shapes_: sizes, strides of the weight, strides of the gradient
    uint16_t dims;
    DType dtype;
  };

  std::vector<Pair> pairs_;
  std::vector<int64_t> shapes_;
  int device_ = kHost;
};

}  // namespace fusedstep
