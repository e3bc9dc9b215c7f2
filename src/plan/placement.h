// The placement of states in memory.
#pragma once
#include <cstdint>

namespace fusedstep {

// A page, the unit in which offsets collide, and a cache line, the unit in which they are chosen.
constexpr int64_t kPage = 4096, kLine = 64;

// Smaller states stay where the allocator puts them: they share a few pages with others anyway.
constexpr int64_t kPlacedBytes = 64 * 1024;

// Returns the bytes to skip from `allocation`, less than kPage, so that state `slot` of `slots` starts at
// another offset in its page than the other states and the weight. Streams that advance at one offset compete
// for the same cache sets.
int64_t placement_offset(const void* allocation, const void* weight, int slot, int slots);

// Asks the system for huge pages for [data, data + bytes).
void ask_for_huge_pages(void* data, int64_t bytes);

}  // namespace fusedstep
