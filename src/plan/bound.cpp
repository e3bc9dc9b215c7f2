#include "src/plan/bound.h"

#include <limits>

namespace fusedstep {

void Bound::note(std::span<const TensorView> weights, std::span<const TensorView> grads) {
  pairs_.clear();
  shapes_.clear();
  for (size_t i = 0; i < weights.size(); ++i) {
    const TensorView &weight = weights[i], &grad = grads[i];
    // Lists that are too large for it are bound at length at every step.
    if (shapes_.size() > std::numeric_limits<uint32_t>::max() ||
        weight.sizes.size() > std::numeric_limits<uint16_t>::max()) {
      pairs_.clear();
      return;
    }
    const auto shape = static_cast<uint32_t>(shapes_.size());
    for (const Dims& dims : {weight.sizes, weight.strides, grad.strides}) {
      shapes_.insert(shapes_.end(), dims.begin(), dims.end());
    }
    // Last, since tensors() counts the pairs.
    pairs_.push_back({weight.data, grad.data, TensorAddresses(weight, words_in_front_),
                      TensorAddresses(grad, words_in_front_), nullptr, shape,
                      static_cast<uint16_t>(weight.sizes.size()), weight.dtype});
    device_ = weight.device;
  }
}

}  // namespace fusedstep
