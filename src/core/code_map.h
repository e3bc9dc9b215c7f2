// Codes of 8 and 4 bits that a state may be kept in. A block of elements shares its absolute maximum (absmax),
// and a code stands for a share of it.
//
//   int8, signed    the dynamic map of Dettmers et al. (2022, 8-bit Optimizers via Block-wise Quantization):
//                   seven decades, each linear, with twice the codes of the decade below
//   int8, unsigned  the same with twice as many codes in each decade
//   int4, signed    the dynamic map of three decades
//   int4, unsigned  1/16, 2/16, ... 1: without zero, by which nothing may be divided (Li et al., 2023,
//                   Memory Efficient Optimizers with 4-bit States)
//   fp8             float8_e4m3fn, where the absolute maximum has the largest code
//
// A share is rounded to the nearest code, and to the even one in the middle between two. In the signed map of
// int8 a negative number does not become zero, as in bitsandbytes.
#pragma once
#include <cstdint>
#include <cstring>

#include "fusedstep/vocabulary.h"

namespace fusedstep {

// Storage of a state: as numbers of a dtype, or as codes.
enum class Storage : uint8_t { kPlain, kInt8, kInt4, kFloat8 };

// Levels are the magnitudes that codes stand for, in order. A share's level is found by its upper bits: these
// name a cell, which has the level at its start, and the lower bits of the share beyond which the next level
// begins. No cell has two such thresholds.
struct CodeMap {
  static constexpr int kMostLevels = 256, kMostCells = 3072;
  // Bits of a cell that are the threshold.
  static constexpr int kThresholdBits = 24;

  Storage storage = Storage::kPlain;
  int block = 256;  // elements that share an absolute maximum
  float top = 1;    // the level of the absolute maximum
  float value[256] = {};
  // A positive number's code is its level + zero. That of a negative one is (its level ^ flip) + negative,
  // with the level between least and most.
  int32_t zero = 0, flip = 0, negative = 0, least = 0, most = 0;
  int32_t shift = 0, lowest = 0, first_cell = 0;  // upper bits; the first cell's start
  int cells = 0;
  uint32_t cell[kMostCells] = {};

  constexpr int elements_per_byte() const { return storage == Storage::kInt4 ? 2 : 1; }
  constexpr int64_t bytes_of(int64_t elements) const {
    return (elements + elements_per_byte() - 1) / elements_per_byte();
  }
  constexpr int64_t blocks_of(int64_t elements) const { return (elements + block - 1) / block; }
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

constexpr int32_t kMagnitudeBits = 0x7fffffff;

// A block as it is stored: its absolute maximum, and what its elements are multiplied by to be shares of it.
struct BlockScale {
  float absmax, inverse;
};

// By the bits of the largest magnitude, as integers, which order NaN and infinity behind all numbers. Where
// the inverse would leave the range of normal floats the block becomes zero, or NaN: below 2^-117, above
// 2^126.
FUSEDSTEP_FN BlockScale scale_of(int32_t largest, float top) {
  constexpr int32_t kLeast = (127 - 117) << 23, kMost = (127 + 126) << 23, kNaN = 0x7fc00000;
  if (largest < kLeast) return {0, 0};
  if (largest > kMost) return {from_bits(kNaN), 0};
  const float absmax = from_bits(largest);
  return {absmax, 1 / (absmax / top)};
}

// The code of a share, which is not NaN.
FUSEDSTEP_FN int32_t code_of(const CodeMap& map, float share) {
  const int32_t bits = bits_of(share), magnitude = bits & kMagnitudeBits;
  const int32_t at = magnitude < map.lowest ? map.lowest : magnitude;
  const uint32_t cell = map.cell[(at >> map.shift) - map.first_cell];
  const int32_t threshold = static_cast<int32_t>(cell & ((1u << CodeMap::kThresholdBits) - 1));
  int32_t level = static_cast<int32_t>(cell >> CodeMap::kThresholdBits);
  level += (at & ((1 << map.shift) - 1)) > threshold;
  if (bits >= 0 || magnitude == 0) return level + map.zero;
  level = level < map.least ? map.least : level > map.most ? map.most : level;
  return (level ^ map.flip) + map.negative;
}

}  // namespace fusedstep
