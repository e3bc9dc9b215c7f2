// plan_bind_sparse: plan_bind for gradients of which some are in torch's sparse COO format.
#include <optional>
#include <vector>

#include "src/ops/direct.h"
#include "src/ops/native_plan.h"

namespace fusedstep::ops {
namespace {

bool is_sparse(const Tensor& tensor) {
  int32_t layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  return layout == aoti_torch_layout_sparse_coo();
}

Tensor sorting(const Tensor& numbers) {
  constexpr bool kStable = true, kDescending = false;
  return call("aten::argsort", "stable", numbers, kStable, int64_t{0}, kDescending);
}

// The entries of an index in an order in which those for one row follow one another, as they did before: from
// the last dimension to the first.
Tensor order_of(const Tensor& index) {
  int64_t dim = index.size(0) - 1;
  Tensor order = sorting(torch::stable::select(index, 0, dim));
  while (--dim >= 0) {
    const Tensor rows =
        call("aten::index_select", "", torch::stable::select(index, 0, dim), int64_t{0}, order);
    order = call("aten::index_select", "", order, int64_t{0}, sorting(rows));
  }
  return order;
}

// A sparse gradient as the engine sees it (see TensorOperands).
class SparseGrad {
 public:
  explicit SparseGrad(const Tensor& grad)
      : grad_(grad),
        indices_(call("aten::_indices", "", grad)),
        entries_(call("aten::contiguous", "", call("aten::resolve_neg", "", call("aten::_values", "", grad)),
                      torch::headeronly::MemoryFormat::Contiguous)),
        strides_(indices_.size(0), 0) {
    const auto is_coalesced = [&] { return call<bool>("aten::is_coalesced", "", grad); };
    if (grad.is_cuda() && indices_.size(0) > 0 && !is_coalesced()) order_ = order_of(indices_);
    for (int64_t dim = 1; dim < entries_.dim(); ++dim) strides_.push_back(entries_.stride(dim));
  }

  // The first entry, expanded over the weight.
  TensorView view() const {
    int64_t* sizes = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(grad_.get(), &sizes));
    const TensorView entries = ops::view(entries_, "gradient");
    return {entries.data, entries.dtype, {sizes, strides_.size()}, strides_, entries.device};
  }
  RowIndex rows() const {
    return {.data = static_cast<const int64_t*>(indices_.data_ptr()),
            .dims = static_cast<int>(indices_.size(0)),
            .entries = indices_.size(1),
            .dim_stride = indices_.stride(0),
            .entry_stride = indices_.stride(1),
            .order = order_ ? static_cast<const int64_t*>(order_->data_ptr()) : nullptr};
  }
  // Adds to `parts` the tensors that the views point into.
  void hold(Tensors& parts) const {
    parts.insert(parts.end(), {indices_, entries_});
    if (order_) parts.push_back(*order_);
  }

 private:
  Tensor grad_, indices_, entries_;
  std::optional<Tensor> order_;
  std::vector<int64_t> strides_;
};

// Returns the number of sparse gradients; -1, with nothing noted, if a weight is not on the plan's device.
int64_t plan_bind_sparse(int64_t handle, const Tensors& weights, const Tensors& grads) {
  std::vector<SparseGrad> sparse;
  sparse.reserve(grads.size());  // views point into its elements
  std::vector<TensorView> weight_views, grad_views;
  std::vector<std::optional<RowIndex>> rows(grads.size());
  Tensors parts;
  for (const Tensor& weight : weights) weight_views.push_back(view(weight, "weight"));
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!is_sparse(grads[i])) {
      grad_views.push_back(view(grads[i], "gradient"));
      continue;
    }
    const SparseGrad& grad = sparse.emplace_back(grads[i]);
    grad_views.push_back(grad.view());
    rows[i] = grad.rows();
    grad.hold(parts);
  }
  if (!bind_plan(handle, weight_views, grad_views, rows)) return -1;
  find_plan(handle)->parts = std::move(parts);
  return static_cast<int64_t>(sparse.size());
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def("plan_bind_sparse(int plan, Tensor[] weights, Tensor[] grads) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) { m.impl("plan_bind_sparse", TORCH_BOX(&plan_bind_sparse)); }
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CUDA, m) { m.impl("plan_bind_sparse", TORCH_BOX(&plan_bind_sparse)); }
// The dispatcher comes here where a tensor is sparse; plan_bind has no such kernel, and refuses it. The last
// two are for tensors that the dispatcher would make temporaries of otherwise, which do not live until the
// step: view() refuses them.
STABLE_TORCH_LIBRARY_IMPL(fusedstep, SparseCPU, m) {
  m.impl("plan_bind_sparse", TORCH_BOX(&plan_bind_sparse));
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, SparseCUDA, m) {
  m.impl("plan_bind_sparse", TORCH_BOX(&plan_bind_sparse));
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, Negative, m) {
  m.impl("plan_bind_sparse", TORCH_BOX(&plan_bind_sparse));
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, ZeroTensor, m) {
  m.impl("plan_bind_sparse", TORCH_BOX(&plan_bind_sparse));
}

}  // namespace
}  // namespace fusedstep::ops
