// The layout of one tensor's operands in memory, and the order in which a kernel walks them.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "src/core/walk.h"

namespace fusedstep {

using Dims = std::span<const int64_t>;  // sizes, or strides in elements

// A dimension with the stride of every operand along it.
struct Dim {
  int64_t size;
  std::vector<int64_t> stride;
};

// The walk over one tensor. It cannot be copied, since `blocks` points into it.
class Layout {
 public:
  // `strides[k]` are the strides of operand k. The weight comes first, and must not overlap itself. With
  // `in_order` the units are elements by rows and columns, in any layout: of the dimensions in their order.
  Layout(Dims sizes, std::span<const Dims> strides, bool in_order = false);
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;

  // The units of the walk are elements of one flat range if it is dense, and blocks otherwise.
  bool dense() const { return dense_; }
  int64_t units() const { return units_; }
  int64_t elements_per_unit() const { return dense_ ? 1 : blocks_.extent[0] * blocks_.extent[1]; }
  const BlockLayout* blocks() const { return dense_ ? nullptr : &blocks_; }

 private:
  void describe(const std::vector<Dim>& dims, size_t operands);

  bool dense_ = false;
  int64_t units_ = 0;
  std::vector<int64_t> sizes_, strides_;
  BlockLayout blocks_{};
};

}  // namespace fusedstep
