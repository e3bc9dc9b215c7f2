#include "src/code_maps.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

namespace fusedstep {
namespace {

// 2^exponent levels in the lowest decade of a dynamic map, twice as many in each after it: the middles of
// equal parts of [0.1, 1].
std::vector<float> dynamic_levels(int decades, int first_exponent) {
  std::vector<float> levels = {0};
  for (int decade = 0; decade < decades; ++decade) {
    const int parts = 1 << (decade + first_exponent);
    for (int i = 0; i < parts; ++i) {
      const double middle = 0.1 + 0.9 * (i + 0.5) / parts;
      levels.push_back(static_cast<float>(middle * std::pow(10.0, decade - decades + 1)));
    }
  }
  levels.push_back(1);
  return levels;
}

// The numbers of float8_e4m3fn that are not negative: three bits of mantissa, four of exponent, no infinity.
std::vector<float> float8_levels() {
  constexpr int kNumbers = 127;
  std::vector<float> levels;
  for (int code = 0; code < kNumbers; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    const int significand = exponent == 0 ? mantissa : mantissa + 8;
    levels.push_back(std::ldexp(static_cast<float>(significand), std::max(exponent, 1) - 10));
  }
  return levels;
}

// Where level j ends: the bits of the last share that belongs to it.
int32_t end_of_level(const std::vector<float>& levels, size_t j, int zero) {
  const int32_t middle = bits_of((levels[j] + levels[j + 1]) * 0.5f);
  const bool is_even = (zero + static_cast<int>(j)) % 2 == 0;
  return is_even ? middle : middle - 1;
}

void make_cells(CodeMap& map, const std::vector<float>& levels, int mantissa_bits) {
  map.shift = 23 - mantissa_bits;
  const int32_t low = (1 << map.shift) - 1;
  map.first_cell = end_of_level(levels, 0, map.zero) >> map.shift;
  map.lowest = map.first_cell << map.shift;
  map.cells = (bits_of(levels.back()) >> map.shift) - map.first_cell + 1;
  if (map.cells > CodeMap::kMostCells) throw std::logic_error("a map of codes has too many cells");
  size_t level = 0;
  for (int c = 0; c < map.cells; ++c) {
    const int32_t cell = map.first_cell + c;
    const auto start = static_cast<uint32_t>(level);
    int32_t threshold = low;
    for (int found = 0; level + 1 < levels.size(); ++level, ++found) {
      const int32_t end = end_of_level(levels, level, map.zero);
      if (end >> map.shift != cell) break;
      if (found > 0) throw std::logic_error("a cell of a map of codes has two thresholds");
      threshold = end & low;
    }
    map.cell[c] = start << CodeMap::kThresholdBits | static_cast<uint32_t>(threshold);
  }
}

CodeMap make_map(Storage storage, bool is_signed) {
  CodeMap map;
  map.storage = storage;
  std::vector<float> levels;
  int mantissa_bits = 3;
  switch (storage) {
    case Storage::kPlain:
      throw std::logic_error("a plain state has no codes");
    case Storage::kInt8:
      levels = dynamic_levels(7, is_signed ? 0 : 1);
      mantissa_bits = is_signed ? 6 : 7;
      break;
    case Storage::kInt4:
      map.block = 128;
      levels = dynamic_levels(3, 0);
      if (is_signed) break;
      levels.clear();
      for (int i = 1; i <= 16; ++i) levels.push_back(static_cast<float>(i) / 16);
      break;
    case Storage::kFloat8:
      levels = float8_levels();
      map.top = levels.back();
      break;
  }
  const auto most = static_cast<int32_t>(levels.size()) - 1;
  if (storage == Storage::kFloat8) {
    map.negative = 128;
    map.most = most;
  } else if (is_signed) {
    map.zero = most - 1;  // as many levels below it, without the largest
    map.flip = -1;
    map.negative = map.zero + 1;
    map.least = storage == Storage::kInt8 ? 1 : 0;
    map.most = most - 1;
  }
  make_cells(map, levels, mantissa_bits);
  for (int32_t level = 0; level <= most; ++level) {
    map.value[map.zero + level] = levels[level];
    if (!is_signed || level < map.least || level > map.most) continue;
    map.value[(level ^ map.flip) + map.negative] = -levels[level];
  }
  if (storage == Storage::kFloat8) {
    for (const int code : {127, 255}) map.value[code] = std::nanf("");
  }
  return map;
}

}  // namespace

const CodeMap& code_map(Storage storage, bool is_signed) {
  // By storage, signed and not.
  static const auto* const maps = new std::vector<CodeMap>{
      make_map(Storage::kInt8, true), make_map(Storage::kInt8, false), make_map(Storage::kInt4, true),
      make_map(Storage::kInt4, false), make_map(Storage::kFloat8, true)};
  switch (storage) {
    case Storage::kInt8:
      return (*maps)[is_signed ? 0 : 1];
    case Storage::kInt4:
      return (*maps)[is_signed ? 2 : 3];
    default:
      return (*maps)[4];
  }
}

Storage storage_of(std::string_view name) {
  if (name == "int8") return Storage::kInt8;
  if (name == "int4") return Storage::kInt4;
  if (name == "fp8") return Storage::kFloat8;
  throw std::runtime_error("states are kept as int8, int4 or fp8, not as \"" + std::string(name) + "\"");
}

}  // namespace fusedstep
