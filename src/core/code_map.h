// Codes of 8 and 4 bits that a state may be kept in. A block of elements shares its absolute maximum
// (absmax), and a code stands for a share of it.
//
//   int8, signed    the dynamic map of Dettmers et al. (2022, 8-bit Optimizers via Block-wise Quantization):
//                   seven decades, each linear, with twice the codes of the decade below
//   int8, unsigned  the same with twice as many codes in each decade
//   int4, signed    the dynamic map of three decades
//   int4, unsigned  1/16, 2/16, ... 1: without zero, by which nothing may be divided (Li et al., 2023,
//                   Memory Efficient Optimizers with 4-bit States)
//   fp8             float8_e4m3fn, where the absolute maximum has the largest code
//
// A share is rounded to the nearest code, with two exceptions. In the signed map of int8 a negative number
// does not become zero, as in bitsandbytes. In the unsigned maps of int8 and fp8 a positive number does not
// become zero: a step divides the first moment by the root of the second, and the first has kept its size.
//
// To nearest, a moment that changes by less than half of the distance to the next code would keep its code,
// and lag. So the steps of a rule with states that are never negative round states in int8 and fp8 another
// way: up where the exact level of a share is at least 1 - rounding_of_step() above a level. A number between
// two codes gets each of them in its share of the steps. And a positive number of an unsigned map gets a code
// from which the next ones are not far: see step_map().
#pragma once
#include <cstdint>
#include <cstring>

#include "fusedstep/vocabulary.h"

namespace fusedstep {

// Storage of a state: as numbers of a dtype, or as codes.
enum class Storage : uint8_t { kPlain, kInt8, kInt4, kFloat8 };

// Levels are the magnitudes that codes stand for, in order. Those of a map of decades are, in each decade, a
// linear function of the mantissa of a number that counts them; the level of a share is a linear function of
// it between two thresholds. Both are computed alike everywhere, by products and sums that are rounded apart.
struct CodeMap {
  static constexpr int kSegments = 8;
  static constexpr float kToNearest = 0.5f;

  Storage storage = Storage::kPlain;
  int block = 256;      // elements that share an absolute maximum
  int block_shift = 8;  // its logarithm
  float top = 1;        // the level of the absolute maximum
  // A positive number's code is its level + zero, with the level no less than floor. That of a negative one
  // is (its level ^ flip) + negative, with the level between least and most.
  int32_t zero = 0, floor = 0, flip = 0, negative = 0, least = 0, most = 0;

  // int8: level + count has the mantissa 1 + m and the exponent e, and the value m * value_slope[e % 8] +
  // value_start[e % 8]; level zero has none.
  int32_t count = 0;
  float value_slope[kSegments] = {}, value_start[kSegments] = {};
  // int4: the value of each code.
  float value[16] = {};

  // int8 and int4: a share beyond so many thresholds, at least one, has the level share * slope + start, cut
  // off, and no more than `last`, with the numbers of the last of them. Others have level zero. A threshold
  // is in the middle of a gap between two levels, where shares are rounded to nearest; that below level one
  // has no gap, and stays where it is. A segment of one level has the slope zero.
  float threshold[kSegments] = {}, gap[kSegments] = {}, slope[kSegments] = {}, start[kSegments] = {};
  int32_t last[kSegments] = {};
  // By the exponent % kOctaves of a share that is at least kLeastShare: the threshold that may be among the
  // shares of this exponent, or the next above them, or else the last. There is no second one among them.
  static constexpr int kOctaves = 32, kFirstExponent = 128 - kOctaves;
  static constexpr float kLeastShare = 0x1p-30f;
  int32_t octave_threshold[kOctaves] = {};
  // fp8: added to an exact level before it is cut off.
  float rounding = kToNearest;

  constexpr bool is_signed() const { return negative != 0; }
  constexpr int elements_per_byte() const { return storage == Storage::kInt4 ? 2 : 1; }
  constexpr int64_t bytes_of(int64_t elements) const {
    return (elements + elements_per_byte() - 1) / elements_per_byte();
  }
  constexpr int64_t blocks_of(int64_t elements) const { return (elements + block - 1) >> block_shift; }
};

// A byte of codes of zero.
FUSEDSTEP_FN int zero_byte(const CodeMap& map) { return map.zero * (map.elements_per_byte() == 2 ? 17 : 1); }

FUSEDSTEP_FN int32_t bits_of(float x) {
  int32_t bits = 0;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
FUSEDSTEP_FN float from_bits(int32_t bits) {
  float x = 0;
  memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr int32_t kMagnitudeBits = 0x7fffffff, kMantissaBits = 0x7fffff, kOneBits = 0x3f800000;
constexpr int kMantissa = 23, kBias = 127;

// float8_e4m3fn has three bits of mantissa and a bias of 7; a number below 2^-6 has the steps of those above.
constexpr int kFloat8Mantissa = 3, kFloat8Bias = 7;

// A block as it is stored: its absolute maximum, and what its elements are multiplied by to be shares of it.
struct BlockScale {
  float absmax, inverse;
};

// By the bits of the largest magnitude, as integers, which order NaN and infinity behind all numbers. Where
// the inverse would leave the range of normal floats the absolute maximum is another: 2^-117 where it is
// less, NaN above 2^126.
FUSEDSTEP_FN BlockScale scale_of(int32_t largest, float top) {
  constexpr int32_t kLeast = (127 - 117) << 23, kMost = (127 + 126) << 23, kNaN = 0x7fc00000;
  if (largest == 0) return {0, 0};
  if (largest > kMost) return {from_bits(kNaN), 0};
  const float absmax = from_bits(largest < kLeast ? kLeast : largest);
  return {absmax, 1 / (absmax / top)};
}

// What a step adds to exact levels before it cuts them off, by its number: a sequence of low discrepancy, the
// multiples of the golden ratio (Weyl). The first step rounds to nearest. At 2^-12 from 0 and 1, and nearer,
// a number that is a code's could get the next code by the errors of float32.
FUSEDSTEP_FN float rounding_of_step(double step) {
  constexpr uint32_t kGoldenRatio = 0x9e3779b9u, kHalf = 0x80000000u, kLeast = 0x10, kOne = 0x10000;
  const auto number = static_cast<uint32_t>(static_cast<uint64_t>(step)) - 1;
  const uint32_t found = (number * kGoldenRatio + kHalf) >> 16;
  const uint32_t kept = found < kLeast ? kLeast : found > kOne - kLeast ? kOne - kLeast : found;
  return static_cast<float>(kept) * 0x1p-16f;
}

// Thresholds and starts of a map by which such a step rounds.
FUSEDSTEP_FN float moved_threshold(float threshold, float gap, float rounding) {
  return threshold - (rounding - CodeMap::kToNearest) * gap;
}
FUSEDSTEP_FN float moved_start(float slope, float start, float rounding) {
  return slope == 0 ? start : start + (rounding - CodeMap::kToNearest);
}
// The map by which it rounds. int4 is rounded to nearest.
FUSEDSTEP_FN CodeMap rounding_by(CodeMap map, float rounding) {
  if (map.storage == Storage::kInt4) return map;
  map.rounding = rounding;
  for (int k = 0; k < CodeMap::kSegments; ++k) {
    map.threshold[k] = moved_threshold(map.threshold[k], map.gap[k], rounding);
    map.start[k] = moved_start(map.slope[k], map.start[k], rounding);
  }
  return map;
}

// Calls run(storage) with a constant.
template <Storage kStorage>
struct StorageIs {};
template <class Run>
FUSEDSTEP_FN void by_storage(Storage storage, Run run) {
  if (storage == Storage::kInt8) {
    run(StorageIs<Storage::kInt8>());
  } else if (storage == Storage::kInt4) {
    run(StorageIs<Storage::kInt4>());
  } else {
    run(StorageIs<Storage::kFloat8>());
  }
}

// The number that a code stands for, as a share of its block's absolute maximum (times `top`).
template <Storage kStorage>
FUSEDSTEP_FN float value_of(const CodeMap& map, int32_t code) {
  if constexpr (kStorage == Storage::kInt4) return map.value[code];
  if constexpr (kStorage == Storage::kFloat8) {
    constexpr int kShift = kMantissa - kFloat8Mantissa;
    constexpr int32_t kLift = (kBias - kFloat8Bias) << kMantissa;
    const int32_t magnitude = code & 127;
    float value = from_bits((magnitude << kShift) + kLift);
    if (magnitude < 1 << kFloat8Mantissa) value = 2 * (value - from_bits(kLift));
    if (magnitude == 127) value = from_bits(0x7fc00000);
    return code < 128 ? value : -value;
  }
  const int32_t above = code - map.zero, level = above < 0 ? -above : above;
  if (level == 0) return 0;
  const int32_t bits = bits_of(static_cast<float>(level + map.count));
  const float m = from_bits((bits & kMantissaBits) | kOneBits) - 1;
  const int segment = (bits >> kMantissa) % CodeMap::kSegments;
  const float value = m * map.value_slope[segment] + map.value_start[segment];
  return above < 0 ? -value : value;
}

// The level of a share, which is not negative.
template <Storage kStorage>
FUSEDSTEP_FN int32_t level_of(const CodeMap& map, float share) {
  if constexpr (kStorage == Storage::kFloat8) {
    constexpr int32_t kLeast = kBias - kFloat8Bias + 1;
    const int32_t exponent = bits_of(share) >> kMantissa, e = exponent < kLeast ? kLeast : exponent;
    const float slope = from_bits((2 * kBias + kFloat8Mantissa - e) << kMantissa);
    const int32_t before = (e - kLeast) << kFloat8Mantissa;  // levels below those of its exponent, but eight
    return static_cast<int32_t>(share * slope + (static_cast<float>(before) + map.rounding));
  }
  const float at = share < CodeMap::kLeastShare ? CodeMap::kLeastShare : share;
  const int next = map.octave_threshold[(bits_of(at) >> kMantissa) % CodeMap::kOctaves];
  const int segment = next - 1 + (bits_of(share) > bits_of(map.threshold[next]));
  if (segment < 0) return 0;
  const auto level = static_cast<int32_t>(share * map.slope[segment] + map.start[segment]);
  return level < map.last[segment] ? level : map.last[segment];
}

// The code of a number by its share, which is not NaN. The number tells the sign: its share may be rounded to
// zero.
template <Storage kStorage>
FUSEDSTEP_FN int32_t code_of(const CodeMap& map, float number, float share) {
  const int32_t bits = bits_of(number);
  int32_t level = level_of<kStorage>(map, from_bits(bits_of(share) & kMagnitudeBits));
  if (bits > 0 && level < map.floor) level = map.floor;
  if (bits >= 0 || (bits & kMagnitudeBits) == 0) return level + map.zero;
  level = level < map.least ? map.least : level > map.most ? map.most : level;
  return (level ^ map.flip) + map.negative;
}

}  // namespace fusedstep
