#include "src/cuda/code_table.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace fusedstep::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kNone = std::numeric_limits<int32_t>::max();

// The floor is the lowest level of a decade. The line of a decade below it is that of the floor.
void add_decades(const CodeMap& map, CodeTable& table) {
  table.least_share = CodeMap::kLeastShare;
  for (int octave = 0; octave < CodeMap::kOctaves; ++octave) {
    const int next = map.octave_threshold[octave];
    table.threshold[octave] = {map.threshold[next], map.gap[next]};
    for (const int above : {0, 1}) {
      const int segment = next - 1 + above, line = octave + above * CodeTable::kOctaves;
      if (segment < 0 || map.last[segment] <= map.floor) {
        table.line[line] = {0, static_cast<float>(map.floor)};
        table.last[line] = {map.floor};
      } else {
        table.line[line] = {map.slope[segment], map.start[segment]};
        table.last[line] = {map.last[segment]};
      }
    }
  }
}

// The levels of level_of<Storage::kFloat8>(). Shares below half of level one, and those of the next four
// exponents, have lines of their own, although all have the steps of kLeast: that of the floor where no share
// of the exponent has a level above it.
void add_exponents(const CodeMap& map, CodeTable& table) {
  constexpr int32_t kLeast = kBias - kFloat8Bias + 1, kFirst = kLeast - kFloat8Mantissa - 2;
  table.least_share = from_bits(kFirst << kMantissa);
  std::fill(std::begin(table.threshold), std::end(table.threshold), CodeTable::Threshold{kInfinity, 0});
  std::fill(std::begin(table.last), std::end(table.last), CodeTable::Last{kNone});
  for (int32_t exponent = kFirst; exponent < kFirst + CodeMap::kOctaves; ++exponent) {
    const int32_t e = std::max(exponent, kLeast);
    const auto before = static_cast<float>((e - kLeast) << kFloat8Mantissa);
    CodeTable::Line& line = table.line[exponent % CodeTable::kOctaves];
    line = {from_bits((2 * kBias + kFloat8Mantissa - e) << kMantissa), before + map.rounding};
    constexpr int32_t kNormal = 1 << kFloat8Mantissa;  // the level at the end of the exponent before kLeast
    if (map.floor > 0 && exponent < kLeast && kNormal >> (kLeast - 1 - exponent) <= map.floor) {
      line = {0, static_cast<float>(map.floor)};
    }
  }
}

}  // namespace

CodeTable code_table(const CodeMap& map) {
  CodeTable table{};
  by_storage(map.storage, [&]<Storage kStorage>(StorageIs<kStorage>) {
    const int values =
        kStorage == Storage::kInt4 ? static_cast<int>(std::size(map.value)) : CodeTable::kValues;
    for (int code = 0; code < values; ++code) table.value[code] = value_of<kStorage>(map, code);
  });
  if (map.storage == Storage::kFloat8) {
    add_exponents(map, table);
  } else {
    add_decades(map, table);
  }
  table.top = map.top;
  table.zero = map.zero;
  table.least = map.least;
  table.most = map.most;
  // (level ^ flip) + negative
  table.factor = map.flip == 0 ? 1 : -1;
  table.negative = map.negative + (map.flip == 0 ? 0 : -1);
  table.below = map.is_signed() ? 0 : std::numeric_limits<float>::denorm_min();
  return table;
}

}  // namespace fusedstep::cuda
