// factored_step: a step of weights whose second moments are kept as those of rows and columns. factored_part:
// a part of it, where processes have parts of the weights.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "src/ops/native_plan.h"
#include "src/plan/operand_checks.h"
#include "src/plan/overlap.h"
#include "src/steps/factored.h"

namespace fusedstep::ops {
namespace {

// The options by the names that callers give them.
struct Option {
  const char* name;
  double FactoredOptions::*value;
};
constexpr std::array kOptions{
    Option{"rate", &FactoredOptions::rate},
    Option{"added", &FactoredOptions::added},
    Option{"least_mean", &FactoredOptions::least_mean},
    Option{"most", &FactoredOptions::most},
    Option{"step", &FactoredOptions::step},
    Option{"scaled", &FactoredOptions::scaled},
    Option{"least_scale", &FactoredOptions::least_scale},
    Option{"threshold", &FactoredOptions::threshold},
    Option{"decay", &FactoredOptions::decay},
    Option{"decays_by_length", &FactoredOptions::decays_by_length},
    Option{"beta", &FactoredOptions::beta},
    Option{"grad_factor", &FactoredOptions::grad_factor},
};

FactoredOptions options_of(const std::vector<double>& values) {
  check(values.size() == kOptions.size(), "an option is missing, or there is one too many");
  FactoredOptions options{};
  for (size_t i = 0; i < values.size(); ++i) options.*kOptions[i].value = values[i];
  return options;
}

std::vector<std::string> factored_options() {
  std::vector<std::string> names;
  for (const Option& option : kOptions) names.emplace_back(option.name);
  return names;
}

// A tensor of less than two dimensions is a matrix of one row.
Matrices as_matrices(const TensorView& tensor) {
  const Dims strides = tensor.strides;
  const size_t dims = strides.size();
  if (dims < 2) return {tensor.data, {}, 0, dims == 1 ? strides[0] : 1};
  return {tensor.data, strides.first(dims - 2), strides[dims - 2], strides[dims - 1]};
}

FactoredFormat format_of(size_t i, DType weight, DType grad) {
  if (weight == grad) {
    switch (weight) {
      case DType::kFloat:
        return FactoredFormat::kFloat;
      case DType::kDouble:
        return FactoredFormat::kDouble;
      case DType::kBFloat16:
        return FactoredFormat::kBFloat16;
      case DType::kHalf:
        return FactoredFormat::kHalf;
      default:
        break;
    }
  }
  if (weight == DType::kFloat && grad == DType::kBFloat16) return FactoredFormat::kBFloat16Master;
  if (weight == DType::kFloat && grad == DType::kHalf) return FactoredFormat::kHalfMaster;
  refuse(i, std::string("the gradient is ") + name_of(grad) + " but the weight is " + name_of(weight));
}

// A state of so many elements.
TensorView checked_moments(size_t i, const Tensor& state, const TensorView& weight, int64_t elements,
                           const char* what) {
  const TensorView moments = view(state, what);
  const DType dtype = weight.dtype == DType::kDouble ? DType::kDouble : DType::kFloat;
  if (moments.device != weight.device) refuse(i, std::string(what) + " must be on the weight's device");
  if (moments.dtype != dtype || elements_of(moments.sizes) != elements) {
    refuse(i, std::string(what) + " must be " + name_of(dtype) + " and have " + std::to_string(elements) +
                  " elements");
  }
  return moments;
}

void* checked_sums(size_t i, const Tensor& state, const TensorView& weight, int64_t elements,
                   const char* what) {
  if (!state.is_contiguous()) refuse(i, std::string(what) + " must be contiguous");
  return checked_moments(i, state, weight, elements, what).data;
}

bool have_same_sizes(const TensorView& a, const TensorView& b) {
  return std::equal(a.sizes.begin(), a.sizes.end(), b.sizes.begin(), b.sizes.end());
}

FactoredTensor checked_tensor(size_t i, const TensorView& weight, const TensorView& grad, const Tensor& rows,
                              const Tensor& columns, const Tensor* moment_tensor, int device) {
  if (weight.device != device || grad.device != device)
    refuse(i, "weights and gradients must be on one device");
  const Dims sizes = weight.sizes;
  if (!have_same_sizes(weight, grad)) refuse(i, "the gradient's shape is not the weight's");
  check_no_overlap(i, "the weight", sizes, weight.strides);
  const int64_t elements = elements_of(sizes);
  if (elements == 0) refuse(i, "the weight has no elements");
  FactoredTensor tensor{};
  tensor.format = format_of(i, weight.dtype, grad.dtype);
  tensor.weight = as_matrices(weight);
  tensor.grad = as_matrices(grad);
  tensor.columns = sizes.empty() ? 1 : sizes.back();
  tensor.rows = 1;
  if (sizes.size() >= 2) {
    tensor.outer = sizes.first(sizes.size() - 2);
    tensor.rows = sizes[sizes.size() - 2];
    tensor.row_moments = checked_sums(i, rows, weight, elements / tensor.columns, "moments of rows");
  }
  tensor.count = elements / (tensor.rows * tensor.columns);
  tensor.column_moments = checked_sums(i, columns, weight, elements / tensor.rows, "moments of columns");
  if (moment_tensor != nullptr) {
    const TensorView moment = checked_moments(i, *moment_tensor, weight, elements, "the first moment");
    if (!have_same_sizes(weight, moment)) refuse(i, "the first moment's shape is not the weight's");
    tensor.moment = as_matrices(moment);
  }
  return tensor;
}

void check_apart(const std::vector<TensorView>& weights, const std::vector<TensorView>& grads) {
  std::vector<Elements> elements;
  for (size_t i = 0; i < weights.size(); ++i) {
    elements.push_back(elements_in_memory(weights[i]));
    const Elements grad = elements_in_memory(grads[i]);
    if (grad.begin < elements[i].end && elements[i].begin < grad.end && share_memory(elements[i], grad)) {
      refuse(i, "the gradient shares memory with the weight");
    }
  }
  check_none_shared(elements);
}

// Checks of what lists of weights that are stepped apart have to be together.
void check_factored(const Tensors& weights, const Tensors& grads) {
  check(grads.size() == weights.size(), "lists must have an entry for each weight");
  check_apart(views(weights, "weight"), views(grads, "gradient"));
}

// The operands of a step. They refer to the views.
struct Operands {
  std::vector<TensorView> weight, grad;
  std::vector<FactoredTensor> tensors;
  int device = kHost;

  Operands(const Tensors& weights, const Tensors& grads, const Tensors& rows, const Tensors& columns,
           const Tensors& moments)
      : weight(views(weights, "weight")), grad(views(grads, "gradient")) {
    const size_t count = weights.size();
    check(grads.size() == count && rows.size() == count && columns.size() == count &&
              (moments.empty() || moments.size() == count),
          "lists must have an entry for each weight");
    check_apart(weight, grad);
    if (count > 0) device = weight[0].device;
    for (size_t i = 0; i < count; ++i) {
      tensors.push_back(checked_tensor(i, weight[i], grad[i], rows[i], columns[i],
                                       moments.empty() ? nullptr : &moments[i], device));
    }
  }

  void take(const FactoredOptions& options, FactoredPart part) const {
    if (tensors.empty()) return;
    if (device == kHost) return factored_step(tensors, options, part, num_threads());
    const std::unique_ptr<PreparedStep> step = new_factored_step(device, tensors, {{options}, {}}, part);
    const Tensor scratch = new_device_memory(step->scratch_bytes(), device);
    step->use(static_cast<std::byte*>(scratch.data_ptr()));
    step->run({});
  }
};

void step_factored(const Tensors& weights, const Tensors& grads, const Tensors& rows, const Tensors& columns,
                   const Tensors& moments, const std::vector<double>& values) {
  const FactoredOptions options = options_of(values);
  Operands(weights, grads, rows, columns, moments).take(options, FactoredPart::kWhole);
}

// Contiguous numbers of float64 beside a weight.
double* checked_share(size_t i, const Tensor& share, int64_t count, int device, const char* what) {
  const TensorView numbers = view(share, what);
  if (!share.is_contiguous() || numbers.dtype != DType::kDouble || numbers.device != device ||
      elements_of(numbers.sizes) != count) {
    refuse(i, std::string(what) + " must be " + std::to_string(count) +
                  " contiguous numbers of float64 on the weight's device");
  }
  return static_cast<double*>(numbers.data);
}

// `column_sums` have the sums of the moments of rows behind those of columns, `sizes` the rows, columns and
// elements of each whole weight.
void take_part(const Tensors& weights, const Tensors& grads, const Tensors& rows, const Tensors& columns,
               const Tensors& moments, const Tensors& row_sums, const Tensors& column_sums,
               const Tensor& norms2, const std::vector<int64_t>& sizes, const std::vector<double>& values,
               int64_t part) {
  const FactoredOptions options = options_of(values);
  Operands operands(weights, grads, rows, columns, moments);
  const size_t count = weights.size();
  check(row_sums.size() == count && column_sums.size() == count && sizes.size() == 3 * count,
        "lists must have an entry for each weight");
  check(part > 0 && part < static_cast<int64_t>(FactoredPart::kCount), "a step has no such part");
  double* const norms = count == 0 ? nullptr
                                   : checked_share(0, norms2, static_cast<int64_t>(2 * count),
                                                   operands.device, "squares of norms");
  for (size_t i = 0; i < count; ++i) {
    FactoredTensor& tensor = operands.tensors[i];
    FactoredShare& share = tensor.share;
    const int64_t in_rows = tensor.row_moments == nullptr ? 0 : tensor.count * tensor.rows,
                  in_columns = tensor.count * tensor.columns,
                  means = tensor.row_moments == nullptr ? 0 : tensor.count;
    share.row_sums = checked_share(i, row_sums[i], in_rows, operands.device, "sums along rows");
    share.column_sums =
        checked_share(i, column_sums[i], in_columns + means, operands.device, "sums along columns");
    share.mean_sums = share.column_sums + in_columns;
    share.norms2 = norms + 2 * i;
    share.rows = sizes[3 * i];
    share.columns = sizes[3 * i + 1];
    share.elements = sizes[3 * i + 2];
  }
  operands.take(options, static_cast<FactoredPart>(part));
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def("factored_check(Tensor[] weights, Tensor[] grads) -> ()");
  m.def("factored_options() -> str[]");
  m.def(
      "factored_step(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] rows, Tensor(c!)[] columns, "
      "Tensor(d!)[] moments, float[] options) -> ()");
  m.def(
      "factored_part(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] rows, Tensor(c!)[] columns, "
      "Tensor(d!)[] moments, Tensor(e!)[] row_sums, Tensor(f!)[] column_sums, Tensor(g!) norms2, int[] "
      "sizes, "
      "float[] options, int part) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) {
  m.impl("factored_check", TORCH_BOX(&check_factored));
  m.impl("factored_step", TORCH_BOX(&step_factored));
  m.impl("factored_part", TORCH_BOX(&take_part));
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CUDA, m) {
  m.impl("factored_check", TORCH_BOX(&check_factored));
  m.impl("factored_step", TORCH_BOX(&step_factored));
  m.impl("factored_part", TORCH_BOX(&take_part));
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CompositeExplicitAutograd, m) {
  m.impl("factored_options", TORCH_BOX(&factored_options));
}

}  // namespace
}  // namespace fusedstep::ops
