#include "src/bound.h"

#include <limits>

namespace fusedstep {

void Bound::note(std::span<const TensorView> weights, std::span<const TensorView> grads) {
  pairs_.clear();
  shapes_.clear();
  for (size_t i = 0; i < weights.size(); ++i) {
    const TensorView &weight = weights[i], &grad = grads[i];
    // What it has no room for is bound at length at every step.
    if (shapes_.size() > std::numeric_limits<uint32_t>::max() ||
        weight.sizes.size() > std::numeric_limits<uint16_t>::max()) {
      pairs_.clear();
      return;
    }
    const auto shape = static_cast<uint32_t>(shapes_.size());
    for (const Dims& dims : {weight.sizes, weight.strides, grad.strides}) {
      shapes_.insert(shapes_.end(), dims.begin(), dims.end());
    }
    // Last: a pair counts as soon as it is there.
    pairs_.push_back({weight.data, grad.data, Place(weight), Place(grad), nullptr, shape,
                      static_cast<uint16_t>(weight.sizes.size()), weight.dtype});
    device_ = weight.device;
  }
}

}  // namespace fusedstep
