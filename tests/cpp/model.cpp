#include "tests/cpp/model.h"

#include <algorithm>
#include <utility>

#include "fusedstep/isa.h"
#include "src/core/reduction.h"

namespace fusedstep::test {

Tensor::Tensor(const Case& test_case, const Sizes& sizes, const Forms& forms, uint64_t seed, int64_t margin)
    : weight(test_case.dtype, sizes, forms.weight, margin), grad(test_case.dtype, sizes, forms.grad, margin) {
  for (int k = 0; k < test_case.states(); ++k) {
    states.emplace_back(test_case.dtype_of_state(k), sizes, forms.states[k % forms.states.size()], margin);
    states.back().clear();
  }
  weight.fill(seed);
}

TensorOperands Tensor::operands() {
  TensorOperands operands{weight.view(), grad.view(), {}};
  for (size_t k = 0; k < states.size(); ++k) operands.states[k] = states[k].view();
  return operands;
}

bool Tensor::fill_untouched() const {
  return weight.fill_untouched() && grad.fill_untouched() &&
         std::ranges::all_of(states, [](const Operand& state) { return state.fill_untouched(); });
}

std::vector<Tensor> dense_tensors(const Case& test_case, const Sizes& sizes) {
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < sizes.size(); ++i) {
    tensors.emplace_back(test_case, Sizes{sizes[i]}, Forms::all(dense({sizes[i]})), /*seed=*/i);
  }
  return tensors;
}

std::vector<Tensor> tensors_beyond_squares(const Case& test_case) {
  constexpr int64_t kCount = 3 * kSegmentElements + 7;
  const double huge = test_case.dtype == DType::kHalf ? 1e3 : 1e25;
  std::vector<Tensor> tensors = dense_tensors(test_case, {kCount, kCount});
  for (int64_t i = 0; i < kCount; ++i) {
    const bool others = i < kSegmentElements;
    tensors[0].weight.set(i, others ? 1.0 + i : huge * (i % 5 - 2.0));
    tensors[1].weight.set(i, others ? 0.0 : (i % 5 - 2.0) / huge);
  }
  return tensors;
}

Model::Model(const Case& test_case, std::vector<Tensor> tensors)
    : rule_(test_case.rule), tensors_(std::move(tensors)), plan_(test_case.plan(tensors_.size())) {}

void Model::step(const StepOptions& options) { step(count_ + 1, options); }

void Model::step(double count, const StepOptions& options) {
  count_ = count;
  for (size_t i = 0; i < tensors_.size(); ++i) plan_.bind(i, tensors_[i].operands());
  run_step(plan_, rule_.bound, std::vector<double>(tensors_.size(), count), options);
}

void Model::fill_grads(uint64_t seed) {
  for (size_t i = 0; i < tensors_.size(); ++i) tensors_[i].grad.fill(1000 * seed + i);
}

ForcedIsa::ForcedIsa(const std::string& name) { force_isa(name); }
ForcedIsa::~ForcedIsa() { force_isa(""); }

}  // namespace fusedstep::test
