#include "src/plan/overlap.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>

namespace fusedstep {
namespace {

// Returns whether two index tuples give the same offset, by marking every offset. Tensors too large for that
// are taken to overlap.
bool offsets_repeat(const std::vector<std::pair<int64_t, int64_t>>& dims, int64_t reach) {
  constexpr int64_t kMostOffsets = int64_t{1} << 26;
  if (reach >= kMostOffsets) return true;
  std::vector<bool> seen(reach + 1);
  seen[0] = true;
  std::vector<int64_t> offsets{0};
  for (const auto& [stride, size] : dims) {
    const size_t before = offsets.size();
    for (int64_t i = 1; i < size; ++i) {
      for (size_t k = 0; k < before; ++k) {
        const int64_t offset = offsets[k] + i * stride;
        if (seen[offset]) return true;
        seen[offset] = true;
        offsets.push_back(offset);
      }
    }
  }
  return false;
}

// Marks bytes between two addresses. It ignores elements elsewhere.
class MarkedBytes {
 public:
  MarkedBytes(const char* begin, const char* end) : begin_(begin), end_(end), marked_(end - begin) {}

  // Marks the bytes of a tensor's elements. Returns false, and stops, at one that is marked.
  bool mark(const Elements& tensor) { return walk(tensor, true); }
  bool has_none_of(const Elements& tensor) { return walk(tensor, false); }

 private:
  bool walk(const Elements& tensor, bool marks) {
    const Dims sizes = tensor.sizes, strides = tensor.strides;
    std::vector<int64_t> index(sizes.size(), 0);
    for (int64_t offset = tensor.begin - begin_;;) {
      for (int64_t at = offset; at < offset + tensor.element_size; ++at) {
        if (at < 0 || at >= end_ - begin_) continue;
        if (marked_[at]) return false;
        if (marks) marked_[at] = true;
      }
      size_t dim = sizes.size();
      for (; dim > 0; --dim) {
        offset += strides[dim - 1] * tensor.element_size;
        if (++index[dim - 1] < sizes[dim - 1]) break;
        offset -= sizes[dim - 1] * strides[dim - 1] * tensor.element_size;
        index[dim - 1] = 0;
      }
      if (dim == 0) return true;
    }
  }

  const char *begin_, *end_;
  std::vector<bool> marked_;
};

}  // namespace

bool overlaps_itself(Dims sizes, Dims strides) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return false;
    if (sizes[d] > 1) dims.emplace_back(std::abs(strides[d]), sizes[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // the largest offset that the dimensions so far can make
  bool nested = true;
  for (const auto& [stride, size] : dims) {
    if (stride == 0) return true;
    nested = nested && stride > reach;
    reach += stride * (size - 1);
  }
  return !nested && offsets_repeat(dims, reach);
}

Elements elements_in_memory(const TensorView& tensor) {
  const auto* const begin = static_cast<const char*>(tensor.data);
  return {begin, begin + span_bytes(tensor), element_size(tensor.dtype), tensor.sizes, tensor.strides};
}

bool share_memory(const Elements& a, const Elements& b) {
  MarkedBytes marked(a.begin, a.end);
  marked.mark(a);
  return !marked.has_none_of(b);
}

std::optional<size_t> find_sharing(std::span<const Elements> tensors) {
  for (size_t first = 0, last; first < tensors.size(); first = last) {
    const char* end = tensors[first].end;
    for (last = first + 1; last < tensors.size() && tensors[last].begin < end; ++last) {
      end = std::max(end, tensors[last].end);
    }
    if (last - first == 1) continue;
    // Tensors whose first to last bytes overlap may still interleave, so every element is looked at.
    MarkedBytes marked(tensors[first].begin, end);
    for (size_t i = first; i < last; ++i) {
      if (!marked.mark(tensors[i])) return i;
    }
  }
  return {};
}

void find_aliasing(std::vector<Extent>& extents) {
  std::ranges::sort(extents, {}, &Extent::begin);
  // An extent that begins before the furthest end so far meets the extent that reaches there.
  const Extent* furthest = nullptr;
  for (const Extent& extent : extents) {
    if (furthest != nullptr && extent.begin < furthest->end) {
      for (const Extent* meeting : {&extent, furthest}) {
        if (meeting->is_apart != nullptr) *meeting->is_apart = false;
      }
    }
    if (furthest == nullptr || extent.end > furthest->end) furthest = &extent;
  }
}

}  // namespace fusedstep
