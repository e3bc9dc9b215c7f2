#include "src/plan/placement.h"

#include <sys/mman.h>

namespace fusedstep {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

int64_t address(const void* pointer) { return reinterpret_cast<int64_t>(pointer); }

}  // namespace

int64_t placement_offset(const void* allocation, const void* weight, int slot, int slots) {
  // Gradients come from the same allocator as weights, so that they tend to start at the weight's offset.
  const int64_t apart = kPage / (slots + 1) / kLine * kLine;
  const int64_t wanted = (address(weight) / kLine * kLine + (slot + 1) * apart) % kPage;
  const int64_t have = address(allocation) % kPage;
  return (wanted - have + 2 * kPage) % kPage / kLine * kLine;
}

void ask_for_huge_pages(void* data, int64_t bytes) {
  const int64_t begin = (address(data) + kHugePage - 1) / kHugePage * kHugePage;
  const int64_t end = (address(data) + bytes) / kHugePage * kHugePage;
  // This is advice: if the system does not follow it, small pages serve as well.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace fusedstep
