// torch's negative bit: the memory of a tensor that has it holds its values negated.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "fusedstep/isa.h"
#include "src/plan/tensor_view.h"

namespace fusedstep::ops {

// The place of the negative bit in a tensor. Every step asks thousands of tensors, and torch has no way to
// ask that costs less than the step; so the place is found by trial, when the library is loaded: the bit
// behind a tensor's sizes that negated views have, and neither the tensors nor the views of those views.
class NegativeBit {
 public:
  // Where the sizes of a tensor lie, those of its negated view, and those of that one's negated view.
  struct Trial {
    const int64_t *tensor, *negated, *negated_twice;
  };

  // Looks for the bit on torch's tensors.
  static NegativeBit find();

  // Looks for the bit on these. Between the members of a tensor is memory that nobody has written: what
  // differs there is not the bit. Views of views are made as views are, and where these are, so that it does
  // not differ from one kind to the other in all trials.
  static NegativeBit among(std::span<const Trial> trials) {
    NegativeBit found;
    // The word with the bit is the last that is read, so that nothing behind the tensor is.
    for (ptrdiff_t word = 2 * ptrdiff_t{kMostSizesInTensor}; word < kMostWords; ++word) {
      uint64_t in_all = trials.empty() ? 0 : ~uint64_t{0};
      for (const Trial& trial : trials) {
        in_all &= word_of(trial.negated, word) & ~word_of(trial.tensor, word);
        in_all &= ~word_of(trial.negated_twice, word);
      }
      if (!std::has_single_bit(in_all)) continue;
      found.word_ = word;
      found.mask_ = in_all;
      break;
    }
    return found;
  }

  // Returns the bit of the tensor that keeps these sizes and strides. Returns nothing if they lie outside of
  // the tensor, as those of more than five dimensions do, or if the trial has failed: torch has to be asked.
  std::optional<bool> of(Dims sizes, Dims strides) const {
    if (mask_ == 0 || !lie_in_tensor(sizes, strides)) return {};
    return (word_of(sizes.data(), word_) & mask_) != 0;
  }

 private:
  // The words from a tensor's sizes on that are looked at: the tensor has as many, or fewer.
  static constexpr ptrdiff_t kMostWords = 24;

  static uint64_t word_of(const int64_t* sizes, ptrdiff_t word) {
    uint64_t found = 0;
    std::memcpy(&found, sizes + word, sizeof(found));
    return found;
  }

  ptrdiff_t word_ = 0;
  uint64_t mask_ = 0;
};

FUSEDSTEP_API extern const NegativeBit negative_bit;

}  // namespace fusedstep::ops
