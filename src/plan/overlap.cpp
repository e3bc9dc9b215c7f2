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
  MarkedBytes(const char* begin, const char* end)
      : begin_(begin), bytes_(end - begin), words_((bytes_ + kBits - 1) / kBits) {}

  // Marks the bytes of a tensor's elements. Returns false, and stops, at one that is marked.
  bool mark(const Elements& tensor) { return walk(tensor, true); }
  bool has_none_of(const Elements& tensor) { return walk(tensor, false); }

 private:
  static constexpr int64_t kBits = 64;

  struct Dim {
    int64_t stride, size;  // in bytes; of elements
    int64_t index = 0;
  };

  bool walk(const Elements& tensor, bool marks) {
    std::vector<Dim> dims;
    for (size_t d = 0; d < tensor.sizes.size(); ++d) {
      if (tensor.sizes[d] == 0) return true;
      if (tensor.sizes[d] > 1) dims.push_back({tensor.strides[d] * tensor.element_size, tensor.sizes[d]});
    }
    std::ranges::sort(dims, {}, &Dim::stride);
    int64_t run = tensor.element_size;  // bytes side by side
    auto outer = dims.begin();
    for (; outer != dims.end() && outer->stride == run; ++outer) run *= outer->size;
    for (int64_t offset = tensor.begin - begin_;;) {
      if (!walk_run(std::max<int64_t>(offset, 0), std::min(offset + run, bytes_), marks)) return false;
      auto dim = outer;
      for (; dim != dims.end(); ++dim) {
        offset += dim->stride;
        if (++dim->index < dim->size) break;
        offset -= dim->size * dim->stride;
        dim->index = 0;
      }
      if (dim == dims.end()) return true;
    }
  }

  bool walk_run(int64_t begin, int64_t end, bool marks) {
    for (int64_t next; begin < end; begin = next) {
      next = std::min(end, (begin / kBits + 1) * kBits);
      const uint64_t bits = ~uint64_t{0} >> (kBits - (next - begin)) << (begin % kBits);
      uint64_t& word = words_[begin / kBits];
      if (word & bits) return false;
      if (marks) word |= bits;
    }
    return true;
  }

  const char* begin_;
  int64_t bytes_;
  std::vector<uint64_t> words_;  // a bit for each byte
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
