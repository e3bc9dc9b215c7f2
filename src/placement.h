// Where in memory states are put.
#pragma once
#include <cstdint>

namespace fusedstep {

// A page, the unit in which offsets collide, and a cache line, the unit in which they are chosen.
constexpr int64_t kPage = 4096, kLine = 64;

// States below this size share a page or a few with others anyway: left where the allocator puts them.
constexpr int64_t kPlacedBytes = 64 * 1024;

// Bytes to skip from `allocation` so that state `slot` of `slots` starts at an offset in its page apart from
// the other states' and from the weight's: streams that advance at one offset compete for the same cache
// sets. Less than kPage.
int64_t placement_offset(const void* allocation, const void* weight, int slot, int slots);

// Asks for huge pages for [data, data + bytes), where the system leaves it to the program.
void ask_for_huge_pages(void* data, int64_t bytes);

}  // namespace fusedstep
