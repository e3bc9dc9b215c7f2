// How the operands of one tensor's update lie in memory, and in what order to walk them.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "src/core/walk.h"

namespace fusedstep {

using Dims = std::span<const int64_t>;  // sizes, or strides in elements

// Whether two elements of a tensor share memory. Decided by the strides alone where dimensions nest, as they
// nearly always do; otherwise by looking at every offset.
bool overlaps_itself(Dims sizes, Dims strides);

// The walk over one tensor. `blocks` points into the layout itself: not copyable.
class Layout {
 public:
  // `strides[k]` are those of operand k; the weight comes first and must not overlap itself.
  Layout(Dims sizes, std::span<const Dims> strides);
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;

  // Units of the walk: elements of one flat range if `dense()`, else blocks.
  bool dense() const { return dense_; }
  int64_t units() const { return units_; }
  int64_t elements_per_unit() const { return dense_ ? 1 : blocks_.extent[0] * blocks_.extent[1]; }
  const BlockLayout* blocks() const { return dense_ ? nullptr : &blocks_; }

 private:
  bool dense_ = false;
  int64_t units_ = 0;
  std::vector<int64_t> sizes_, strides_;
  BlockLayout blocks_{};
};

}  // namespace fusedstep
