// torch's negative bit: the memory of a tensor that has it holds its values negated.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "fusedstep/isa.h"
#include "src/tensor_view.h"

namespace fusedstep::ops {

// The place of the negative bit in a tensor. Every step asks thousands of tensors, and torch has no way to
// ask that costs less than the step; so the place is found by trial, when the library is loaded: the word
// behind a tensor's sizes by which a tensor and its negated view differ.
class NegativeBit {
 public:
  static NegativeBit find();

  // Returns the bit of the tensor that keeps these sizes and strides. Returns nothing if they lie outside of
  // the tensor, as those of more than five dimensions do, or if the trial has failed: torch has to be asked.
  std::optional<bool> of(Dims sizes, Dims strides) const {
    if (mask_ == 0 || !lie_in_tensor(sizes, strides)) return {};
    uint64_t word = 0;
    std::memcpy(&word, sizes.data() + word_, sizeof(word));
    return (word & mask_) != 0;
  }

 private:
  ptrdiff_t word_ = 0;
  uint64_t mask_ = 0;
};

FUSEDSTEP_API extern const NegativeBit negative_bit;

}  // namespace fusedstep::ops
