#include "src/ops/negative_bit.h"

#include <exception>
#include <vector>

#include "src/ops/trial_tensors.h"

namespace fusedstep::ops {

NegativeBit NegativeBit::find() try {
  std::vector<Tensor> tensors;  // that live until all are looked at, so that each is somewhere else
  std::vector<Trial> trials;
  for (const Tensor& tensor : trial_tensors()) {
    const Tensor negated = call("aten::_neg_view", "", tensor), twice = call("aten::_neg_view", "", negated);
    trials.push_back({sizes_of(tensor), sizes_of(negated), sizes_of(twice)});
    tensors.insert(tensors.end(), {tensor, negated, twice});
  }
  return among(trials);
} catch (const std::exception&) {
  return {};
}

const NegativeBit negative_bit = NegativeBit::find();

}  // namespace fusedstep::ops
