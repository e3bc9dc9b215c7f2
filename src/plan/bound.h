// The operands that a plan has bound, laid out to be compared with those of the next step in one pass: nearly
// always they are the same, and thousands of them are in no cache.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "fusedstep/vocabulary.h"
#include "src/plan/tensor_view.h"

namespace fusedstep {

// Addresses that a step reads of a torch tensor, for the next step to prefetch. A stale address costs nothing
// but the prefetch.
class TensorAddresses {
 public:
  TensorAddresses() = default;
  // `words_in_front` is the number of words between the start of a tensor and its sizes, where these lie in
  // the tensor itself; 0 if that is unknown. Among these words are the addresses of the storage and of
  // autograd's data, which lie elsewhere.
  TensorAddresses(const TensorView& tensor, size_t words_in_front) : sizes_(address(tensor.sizes.data())) {
    if (!lie_in_tensor(tensor.sizes, tensor.strides)) return;
    size_t found = 0;
    // The first word is the address of the functions of a class, which all tensors share.
    for (size_t i = 1; i < words_in_front && found < others_.size(); ++i) {
      uintptr_t word = 0;
      std::memcpy(&word, tensor.sizes.data() - words_in_front + i, sizeof(word));
      if (looks_like_an_address(word)) others_[found++] = word;
    }
  }

  bool are_of(const TensorView& tensor) const { return sizes_ == address(tensor.sizes.data()); }

  // Always inlined: a compiler takes a function that only prefetches for one without effect, and drops its
  // calls.
  FUSEDSTEP_FN void prefetch() const {
    for (int line = -1; line <= 2; ++line) prefetch_line(sizes_ + kLine * line);
    // Each of the others is the start of an object of a line or two.
    for (const uintptr_t other : others_) {
      prefetch_line(other);
      prefetch_line(other + kLine - sizeof(other));
    }
  }

 private:
  static constexpr int kLine = 64;  // bytes

  static uintptr_t address(const void* at) { return reinterpret_cast<uintptr_t>(at); }
  FUSEDSTEP_FN static void prefetch_line(uintptr_t at) {
    __builtin_prefetch(reinterpret_cast<const void*>(at));
  }
  static bool looks_like_an_address(uintptr_t word) {
    return word % sizeof(word) == 0 && word >> 16 != 0 && word >> 47 == 0;
  }

  uintptr_t sizes_ = 0;
  std::array<uintptr_t, 3> others_{};
};

class Bound {
 public:
  enum class Change : uint8_t { kSame, kGradMoved, kOther };

  // `words_in_front` is that of TensorAddresses.
  explicit Bound(size_t words_in_front = 0) : words_in_front_(words_in_front) {}

  size_t tensors() const { return pairs_.size(); }
  void clear() { pairs_.clear(); }
  void note(std::span<const TensorView> weights, std::span<const TensorView> grads);

  // Compares tensor i's weight and gradient with what was bound. kGradMoved: only the gradient's address
  // differs.
  Change compare(size_t i, const TensorView& weight, const TensorView& grad) const {
    const Pair& known = pairs_[i];
    const int64_t* const shape = shapes_.data() + known.shape;
    const auto matches = [&](const TensorView& view, size_t strides) {
      if (view.dtype != known.dtype || view.device != device_ || view.sizes.size() != known.dims)
        return false;
      bool same = true;  // no std::equal, which calls memcmp: most tensors have two dimensions
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

  // Notes the addresses of tensor i's gradient and of the object by which the caller holds it, for
  // prefetch().
  void note_addresses(size_t i, const TensorView& grad, const void* held_by) {
    TensorAddresses& known = pairs_[i].grad_addresses;
    if (!known.are_of(grad)) known = TensorAddresses(grad, words_in_front_);
    pairs_[i].grad_held_by = held_by;
  }
  FUSEDSTEP_FN void prefetch(size_t i) const {
    if (i >= pairs_.size()) return;
    pairs_[i].weight_addresses.prefetch();
    pairs_[i].grad_addresses.prefetch();
    __builtin_prefetch(pairs_[i].grad_held_by);
  }

 private:
  struct Pair {
    const void *weight, *grad;
    TensorAddresses weight_addresses, grad_addresses;
    const void* grad_held_by;
    uint32_t shape;  // in shapes_: sizes, strides of the weight, strides of the gradient
    uint16_t dims;
    DType dtype;
  };

  size_t words_in_front_;
  std::vector<Pair> pairs_;
  std::vector<int64_t> shapes_;
  int device_ = kHost;
};

}  // namespace fusedstep
