#include "src/ops/negative_bit.h"

#include <bit>
#include <exception>
#include <utility>
#include <vector>

#include "src/ops/trial_tensors.h"

namespace fusedstep::ops {
namespace {

// The words behind the sizes and strides that are looked at: what a tensor has there is shorter.
constexpr ptrdiff_t kMostWords = 24;

uint64_t word_of(const Tensor& tensor, ptrdiff_t word) {
  uint64_t found = 0;
  std::memcpy(&found, sizes_of(tensor) + word, sizeof(found));
  return found;
}

}  // namespace

NegativeBit NegativeBit::find() {
  NegativeBit found;
  try {
    std::vector<std::pair<Tensor, Tensor>> pairs;
    for (const Tensor& tensor : trial_tensors()) {
      pairs.emplace_back(tensor, call("aten::_neg_view", "", tensor));
    }
    // The first word that differs is the last that is read, so that nothing behind the tensor is.
    for (ptrdiff_t word = 2 * ptrdiff_t{kMostSizesInTensor}; word < kMostWords && found.mask_ == 0; ++word) {
      uint64_t differ = 0;
      for (const auto& [tensor, negated] : pairs) differ |= word_of(tensor, word) ^ word_of(negated, word);
      found.word_ = word;
      found.mask_ = differ;
    }
    for (const auto& [tensor, negated] : pairs) {
      const bool tells = (word_of(tensor, found.word_) & found.mask_) == 0 &&
                         (word_of(negated, found.word_) & found.mask_) == found.mask_;
      if (!tells || !std::has_single_bit(found.mask_)) return {};
    }
  } catch (const std::exception&) {
    return {};
  }
  return found;
}

const NegativeBit negative_bit = NegativeBit::find();

}  // namespace fusedstep::ops
