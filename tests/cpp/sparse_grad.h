// Sparse gradients for the tests of the engines, and the tensors that they are for.
#pragma once
#include <vector>

#include "tests/cpp/model.h"

namespace fusedstep::test {

// A gradient of a tensor with these sizes: entries for rows given by their number in row-major order.
class SparseGrad {
 public:
  SparseGrad(DType dtype, Sizes sizes, int dims, const std::vector<int64_t>& rows, uint64_t seed);

  // On the plan's device.
  void bind(Plan& plan, size_t i, TensorOperands operands);
  // Writes the gradient as a dense one: entries for the same row are added in their order.
  void copy_to(Operand& grad) const;

  // Tells for each row of the tensor whether it has an entry.
  std::vector<bool> has_row() const;
  int64_t row_elements() const;
  std::vector<int64_t>& index() { return index_; }
  void leave_order_out() { order_.clear(); }

 private:
  Sizes entry_sizes() const;

  Sizes sizes_;
  int dims_;
  std::vector<int64_t> rows_, strides_, index_, order_;
  Operand entries_;
};

struct Table {
  const char* name;
  Sizes sizes;
  Forms forms;
  int dims = 1;  // those that the rows are indexed by
};

std::vector<Table> tables();
int64_t rows_of(const Table& table);
// Lists of rows for a table: none, one, all, some in disorder, and some of them several times.
std::vector<std::vector<int64_t>> row_lists(int64_t rows);

}  // namespace fusedstep::test
