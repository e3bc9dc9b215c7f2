// low_rank_products: the products that project gradients on bases, and bring updates back, of all weights.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "src/ops/native_plan.h"
#include "src/plan/overlap.h"
#include "src/run/backend.h"
#include "src/steps/low_rank_products.h"

namespace fusedstep::ops {
namespace {

// A matrix whose rows, or whose columns, are contiguous.
struct Matrix {
  float* data;
  int64_t rows, columns, stride;
  bool by_rows, by_columns;

  Matrix(const Tensor& tensor, const char* what, int device) : data(nullptr), rows(0), columns(0), stride(0) {
    const TensorView known = view(tensor, what);
    check(known.dtype == DType::kFloat && known.sizes.size() == 2 && known.device == device,
          std::string(what) + " must be a float32 matrix, on the device of the others");
    data = static_cast<float*>(known.data);
    rows = known.sizes[0];
    columns = known.sizes[1];
    check(std::min(rows, columns) > 0 && std::max(rows, columns) <= std::numeric_limits<int>::max() / 2,
          std::string(what) + " must have an element at least");
    by_rows = known.strides[1] == 1 && known.strides[0] >= columns;
    by_columns = known.strides[0] == 1 && known.strides[1] >= rows;
    stride = known.strides[by_rows ? 0 : 1];
  }
};

// Finds how the operands lie in memory. Returns false if a product does not take them so.
bool find_form(const Matrix& a, const Matrix& b, const Matrix& c, ProductForm& form) {
  if (!c.by_rows) return false;
  if (a.by_rows && b.by_rows) {
    form = ProductForm::kRowsColumns;
  } else if (a.by_rows && b.by_columns) {
    form = ProductForm::kRowsRows;
  } else if (a.by_columns && b.by_rows) {
    form = ProductForm::kColumnsColumns;
  } else {
    return false;
  }
  return true;
}

bool multiply(const Tensors& a, const Tensors& b, const Tensors& c, const std::vector<double>& alpha,
              const std::vector<double>& beta, int64_t precision) {
  const size_t count = a.size();
  check(b.size() == count && c.size() == count && alpha.size() == count && beta.size() == count,
        "there must be as many of each operand and factor");
  check(precision >= 0 && precision <= static_cast<int64_t>(ProductPrecision::kMedium),
        "precision must be 0 (highest), 1 (high) or 2 (medium)");
  if (count == 0) return true;
  const int device = view(c[0], "c").device;
  std::vector<LowRankProduct> products;
  std::vector<Elements> results;
  products.reserve(count);
  bool are_taken = true;
  for (size_t i = 0; i < count; ++i) {
    const Matrix left(a[i], "a", device), right(b[i], "b", device), result(c[i], "c", device);
    check(left.rows == result.rows && right.columns == result.columns && left.columns == right.rows,
          "c must have the shape of the product of a and b");
    LowRankProduct product{};
    are_taken &= find_form(left, right, result, product.form);
    product.a = left.data;
    product.b = right.data;
    product.c = result.data;
    product.a_stride = left.stride;
    product.b_stride = right.stride;
    product.c_stride = result.stride;
    product.rows = static_cast<int>(result.rows);
    product.columns = static_cast<int>(result.columns);
    product.depth = static_cast<int>(left.columns);
    product.alpha = static_cast<float>(alpha[i]);
    product.beta = static_cast<float>(beta[i]);
    products.push_back(product);
    results.push_back(elements_in_memory(view(c[i], "c")));
  }
  // Of results that share memory each has to be there before the next.
  std::ranges::sort(results, {}, &Elements::begin);
  if (!are_taken || find_sharing(results)) return false;
  const auto known = static_cast<ProductPrecision>(precision);
  return device == kHost ? take_low_rank_products(products, known, num_threads())
                         : low_rank_products(device, products, known);
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def(
      "low_rank_products(Tensor[] a, Tensor[] b, Tensor(a!)[] c, float[] alpha, float[] beta, "
      "int precision) -> bool");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) { m.impl("low_rank_products", TORCH_BOX(&multiply)); }
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CUDA, m) { m.impl("low_rank_products", TORCH_BOX(&multiply)); }

}  // namespace
}  // namespace fusedstep::ops
