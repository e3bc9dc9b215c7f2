// Finds tensors that share memory.
#pragma once
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "src/plan/layout.h"
#include "src/plan/tensor_view.h"

namespace fusedstep {

// Returns whether two elements of a tensor share memory. The strides decide it where dimensions nest, as they
// nearly always do; elsewhere every offset is looked at.
bool overlaps_itself(Dims sizes, Dims strides);

// The elements of a tensor, the first of which is at `begin`; the last ends at `end`.
struct Elements {
  const char *begin, *end;
  int element_size;
  Dims sizes, strides;
};

Elements elements_in_memory(const TensorView& tensor);

// Returns whether an element of one tensor shares memory with an element of the other.
bool share_memory(const Elements& a, const Elements& b);

// Returns the index of the first tensor that has an element in the memory of a tensor before it. The tensors
// come by ascending address, and none overlaps itself.
std::optional<size_t> find_sharing(std::span<const Elements> tensors);

// The memory of a tensor from its first to its last byte, and a flag that find_aliasing() writes. Null:
// nobody needs to know.
struct Extent {
  const char *begin, *end;
  bool* is_apart;
};

// Sets the flag of each extent that meets another one to false. Sorts the extents by address.
void find_aliasing(std::vector<Extent>& extents);

}  // namespace fusedstep
