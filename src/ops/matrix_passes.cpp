// average_into, decay_and_add: the passes around the matrix products of a step, for tensors whose elements
// lie in one order.
#include <algorithm>
#include <string>
#include <vector>

#include "src/ops/native_plan.h"
#include "src/run/backend.h"

namespace fusedstep::ops {
namespace {

PassFormat format_of(DType stored, DType product) {
  switch (stored) {
    case DType::kFloat:
      if (product == DType::kBFloat16) return PassFormat::kFloatBFloat16;
      if (product == stored) return PassFormat::kFloat;
      break;
    case DType::kDouble:
      if (product == stored) return PassFormat::kDouble;
      break;
    case DType::kBFloat16:
      if (product == stored) return PassFormat::kBFloat16;
      break;
    case DType::kHalf:
      if (product == stored) return PassFormat::kHalf;
      break;
    default:
      break;
  }
  throw std::runtime_error(std::string("no pass takes ") + name_of(stored) + " with " + name_of(product));
}

// The operands of a list, all alike.
class Operands {
 public:
  Operands(const Tensors& tensors, const char* what, const TensorView& like)
      : what_(what), dtype_(tensors.empty() ? like.dtype : view(tensors[0], what).dtype) {
    for (const Tensor& tensor : tensors) {
      const TensorView found = view(tensor, what);
      check(found.device == like.device && found.dtype == dtype_ && is_in_order(found.sizes, found.strides),
            std::string(what) + " must be contiguous, of one dtype, on the device of the others");
      data_.push_back(found.data);
      counts_.push_back(elements_of(found.sizes));
    }
  }
  DType dtype() const { return dtype_; }
  void* data(size_t i) const { return data_[i]; }
  const std::vector<int64_t>& counts() const { return counts_; }
  void check_is_of(const Operands& other) const {
    check(counts_ == other.counts_, std::string(what_) + " must have as many elements as the others");
  }

 private:
  const char* what_;
  DType dtype_;
  std::vector<void*> data_;
  std::vector<int64_t> counts_;
};

void average_into(const Tensors& averages, const Tensors& grads, const Tensors& updates, double share,
                  double lead, bool leads) {
  if (averages.empty()) return;
  const TensorView first = view(averages[0], "the average");
  const Operands average(averages, "the average", first), grad(grads, "the gradient", first),
      update(updates, "the update", first);
  grad.check_is_of(average);
  update.check_is_of(average);
  check(grad.dtype() == average.dtype(), "gradients and averages must have one dtype");
  std::vector<PassTensor> tensors;
  for (size_t i = 0; i < averages.size(); ++i) {
    tensors.push_back({average.data(i), grad.data(i), update.data(i), average.counts()[i], 0});
  }
  average_pass(first.device, format_of(average.dtype(), update.dtype()), tensors, {share, lead, leads});
}

void decay_and_add(const Tensors& weights, const Tensors& directions, double keep,
                   const std::vector<double>& factors) {
  if (weights.empty()) return;
  check(factors.size() == weights.size(), "there must be a factor for each weight");
  const TensorView first = view(weights[0], "the weight");
  const Operands weight(weights, "the weight", first), direction(directions, "the direction", first);
  direction.check_is_of(weight);
  std::vector<PassTensor> tensors;
  for (size_t i = 0; i < weights.size(); ++i) {
    tensors.push_back({weight.data(i), nullptr, direction.data(i), weight.counts()[i], factors[i]});
  }
  move_pass(first.device, format_of(weight.dtype(), direction.dtype()), tensors, keep);
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def(
      "average_into(Tensor(a!)[] averages, Tensor[] grads, Tensor(b!)[] updates, float share, float lead, "
      "bool leads) -> ()");
  m.def("decay_and_add(Tensor(a!)[] weights, Tensor[] directions, float keep, float[] factors) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CUDA, m) {
  m.impl("average_into", TORCH_BOX(&average_into));
  m.impl("decay_and_add", TORCH_BOX(&decay_and_add));
}

}  // namespace
}  // namespace fusedstep::ops
