// The memory of many tensors, from their first to their last bytes, sorted for binary search.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

namespace fusedstep {

class Extents {
 public:
  void clear() {
    begins_.clear();
    reaches_.clear();
  }
  // Adds [begin, end). It must not begin before an extent that was added earlier.
  void add(const char* begin, const char* end) {
    begins_.push_back(begin);
    reaches_.push_back(reaches_.empty() ? end : std::max(reaches_.back(), end));
  }

  // Returns how many begin before `end`.
  size_t before(const char* end) const {
    const char* const* found = begins_.data();
    // No branch depends on a comparison, since none could be predicted.
    for (size_t left = begins_.size(); left > 0;) {
      const size_t half = (left + 1) / 2;
      found += found[half - 1] < end ? half : 0;
      left -= half;
    }
    return found - begins_.data();
  }
  // Returns whether one of the first `count` ends behind `begin`.
  bool reach(size_t count, const char* begin) const { return count > 0 && reaches_[count - 1] > begin; }
  // Returns whether one of them has a byte in [begin, end).
  bool meet(const char* begin, const char* end) const { return reach(before(end), begin); }

 private:
  std::vector<const char*> begins_, reaches_;  // the latter: the furthest end so far
};

}  // namespace fusedstep
