// projected_step: the step of a rule on the projection of a gradient, in the epilogue of the product.
#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "src/ops/native_plan.h"
#include "src/ops/rules.h"
#include "src/run/backend.h"

namespace fusedstep::ops {
namespace {

constexpr int64_t kWordBytes = 16;

float* checked(const Tensor& tensor, const char* what, int device, std::initializer_list<int64_t> sizes) {
  const TensorView known = view(tensor, what);
  check(known.dtype == DType::kFloat && known.device == device,
        std::string(what) + " must be float32, on the device of the gradient");
  check(std::equal(known.sizes.begin(), known.sizes.end(), sizes.begin(), sizes.end()) &&
            is_in_order(known.sizes, known.strides),
        std::string(what) + " must be contiguous, of the shape that follows from the gradient and the rank");
  return static_cast<float*>(known.data);
}

bool is_in_words(const void* data) { return reinterpret_cast<uintptr_t>(data) % kWordBytes == 0; }

void step_projected(int64_t rule, const std::vector<double>& options, double step, const Tensor& grad,
                    const Tensor& basis, const Tensors& states, const Tensor& update, bool from_left,
                    double grad_factor) {
  const Rule& known = rule_at(rule);
  check(options.size() == known.options.size(), "an option is missing, or there is one too many");
  const BoundRule bound = known.bind(options);
  check(bound.make_step == nullptr, "a rule over rows has no projected gradients");
  check(states.size() == static_cast<size_t>(bound.states), "there must be as many states as the rule has");
  const TensorView gradient = view(grad, "the gradient"), projection = view(basis, "the basis");
  check(gradient.sizes.size() == 2 && gradient.dtype == DType::kFloat && gradient.strides[1] == 1,
        "the gradient must be a float32 matrix whose rows are contiguous");
  check(projection.sizes.size() == 3 && (projection.sizes[0] == 1 || projection.sizes[0] == 2),
        "the basis must be [1, rank, side], or [2, rank, side] for float32's accuracy");
  const int64_t rows = gradient.sizes[0], columns = gradient.sizes[1], rank = projection.sizes[1];
  ProjectedTensor tensor{};
  tensor.from_left = from_left;
  tensor.in_two = projection.sizes[0] == 2;
  tensor.rank = rank;
  tensor.along = from_left ? columns : rows;
  tensor.contracted = from_left ? rows : columns;
  check(rows > 0 && columns > 0 && rank > 0 &&
            std::max({rows, columns, rank}) <= std::numeric_limits<int>::max() / 2,
        "a side or the rank is out of range");
  const int device = gradient.device;
  tensor.grad = static_cast<float*>(gradient.data);
  tensor.grad_stride = gradient.strides[0];
  tensor.basis = checked(basis, "the basis", device, {projection.sizes[0], rank, tensor.contracted});
  const int64_t first = from_left ? rank : rows, second = from_left ? columns : rank;
  tensor.update = checked(update, "the update", device, {first, second});
  for (size_t i = 0; i < states.size(); ++i) {
    tensor.states[i] = checked(states[i], "a state", device, {first, second});
  }
  constexpr int64_t kInWord = kWordBytes / static_cast<int64_t>(sizeof(float));
  check(is_in_words(tensor.grad) && is_in_words(tensor.basis) && tensor.grad_stride % kInWord == 0 &&
            tensor.contracted % kInWord == 0 && columns % kInWord == 0,
        "the gradient and the basis must be aligned to 16 bytes, and sides be multiples of 4");
  tensor.grad_factor = static_cast<float>(grad_factor);
  projected_step(device, bound, step, tensor);
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def(
      "projected_step(int rule, float[] options, float step, Tensor grad, Tensor basis, "
      "Tensor(a!)[] states, Tensor(b!) update, bool from_left, float grad_factor) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CUDA, m) { m.impl("projected_step", TORCH_BOX(&step_projected)); }

}  // namespace
}  // namespace fusedstep::ops
