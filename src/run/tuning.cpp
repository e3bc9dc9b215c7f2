#include "src/run/tuning.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fusedstep {
namespace {

// The distances for operands in memory, in a socket's third-level cache and in the team's second-level
// caches. Processors need different ones, since their own prefetchers look ahead differently far.
// docs/tried.md has the figures of other distances.
struct Distances {
  PrefetchDistance in_memory, in_third_level, in_second_level;
};

#if defined(__x86_64__)
// Returns the family as AMD counts them: 0x19 is Zen 4, 0x1a is Zen 5.
unsigned processor_family() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  return (eax >> 8 & 0xf) + (eax >> 20 & 0xff);
}
#endif

Distances distances_of_processor() {
#if defined(__x86_64__)
  if (__builtin_cpu_is("amd")) {
    if (processor_family() >= 0x1a) {
      return {.in_memory = {.first = 2048}, .in_third_level = {.first = 4096}, .in_second_level = {}};
    }
    constexpr PrefetchDistance kBeyond{.first = 256, .second = 1024};
    return {.in_memory = kBeyond, .in_third_level = kBeyond, .in_second_level = {}};
  }
#endif
  constexpr PrefetchDistance kBeyond{.first = 1024, .second = 6144};
  return {.in_memory = kBeyond, .in_third_level = kBeyond, .in_second_level = {.first = 512}};
}

}  // namespace

PrefetchDistance prefetch_distance(int64_t bytes, int64_t second_level) {
  static const Distances distances = distances_of_processor();
  if (bytes <= second_level) return distances.in_second_level;
  return stays_in_cache(bytes) ? distances.in_third_level : distances.in_memory;
}

bool stays_in_cache(int64_t bytes) {
  constexpr int64_t kCached = int64_t{256} << 20;
  return bytes <= kCached;
}

}  // namespace fusedstep
