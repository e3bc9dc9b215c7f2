// Operands as a plan has bound them, laid out to be compared with those of the next step in one pass: nearly
// always they are the same, and thousands of them lie in no cache.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "fusedstep/vocabulary.h"
#include "src/tensor_view.h"

namespace fusedstep {

// Where torch had what a step asks of a tensor, for it to be in the cache when it is asked again. Whether it
// still is there is no matter.
class Place {
 public:
  Place() = default;
  explicit Place(const TensorView& tensor) : sizes_(address(tensor.sizes.data())) {
    // Up to five sizes, with the strides behind room for five, lie in the tensor itself. Before them it has
    // the addresses of its storage and of what autograd knows of it.
    constexpr size_t kMostInside = 5;
    if (address(tensor.strides.data()) - sizes_ != kMostInside * sizeof(int64_t)) return;
    std::array<uintptr_t, kWordsBefore> words;
    std::memcpy(words.data(), tensor.sizes.data() - kWordsBefore, sizeof(words));
    size_t found = 0;
    for (const uintptr_t word : words) {
      if (found < others_.size() && looks_like_an_address(word)) others_[found++] = word;
    }
  }

  bool is_of(const TensorView& tensor) const { return sizes_ == address(tensor.sizes.data()); }

  // Inlined by all means: a compiler that does not takes a function that only prefetches for one without
  // effect, and drops its calls.
  FUSEDSTEP_FN void prefetch() const {
    for (int line = -1; line <= 2; ++line) prefetch_line(sizes_ + kLine * line);
    // Little is known of their sizes: what starts there has a line or two.
    for (const uintptr_t other : others_) {
      prefetch_line(other);
      prefetch_line(other + kLine - sizeof(other));
    }
  }

 private:
  static constexpr int kLine = 64;  // bytes
  static constexpr size_t kWordsBefore = kLine / sizeof(int64_t);

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
    if (!pairs_[i].grad_place.is_of(grad)) pairs_[i].grad_place = Place(grad);
    pairs_[i].grad_held_by = held_by;
  }
  FUSEDSTEP_FN void prefetch(size_t i) const {
    if (i >= pairs_.size()) return;
    pairs_[i].weight_place.prefetch();
    pairs_[i].grad_place.prefetch();
    __builtin_prefetch(pairs_[i].grad_held_by);
  }

 private:
  struct Pair {
    const void *weight, *grad;
    Place weight_place, grad_place;
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
