// Weights of 16 bits to their float32 values on a tile, and back (src/core/weight_code.h).
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

#include "cpu_kernels/codecs.h"
#include "src/core/task.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// Elements of a tile: the weight, what is kept beside it, the value, and the value rounded to nearest, which
// a kernel takes for the weight. `index` is that of the first element by rows and columns.
struct WeightTile {
  void *weight, *beside;
  float* value;
  void* nearest;
  int64_t index, count;
};

inline void decode_split(const WeightTile& tile) {
  using Words = Vector<int32_t>;
  using Lower [[gnu::vector_size(sizeof(Words) / 2)]] = int16_t;
  constexpr int64_t kSize = Pack<float>::size();
  const auto* const weight = static_cast<const bf16*>(tile.weight);
  const auto* const low = static_cast<const int16_t*>(tile.beside);
  auto* const nearest = static_cast<bf16*>(tile.nearest);
  int64_t i = 0;
  for (; i + kSize <= tile.count; i += kSize) {
    const auto upper = load<Pack<float>>(weight, i);
    Lower lower;
    std::memcpy(&lower, low + i, sizeof lower);
    const Words bits = reinterpret_cast<Words>(upper.v) + __builtin_convertvector(lower, Words);
    const Pack<float> sum(reinterpret_cast<Vector<float>>(bits));
    const Pack<float> value = where_equal(sum, sum, sum, upper);  // a NaN where joined() leaves `low` out
    store(tile.value, i, value);
    store(nearest, i, value);
  }
  for (; i < tile.count; ++i) {
    const uint32_t bits = joined(weight[i].bits, low[i]);
    tile.value[i] = std::bit_cast<float>(bits);
    nearest[i].bits = nearest_bf16(bits);
  }
}
// The compiler makes vector code of the loops over integers: no other is faster.
inline void encode_split(const WeightTile& tile) {
  const auto* __restrict value = tile.value;
  auto* __restrict weight = static_cast<uint16_t*>(tile.weight);
  auto* __restrict low = static_cast<int16_t*>(tile.beside);
  for (int64_t i = 0; i < tile.count; ++i) split(std::bit_cast<uint32_t>(value[i]), weight[i], low[i]);
}

inline void decode_random(const WeightTile& tile) {
  const auto* __restrict weight = static_cast<const uint16_t*>(tile.weight);
  auto* __restrict value = tile.value;
  for (int64_t i = 0; i < tile.count; ++i) value[i] = std::bit_cast<float>(uint32_t{weight[i]} << 16);
  std::memcpy(tile.nearest, weight, tile.count * sizeof(uint16_t));
}
inline void encode_random(const WeightTile& tile, uint64_t draws) {
  const uint64_t range = key_of_range(draws, static_cast<uint64_t>(tile.index));
  const auto first = static_cast<uint32_t>(tile.index), count = static_cast<uint32_t>(tile.count);
  const auto* __restrict value = tile.value;
  auto* __restrict weight = static_cast<uint16_t*>(tile.weight);
  for (uint32_t i = 0; i < count; ++i) {
    weight[i] = rounded_by(std::bit_cast<uint32_t>(value[i]), draw(range, first + i));
  }
}

// The rounding error is exact, and is left out where the weight is not finite.
template <class V, class Stored>
FUSEDSTEP_FN void decode_kahan_at(const WeightTile& tile, int64_t i) {
  const V sum = load<V>(static_cast<const Stored*>(tile.weight), i) +
                load<V>(static_cast<const Stored*>(tile.beside), i);
  store(tile.value, i, sum);
  store(static_cast<Stored*>(tile.nearest), i, sum);
}
template <class V, class Stored>
FUSEDSTEP_FN void encode_kahan_at(const WeightTile& tile, int64_t i) {
  using rules::where_equal;
  auto* const weight = static_cast<Stored*>(tile.weight);
  const V value = load<V>(static_cast<const float*>(tile.value), i), zero(0.0f);
  store(weight, i, value);
  const V error = value - load<V>(static_cast<const Stored*>(weight), i);
  store(static_cast<Stored*>(tile.beside), i, where_equal(error * zero, zero, error, zero));
}
template <class Stored>
void decode_kahan(const WeightTile& tile) {
  int64_t i = 0;
  for (; i + Pack<float>::size() <= tile.count; i += Pack<float>::size()) {
    decode_kahan_at<Pack<float>, Stored>(tile, i);
  }
  for (; i < tile.count; ++i) decode_kahan_at<float, Stored>(tile, i);
}
template <class Stored>
void encode_kahan(const WeightTile& tile) {
  int64_t i = 0;
  for (; i + Pack<float>::size() <= tile.count; i += Pack<float>::size()) {
    encode_kahan_at<Pack<float>, Stored>(tile, i);
  }
  for (; i < tile.count; ++i) encode_kahan_at<float, Stored>(tile, i);
}

inline void decode_weight(const TensorTask& task, const WeightTile& tile) {
  if (task.weight_code == WeightCode::kSplit) decode_split(tile);
  if (task.weight_code == WeightCode::kKahanBf16) decode_kahan<bf16>(tile);
  if (task.weight_code == WeightCode::kKahanHalf) decode_kahan<f16>(tile);
  if (task.weight_code == WeightCode::kRandom) decode_random(tile);
}
inline void encode_weight(const TensorTask& task, const WeightTile& tile) {
  if (task.weight_code == WeightCode::kSplit) encode_split(tile);
  if (task.weight_code == WeightCode::kKahanBf16) encode_kahan<bf16>(tile);
  if (task.weight_code == WeightCode::kKahanHalf) encode_kahan<f16>(tile);
  if (task.weight_code == WeightCode::kRandom) encode_random(tile, task.draws);
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
