// The memory of many tensors, from first to last byte, to be looked up in a few comparisons each.
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
  // Adds [begin, end), which begins no earlier than those before it.
  void add(const char* begin, const char* end) {
    begins_.push_back(begin);
    reaches_.push_back(reaches_.empty() ? end : std::max(reaches_.back(), end));
  }

  // Counts those whose first byte lies before `end`.
  size_t before(const char* end) const {
    const char* const* found = begins_.data();
    // Without a branch that depends on what is compared: none of them could be predicted.
    for (size_t left = begins_.size(); left > 0;) {
      const size_t half = (left + 1) / 2;
      found += found[half - 1] < end ? half : 0;
      left -= half;
    }
    return found - begins_.data();
  }
  // Whether one of the first `count` reaches beyond `begin`.
  bool reach(size_t count, const char* begin) const { return count > 0 && reaches_[count - 1] > begin; }
  // Whether one of them has a byte in [begin, end).
  bool meet(const char* begin, const char* end) const { return reach(before(end), begin); }

 private:
  std::vector<const char*> begins_, reaches_;  // the latter: the furthest end so far
};

}  // namespace fusedstep
