#include "src/cuda/code_table.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace fusedstep::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kNone = std::numeric_limits<int32_t>::max();

void add_decades(const CodeMap& map, CodeTable& table) {
  table.least_share = CodeMap::kLeastShare;
  for (int octave = 0; octave < CodeMap::kOctaves; ++octave) {
    table.threshold[octave] = {map.octave_threshold[octave]};
    for (const int above : {0, 1}) {
      const int segment = map.octave_segment[octave] + above, line = octave + above * CodeTable::kOctaves;
      if (segment >= CodeMap::kSegments) continue;
      if (segment < 0) {
        table.line[line] = {0, static_cast<float>(map.floor)};
        table.last[line] = {map.floor};
      } else {
        table.line[line] = {map.slope[segment], map.start[segment]};
        table.last[line] = {map.last[segment]};
      }
    }
  }
}

// The levels of level_of<Storage::kFloat8>(). Shares below half of level one, and those of the next three
// exponents, have lines of their own, although all have the steps of kLeast.
void add_exponents(const CodeMap& map, CodeTable& table) {
  constexpr int32_t kLeast = kBias - kFloat8Bias + 1, kFirst = kLeast - kFloat8Mantissa - 2;
  table.least_share = from_bits(kFirst << kMantissa);
  std::fill(std::begin(table.threshold), std::end(table.threshold), CodeTable::Threshold{kInfinity});
  std::fill(std::begin(table.last), std::end(table.last), CodeTable::Last{kNone});
  for (int32_t exponent = kFirst; exponent < kFirst + CodeMap::kOctaves; ++exponent) {
    const int32_t e = std::max(exponent, kLeast);
    const auto before = static_cast<float>((e - kLeast) << kFloat8Mantissa);
    table.line[exponent % CodeTable::kOctaves] = {from_bits((2 * kBias + kFloat8Mantissa - e) << kMantissa),
                                                  before + 0.5f};
  }
  if (map.floor > 0) table.line[kFirst % CodeTable::kOctaves] = {0, static_cast<float>(map.floor)};
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
