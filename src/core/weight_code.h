// Ways to keep the float32 value of a weight of 16 bits without a float32 copy of it.
//
//   split   the weight is the value rounded to nearest. The lower 16 bits of the value are beside it, as an
//           int16: the value's bits are the weight's, shifted up, plus this number. Nothing is lost. bfloat16
//           only. A value in the middle of two weights is rounded away from zero
//   Kahan   the rounding error is beside the weight, in the weight's dtype
//   random  nothing is beside it: the value is rounded to one of the two weights around it, up with a
//           probability that is its distance from the lower one (stochastic rounding). bfloat16 only
//
// The bits of all three are integers' or exact, and so the same everywhere.
#pragma once
#include <cstdint>
#include <cstring>

#include "fusedstep/vocabulary.h"

namespace fusedstep {

enum class WeightCode : uint8_t { kPlain, kSplit, kKahanBf16, kKahanHalf, kRandom };

// Bits of float32 numbers without their sign.
constexpr uint32_t kInfinityBits = 0x7f800000, kNaNBits = 0x7fc00000;
// The largest number of bfloat16.
constexpr uint32_t kLargestBf16 = 0x7f7f0000;

FUSEDSTEP_FN bool is_nan_bits(uint32_t bits) { return (bits & 0x7fffffffu) > kInfinityBits; }

// To nearest even, as kernels do.
FUSEDSTEP_FN uint16_t nearest_bf16(uint32_t bits) {
  const uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return static_cast<uint16_t>((is_nan_bits(bits) ? kNaNBits : rounded) >> 16);
}

// The value of a weight with the lower bits beside it. Where a weight that was changed cannot have these, the
// value is the weight: they would take zero across zero, or infinity to NaN.
FUSEDSTEP_FN uint32_t joined(uint16_t weight, int16_t low) {
  const uint32_t magnitude = weight & 0x7fffu;
  const bool is_foreign = ((low < 0) & (magnitude == 0)) | ((low > 0) & (magnitude >= kInfinityBits >> 16));
  return (uint32_t{weight} << 16) + (is_foreign ? 0u : static_cast<uint32_t>(int32_t{low}));
}
FUSEDSTEP_FN void split(uint32_t bits, uint16_t& weight, int16_t& low) {
  const uint32_t kept = is_nan_bits(bits) ? kNaNBits : bits;
  weight = static_cast<uint16_t>((kept + 0x8000u) >> 16);
  low = static_cast<int16_t>(kept & 0xffffu);
}

// A number of 64 bits from another, by the finalizer of SplitMix64 (Steele et al., 2014, Fast Splittable
// Pseudorandom Number Generators).
FUSEDSTEP_FN uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The key of a step, that of a tensor in it, from which its random numbers follow, and the latter from all.
// `place` is that of the tensor among an optimizer's.
FUSEDSTEP_FN uint64_t key_of_step(uint64_t seed, uint64_t step) { return mixed(mixed(seed) + step); }
FUSEDSTEP_FN uint64_t key_of_place(uint64_t step_key, uint64_t place) { return mixed(step_key + place); }
FUSEDSTEP_FN uint64_t key_of_draws(uint64_t seed, uint64_t step, uint64_t place) {
  return key_of_place(key_of_step(seed, step), place);
}
// The key of 2^32 elements, of which the first has this index by rows and columns.
FUSEDSTEP_FN uint64_t key_of_range(uint64_t key, uint64_t first) { return mixed(key + (first >> 32)); }

// 16 random bits for the element at an index, modulo 2^32, under the key of its range. Of all 2^32 elements
// as many get each number. Words are uint32_t, or a vector of them.
template <class Words>
FUSEDSTEP_FN Words draw(uint64_t range, Words index) {
  Words x = index ^ static_cast<uint32_t>(range);
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) + static_cast<uint32_t>(range >> 32);
  x = (x ^ (x >> 13)) * 0x846ca68bu;
  return x >> 16;
}

// A value rounded by 16 random bits. Between the largest number and infinity it is rounded to nearest.
FUSEDSTEP_FN uint16_t rounded_by(uint32_t bits, uint32_t random) {
  const uint32_t added = (bits & 0x7fffffffu) >= kLargestBf16 ? 0x8000u : random;
  return static_cast<uint16_t>((is_nan_bits(bits) ? kNaNBits : bits + added) >> 16);
}

}  // namespace fusedstep
