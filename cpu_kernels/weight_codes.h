// Weights of 16 bits to their float32 values and back (src/core/weight_code.h): in registers, and to tiles.
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "cpu_kernels/codecs.h"
#include "src/core/task.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// The place of a weight, and of what is kept beside it. Of weights that are rounded at random: the key of the
// random numbers, and the index of the first element by rows and columns, modulo 2^32.
struct CodedWeight {
  void *weight, *beside;
  uint64_t range;
  uint32_t first;
};

// A register of bits, and the lower halves of its words.
using Bits = Vector<uint32_t>;
using LowerHalves [[gnu::vector_size(kRegisterBytes / 2)]] = int16_t;

FUSEDSTEP_FN void store_lower_halves(void* to, const Bits& words) {
  const auto halves = __builtin_convertvector(words, LowerHalves);
  std::memcpy(to, &halves, sizeof halves);
}
// Bits of numbers, with one NaN for all.
FUSEDSTEP_FN Bits bits_to_keep(const Pack<float>& x) {
  // NOLINTNEXTLINE(misc-redundant-expression): NaN is not
  return x.v == x.v ? reinterpret_cast<Bits>(x.v) : kNaNBits + Bits{};
}
FUSEDSTEP_FN Bits counted_from(uint32_t first) {
  std::array<uint32_t, kRegisterBytes / sizeof(uint32_t)> count{};
  for (uint32_t i = 0; i < count.size(); ++i) count[i] = i;
  return std::bit_cast<Bits>(count) + first;
}

// A weight in a code: reads its value and keeps a new one.
template <WeightCode kCode>
struct InCode {
  using Stored = std::conditional_t<kCode == WeightCode::kKahanHalf, f16, bf16>;
  static constexpr bool kHasBeside = kCode != WeightCode::kRandom;

  // The value of element i, or those from there on.
  template <class V>
  FUSEDSTEP_FN static V value(const CodedWeight& from, int64_t i) {
    const auto* const weight = static_cast<const Stored*>(from.weight);
    if constexpr (requires(V group) { group.part; }) {
      return V::of([&](int k) { return value<Pack<float>>(from, i + k * Pack<float>::size()); });
    } else if constexpr (kCode == WeightCode::kRandom) {
      return load<V>(weight, i);
    } else if constexpr (kCode != WeightCode::kSplit) {
      return load<V>(weight, i) + load<V>(static_cast<const Stored*>(from.beside), i);
    } else if constexpr (std::is_same_v<V, float>) {
      return std::bit_cast<float>(joined(weight[i].bits, static_cast<const int16_t*>(from.beside)[i]));
    } else {
      const auto upper = load<V>(weight, i);
      LowerHalves lower;
      std::memcpy(&lower, static_cast<const int16_t*>(from.beside) + i, sizeof lower);
      const V sum(reinterpret_cast<Vector<float>>(reinterpret_cast<Vector<int32_t>>(upper.v) +
                                                  __builtin_convertvector(lower, Vector<int32_t>)));
      return where_equal(sum, sum, sum, upper);  // NaN where joined() leaves `low` out
    }
  }

  template <class V>
  FUSEDSTEP_FN static void keep(const CodedWeight& to, int64_t i, const V& value) {
    auto* const weight = static_cast<Stored*>(to.weight);
    if constexpr (requires { value.part; }) {
#pragma GCC unroll 4
      for (const auto& part : value.part) keep(to, i + (&part - value.part) * part.size(), part);
    } else if constexpr (kCode == WeightCode::kRandom) {
      keep_rounded(to, weight + i, to.first + static_cast<uint32_t>(i), value);
    } else if constexpr (kCode == WeightCode::kSplit) {
      keep_split(weight + i, static_cast<int16_t*>(to.beside) + i, value);
    } else {
      // The rounding error is exact, and is left out where the weight is not finite.
      using rules::where_equal;
      const V zero(0.0f);
      store(weight, i, value);
      const V error = value - load<V>(weight, i);
      store(static_cast<Stored*>(to.beside), i, where_equal(error * zero, zero, error, zero));
    }
  }

 private:
  FUSEDSTEP_FN static void keep_rounded(const CodedWeight& to, bf16* weight, uint32_t index, float value) {
    weight->bits = rounded_by(std::bit_cast<uint32_t>(value), draw(to.range, index));
  }
  FUSEDSTEP_FN static void keep_rounded(const CodedWeight& to, bf16* weight, uint32_t index,
                                        const Pack<float>& value) {
    const Bits bits = bits_to_keep(value), random = draw(to.range, counted_from(index));
    const Bits added = (bits & 0x7fffffffu) >= kLargestBf16 ? 0x8000u + Bits{} : random;
    store_lower_halves(weight, (bits + added) >> 16);
  }
  FUSEDSTEP_FN static void keep_split(bf16* weight, int16_t* low, float value) {
    split(std::bit_cast<uint32_t>(value), weight->bits, *low);
  }
  FUSEDSTEP_FN static void keep_split(bf16* weight, int16_t* low, const Pack<float>& value) {
    const Bits bits = bits_to_keep(value);
    store_lower_halves(weight, (bits + 0x8000u) >> 16);
    store_lower_halves(low, bits);
  }
};

// Calls run(InCode()) with the code.
template <class Run>
FUSEDSTEP_FN void by_weight_code(WeightCode code, Run run) {
  if (code == WeightCode::kSplit) run(InCode<WeightCode::kSplit>());
  if (code == WeightCode::kKahanBf16) run(InCode<WeightCode::kKahanBf16>());
  if (code == WeightCode::kKahanHalf) run(InCode<WeightCode::kKahanHalf>());
  if (code == WeightCode::kRandom) run(InCode<WeightCode::kRandom>());
}

// Calls run(v, i) for every element: with a null pointer to the type of a register, or of one of the last.
template <class Run>
FUSEDSTEP_FN void for_registers(int64_t count, Run run) {
  int64_t i = 0;
  for (; i + Pack<float>::size() <= count; i += Pack<float>::size()) {
    run(static_cast<Pack<float>*>(nullptr), i);
  }
  for (; i < count; ++i) run(static_cast<float*>(nullptr), i);
}

// To values on a tile, and these rounded to nearest, which a kernel takes for the weight.
inline void decode_weight(WeightCode code, const CodedWeight& from, int64_t count, float* value,
                          void* nearest) {
  by_weight_code(code, [&]<class Form>(Form) {
    for_registers(
        count, [&]<class V>(V*, int64_t i) __attribute__((always_inline)) {
          const V x = Form::template value<V>(from, i);
          store(value, i, x);
          store(static_cast<typename Form::Stored*>(nearest), i, x);
        });
  });
}
inline void encode_weight(WeightCode code, const CodedWeight& to, int64_t count, const float* value) {
  by_weight_code(code, [&]<class Form>(Form) {
    for_registers(
        count, [&]<class V>(V*, int64_t i)
                   __attribute__((always_inline)) { Form::keep(to, i, load<V>(value, i)); });
  });
}

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
