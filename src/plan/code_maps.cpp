#include "src/plan/code_maps.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace fusedstep {
namespace {

// Adds the linear function by which shares beyond a threshold find their level. The threshold is in the
// middle between two levels, and has a gap between them if it may move.
class Segments {
 public:
  explicit Segments(CodeMap& map) : map_(map) {
    std::fill(std::begin(map.threshold), std::end(map.threshold), std::numeric_limits<float>::infinity());
  }
  void add(double threshold, double gap, double slope, double start, int32_t last) {
    map_.threshold[count_] = static_cast<float>(threshold);
    map_.gap[count_] = static_cast<float>(gap);
    map_.slope[count_] = static_cast<float>(slope);
    map_.start[count_] = static_cast<float>(start);
    map_.last[count_] = last;
    ++count_;
  }
  void note_octaves() {
    for (int exponent = CodeMap::kFirstExponent; exponent <= kBias; ++exponent) {
      const float first = from_bits(exponent << kMantissa), end = 2 * first;
      int next = 0;
      while (next < count_ - 1 && end_of_gap(next, 1) < first) ++next;
      map_.octave_threshold[exponent % CodeMap::kOctaves] = next;
      if (next < count_ - 1 && end_of_gap(next + 1, -1) < end) {
        throw std::logic_error("shares of one exponent may have two thresholds");
      }
    }
  }

 private:
  float end_of_gap(int k, float sign) const { return map_.threshold[k] + sign * map_.gap[k] / 2; }

  CodeMap& map_;
  int count_ = 0;
};

// A map of `decades` up to one, of which the lowest has 2^exponent levels, and each other twice as many as
// the one below: the middles of equal parts. Besides there are zero and one. Returns the levels.
//
// The sum that finds a level is rounded to nearest, and would reach the level half a unit in its last place
// early. `start` is less by as much, which leaves borders within 2 ulp of a share from those of bitsandbytes.
std::vector<double> make_decades(CodeMap& map, int decades, int first_exponent) {
  Segments segments(map);
  std::vector<double> levels = {0};
  for (int decade = 0; decade < decades; ++decade) {
    const int exponent = decade + first_exponent, parts = 1 << exponent;
    const double scale = std::pow(10.0, decade - decades + 1), step = scale * 0.9 / parts;
    const double first = scale * 0.1 + step / 2;
    const auto before = static_cast<double>(levels.size());
    const auto last = static_cast<int32_t>(levels.size()) + parts - 1;
    const double early = std::ldexp(0.5, exponent - kMantissa);
    const double threshold = (levels.back() + first) / 2, gap = decade > 0 ? first - levels.back() : 0;
    if (parts == 1) {
      segments.add(threshold, gap, 0, before, last);
    } else {
      segments.add(threshold, gap, 1 / step, before + 0.5 - first / step - early, last);
    }
    // The numbers from 2^exponent on count these levels.
    const int at = (kBias + exponent) % CodeMap::kSegments;
    map.value_slope[at] = static_cast<float>(scale * 0.9);
    map.value_start[at] = static_cast<float>(first);
    for (int i = 0; i < parts; ++i) levels.push_back(first + i * step);
  }
  const auto highest = static_cast<int32_t>(levels.size());
  segments.add((levels.back() + 1) / 2, 1 - levels.back(), 0, highest, highest);
  segments.note_octaves();
  const int last = (kBias + decades + first_exponent) % CodeMap::kSegments;
  map.value_slope[last] = 0;
  map.value_start[last] = 1;
  levels.push_back(1);
  return levels;
}

CodeMap make_map(Storage storage, bool is_signed) {
  CodeMap map;
  map.storage = storage;
  if (storage == Storage::kFloat8) {
    map.top = 448;
    map.floor = is_signed ? 0 : 1;
    map.negative = is_signed ? 128 : 0;
    map.most = is_signed ? 126 : 0;
    return map;
  }
  constexpr int kUnsigned4 = 16;
  std::vector<double> levels;
  if (storage == Storage::kInt8) {
    levels = make_decades(map, 7, is_signed ? 0 : 1);
    map.count = is_signed ? 0 : 1;
    map.floor = is_signed ? 0 : 1;
  } else if (is_signed) {
    levels = make_decades(map, 3, 0);
  } else {
    for (int i = 1; i <= kUnsigned4; ++i) levels.push_back(static_cast<double>(i) / kUnsigned4);
    Segments segments(map);
    segments.add(1.5 / kUnsigned4, 0, kUnsigned4, -0.5, kUnsigned4 - 1);
    segments.note_octaves();
  }
  const auto most = static_cast<int32_t>(levels.size()) - 1;
  if (is_signed) {
    map.zero = most - 1;  // as many levels below it, without the largest
    map.flip = -1;
    map.negative = map.zero + 1;
    map.least = storage == Storage::kInt8 ? 1 : 0;
    map.most = most - 1;
  } else if (storage == Storage::kInt4) {
    map.most = most;
  }
  if (storage != Storage::kInt4) return map;
  map.block = 128;
  map.block_shift = 7;
  for (int32_t level = 0; level <= most; ++level) {
    map.value[map.zero + level] = static_cast<float>(levels[level]);
    if (is_signed && level <= map.most) map.value[map.zero - level] = static_cast<float>(-levels[level]);
  }
  if (is_signed) map.value[map.zero] = 0;
  return map;
}

CodeMap with_floor(CodeMap map, int32_t floor) {
  map.floor = floor;
  return map;
}

// The lowest level of the decade of sixteen levels, and of the numbers of fp8 that have all bits of mantissa.
constexpr int32_t kStepFloorInt8 = 15, kStepFloorFloat8 = 8;

}  // namespace

std::span<const CodeMap> code_maps() {
  static const auto* const maps =
      new std::vector<CodeMap>{make_map(Storage::kInt8, true),
                               make_map(Storage::kInt8, false),
                               make_map(Storage::kInt4, true),
                               make_map(Storage::kInt4, false),
                               make_map(Storage::kFloat8, true),
                               make_map(Storage::kFloat8, false),
                               with_floor(make_map(Storage::kInt8, false), kStepFloorInt8),
                               with_floor(make_map(Storage::kFloat8, false), kStepFloorFloat8)};
  return *maps;
}

const CodeMap& code_map(Storage storage, bool is_signed) {
  switch (storage) {
    case Storage::kInt8:
      return code_maps()[is_signed ? 0 : 1];
    case Storage::kInt4:
      return code_maps()[is_signed ? 2 : 3];
    default:
      return code_maps()[is_signed ? 4 : 5];
  }
}

const CodeMap& step_map(Storage storage, bool is_signed) {
  if (is_signed || storage == Storage::kInt4) return code_map(storage, is_signed);
  return code_maps()[storage == Storage::kInt8 ? 6 : 7];
}

Storage storage_of(std::string_view name) {
  if (name == "int8") return Storage::kInt8;
  if (name == "int4") return Storage::kInt4;
  if (name == "fp8") return Storage::kFloat8;
  throw std::runtime_error("states are kept as int8, int4 or fp8, not as \"" + std::string(name) + "\"");
}

std::vector<int64_t> sizes_in_units(Dims sizes, int64_t unit) {
  if (sizes.size() > 1) {
    const int64_t row = elements_of(sizes.subspan(1));
    if (row % unit == 0) return {sizes[0], row / unit};
  }
  return {(elements_of(sizes) + unit - 1) / unit};
}

}  // namespace fusedstep
