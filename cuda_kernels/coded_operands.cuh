// The operands of tensors whose states are in codes, or whose weights keep their value in one of the ways of
// src/core/weight_code.h, or both: a warp has 256 elements, which are a block of codes, or two of int4. Each
// of its threads has four of either half, so that its accesses are whole words. The maths is that of float32
// states and master copies.
#pragma once
#include <type_traits>

#include "cuda_kernels/reduce.cuh"
#include "src/core/code_map.h"

namespace fusedstep::cuda {

constexpr int kHalves = 2, kInHalf = 4, kHalfElements = kWarp * kInHalf, kWarps = kThreads / kWarp;
constexpr int kCodedWidth = kHalves * kInHalf;
constexpr int kPartElements = kThreads * kCodedWidth, kCodedParts = kChunkElements / kPartElements;
static_assert(kHalfElements == kSegmentElements);

// Four codes of a byte each from four of half a byte, of which the upper half comes first, and back.
__device__ __forceinline__ uint32_t spread(uint32_t halves) {
  return (halves >> 4 & 15) | (halves & 15) << 8 | (halves >> 12 & 15) << 16 | (halves >> 8 & 15) << 24;
}
__device__ __forceinline__ uint32_t squeezed(uint32_t codes) {
  return (codes & 15) << 4 | (codes >> 8 & 15) | (codes >> 16 & 15) << 12 | (codes >> 24 & 15) << 8;
}

// code_of() of src/core/code_map.h, the same for all maps.
__device__ __forceinline__ uint32_t code_of(const CodeTable& table, float number, float share) {
  const float magnitude = rules::absolute(share);
  const float at = magnitude < table.least_share ? table.least_share : magnitude;
  unsigned line = static_cast<unsigned>(bits_of(at)) >> kMantissa & (CodeTable::kOctaves - 1);
  if (magnitude > table.threshold[line].share) line += CodeTable::kOctaves;
  const CodeTable::Line by = table.line[line];
  auto level = static_cast<int32_t>(magnitude * by.slope + by.start);
  level = level < table.last[line].level ? level : table.last[line].level;
  if (number < table.below) {
    level = level < table.most ? level : table.most;
    level = level > table.least ? level : table.least;
    return static_cast<uint32_t>(level * table.factor + table.negative);
  }
  return static_cast<uint32_t>(level + table.zero);
}

// Elements of a thread in a part of a chunk: four neighbours of either half, or as many as there are. kWhole:
// all of the block's threads have eight, and all operands are dense and aligned to words.
__device__ __forceinline__ bool is_whole(const Chunk& chunk, int part, bool in_words) {
  return in_words && chunk.end - chunk.begin >= (part + 1) * kPartElements;
}
template <bool kWhole>
struct Eight {
  static constexpr bool whole = kWhole;

  int64_t of_warp;  // the first element of the warp
  int left;         // elements that the warp has; less than one: none

  __device__ Eight(const Chunk& chunk, int part) {
    const int64_t begin = chunk.begin + part * kPartElements;
    of_warp = begin + static_cast<int>(threadIdx.x) / kWarp * (kHalves * kHalfElements);
    const int64_t behind = chunk.end - of_warp;
    constexpr int kAll = kHalves * kHalfElements;
    left = kWhole || behind >= kAll ? kAll : static_cast<int>(behind);
  }

  __device__ __forceinline__ int64_t first(int half) const {
    return of_warp + static_cast<int>(threadIdx.x) % kWarp * kInHalf + half * kHalfElements;
  }
  __device__ __forceinline__ int count(int half) const {
    if (kWhole) return kInHalf;
    const int mine = left - half * kHalfElements - static_cast<int>(threadIdx.x) % kWarp * kInHalf;
    return mine >= kInHalf ? kInHalf : mine > 0 ? mine : 0;
  }
};

// Eight elements that are not whole, as they are in memory.
template <class Word>
__device__ __noinline__ void load_in_order(const BlockLayout& layout, int operand, const Word* from,
                                           const Eight<false>& at, Word* x) {
#pragma unroll 1
  for (int half = 0; half < kHalves; ++half) {
    for_in_order(layout, operand, at.first(half), at.count(half),
                 [&](int j, int64_t offset) { x[half * kInHalf + j] = from[offset]; });
  }
}
template <class Word>
__device__ __noinline__ void store_in_order(const BlockLayout& layout, int operand, Word* to,
                                            const Eight<false>& at, const Word* x) {
#pragma unroll 1
  for (int half = 0; half < kHalves; ++half) {
    for_in_order(layout, operand, at.first(half), at.count(half),
                 [&](int j, int64_t offset) { to[offset] = x[half * kInHalf + j]; });
  }
}

// Bytes of codes from and to a half that is not whole.
__device__ inline uint32_t load_bytes(const uint8_t* from, int bytes) {
  uint32_t found = 0;
#pragma unroll 1
  for (int b = 0; b < bytes; ++b) found |= static_cast<uint32_t>(from[b]) << 8 * b;
  return found;
}
__device__ inline void store_bytes(uint32_t codes, uint8_t* to, int bytes) {
#pragma unroll 1
  for (int b = 0; b < bytes; ++b) to[b] = static_cast<uint8_t>(codes >> 8 * b);
}

// A thread's part of the states of a tensor, as they are stored. Each code is a byte.
template <int kStates>
struct StateCodes {
  uint8_t* place[kStates];  // of the first half
  bool halves[kStates];
  uint32_t codes[kStates][kHalves];
  float absmax[kStates][kHalves];
};

// A word of a table by which a step rounds: two thresholds and their gaps, or slopes and starts of two lines.
__device__ __forceinline__ float4 rounding_by(float rounding, int word, float4 of) {
  constexpr int kWord = sizeof(float4);
  constexpr int kThresholds = offsetof(CodeTable, threshold) / kWord,
                kLines = offsetof(CodeTable, line) / kWord, kLasts = offsetof(CodeTable, last) / kWord;
  static_assert(offsetof(CodeTable, threshold) % kWord == 0 && offsetof(CodeTable, line) % kWord == 0 &&
                offsetof(CodeTable, last) % kWord == 0 && kThresholds < kLines && kLines < kLasts);
  if (word < kThresholds || word >= kLasts) return of;
  if (word < kLines) {
    return {moved_threshold(of.x, of.y, rounding), of.y, moved_threshold(of.z, of.w, rounding), of.w};
  }
  return {of.x, moved_start(of.x, of.y, rounding), of.z, moved_start(of.z, of.w, rounding)};
}

// Tables are shared by the threads of a block, which wait for them.
template <int kStates>
__device__ __forceinline__ void load_tables(const Launch& launch, const Chunk& chunk,
                                            CodeTable (&tables)[kStates]) {
  constexpr int kWords = sizeof(CodeTable) / sizeof(float4);
  static_assert(kWords <= kThreads && sizeof(CodeTable) % sizeof(float4) == 0);
  const TensorTask& task = launch.tensors[chunk.tensor];
  wait_for_kernel_before();  // which may have prepared scalars
  const float rounding = launch.scalars_of_tensor != nullptr ? launch.scalars_of_tensor[chunk.tensor].rounding
                                                             : launch.scalars.rounding;
#pragma unroll
  for (int k = 0; k < kStates; ++k) {
    const auto* const from = reinterpret_cast<const float4*>(task.coded[k].table);
    auto* const to = reinterpret_cast<float4*>(&tables[k]);
    if (const int word = static_cast<int>(threadIdx.x); word < kWords) {
      to[word] = task.coded[k].halves ? from[word] : rounding_by(rounding, word, from[word]);
    }
  }
  __syncthreads();
}

// The storage of a tensor's states.
enum class StatesIn { kCodes, kFloats };

// Codes and tables of states that have none.
struct NoCodes {};
__device__ __forceinline__ void load_tables(const Launch&, const Chunk&, NoCodes&) {}

// A rule's operands in registers. The weight is there by its value.
template <class Rule_, class Weight, StatesIn kStatesIn, bool kWhole>
class Coded : public Operands<Rule_, typename StoredOf<Weight>::Type, float> {
  using Plain = Operands<Rule_, typename StoredOf<Weight>::Type, float>;

 public:
  using Rule = Rule_;
  using Stored = typename Plain::Stored;
  static constexpr bool kInCodes = kStatesIn == StatesIn::kCodes;
  static constexpr bool kKeepsValue = StoredOf<Weight>::kHasMaster, kIsBf16 = std::is_same_v<Stored, bf16>;
  static constexpr int kStates = Rule::kStates, kBeside = kFirstState + kStates;
  static constexpr int kOperands = Plain::kOperands + kKeepsValue;
  using Read = typename Plain::template Read<kCodedWidth>;
  using States = std::conditional_t<kInCodes, StateCodes<kStates>, NoCodes>;
  using Tables = std::conditional_t<kInCodes, CodeTable[kInCodes ? kStates : 1], NoCodes>;
  using At = Eight<kWhole>;

  // Without scalars: best when elements have been asked for.
  __device__ Coded(const Launch& launch, const Chunk& chunk)
      : Plain(launch, chunk, /*with_scalars=*/false), task_(launch.tensors[chunk.tensor]) {}

  template <Reuse kReuse>
  __device__ __forceinline__ void load_weight(const At& at, Read& read) const {
    load_plain<kReuse>(at, kWeight, this->weight, read.weight);
  }
  // Makes a weight that has been loaded its value: last, since what is kept beside it is waited for.
  template <Reuse kReuse>
  __device__ __forceinline__ void load_value(const At& at, Read& read) const {
    if constexpr (kKeepsValue) {
      if (task_.weight_code == WeightCode::kPlain) {
        load_copy<kReuse>(at, read.weight);
      } else if (is_compensated()) {
        load_compensated<kReuse>(at, read.weight);
      } else if (kIsBf16 && task_.weight_code == WeightCode::kSplit) {
        load_split<kReuse>(at, read.weight);
      }
    }
  }
  __device__ __forceinline__ void load_grad(const At& at, Read& read) const {
    load_plain<kOnce>(at, kGrad, this->grad, read.grad);
  }
  __device__ __forceinline__ void store_weight(const Launch& launch, const Chunk& chunk, const At& at,
                                               const Read& read) const {
    if constexpr (!kKeepsValue) {
      store_plain<kOnce>(at, kWeight, this->weight, read.weight);
    } else if (task_.weight_code == WeightCode::kPlain) {
      store_plain<kOnce>(at, kWeight, this->weight, read.weight);
      store_beside<float>(at, read.weight);
    } else if (is_compensated()) {
      store_compensated(at, read.weight);
    } else if (kIsBf16 && task_.weight_code == WeightCode::kSplit) {
      store_split(at, read.weight);
    } else if (kIsBf16) {
      const uint64_t* const of_tensor = launch.draws_of_tensor;
      const uint64_t step = of_tensor != nullptr ? of_tensor[chunk.tensor] : launch.draws;
      store_at_random(at, read.weight, key_of_place(step, task_.place));
    }
  }
  __device__ __forceinline__ void store_grad(const At& at, const Read& read) const {
    store_plain<kAgain>(at, kGrad, this->grad, read.grad);
  }
  __device__ __forceinline__ void clear_grad(const At& at) const {
    constexpr float kZeros[kCodedWidth] = {};
    store_plain<kOnce>(at, kGrad, this->grad, kZeros);
  }
  __device__ __forceinline__ void scale_grad(const At& at, Read& read) const {
#pragma unroll
    for (float& x : read.grad) x = Codec<Stored>::decode(Codec<Stored>::encode(x * this->scale));
    store_plain<kOnce>(at, kGrad, this->grad, read.grad);
  }

  __device__ __forceinline__ void load_states(const At& at, States& states, Read& read) const {
    if constexpr (kInCodes) {
      load_codes(at, states);
    } else {
      for_states([&](int k) { load_plain<kOnce>(at, kFirstState + k, this->state[k], read.state[k]); });
    }
  }
  // For all threads of a warp.
  __device__ __forceinline__ void store_states(const At& at, const Tables& tables, const States& states,
                                               Read& read) const {
    if constexpr (kInCodes) {
      store_codes(at, tables, states, read);
    } else {
      for_states([&](int k) { store_plain<kOnce>(at, kFirstState + k, this->state[k], read.state[k]); });
    }
  }
  // Makes codes that have been loaded states.
  __device__ __forceinline__ void decode(const Tables& tables, const States& states, Read& read) const {
    if constexpr (kInCodes) decode_codes(tables, states, read);
  }

 private:
  __device__ __forceinline__ void load_codes(const At& at, States& states) const {
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      const CodedTask& of = task_.coded[k];
      const bool halves = states.halves[k] = of.halves;
      const int64_t first = at.first(0);
      uint8_t* const place =
          static_cast<uint8_t*>(task_.data[kFirstState + k]) + (halves ? first / 2 : first);
      states.place[k] = place;
      const float* const absmax = of.absmax + first_block(halves, at);
      auto& codes = states.codes[k];
      auto& largest = states.absmax[k];
      if (halves) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const uint8_t* const from = place + half * (kHalfElements / 2);
          codes[half] = kWhole ? __ldcs(reinterpret_cast<const unsigned short*>(from))
                               : load_bytes(from, (at.count(half) + 1) / 2);
          largest[half] = at.left > half * kHalfElements ? absmax[half] : 0;
        }
      } else {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const uint8_t* const from = place + half * kHalfElements;
          codes[half] =
              kWhole ? __ldcs(reinterpret_cast<const unsigned*>(from)) : load_bytes(from, at.count(half));
        }
        largest[0] = largest[1] = at.left > 0 ? *absmax : 0;
      }
    }
  }
  __device__ __forceinline__ void decode_codes(const Tables& tables, const States& states, Read& read) const {
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      const bool halves = states.halves[k];
      const float top = tables[k].top;
      float scale[kHalves] = {states.absmax[k][0], states.absmax[k][1]};
      if (top != 1) {
#pragma unroll
        for (float& each : scale) each /= top;
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const uint32_t codes = halves ? spread(states.codes[k][half]) : states.codes[k][half];
#pragma unroll
        for (int j = 0; j < kInHalf; ++j) {
          read.state[k][half * kInHalf + j] = tables[k].value[codes >> 8 * j & 255] * scale[half];
        }
      }
    }
  }
  __device__ __forceinline__ void store_codes(const At& at, const Tables& tables, const States& states,
                                              Read& read) const {
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      if constexpr (!kWhole) {
#pragma unroll
        for (int i = 0; i < kCodedWidth; ++i) {
          if (i % kInHalf >= at.count(i / kInHalf)) read.state[k][i] = 0;
        }
      }
      int32_t largest[kHalves] = {};
#pragma unroll
      for (int i = 0; i < kCodedWidth; ++i) {
        const int32_t magnitude = bits_of(read.state[k][i]) & kMagnitudeBits;
        int32_t& most = largest[i / kInHalf];
        most = magnitude > most ? magnitude : most;
      }
      const float top = tables[k].top;
      const bool halves = states.halves[k];
      BlockScale scale[kHalves];
      float* const absmax = task_.coded[k].absmax + first_block(halves, at);
      const bool leads = threadIdx.x % kWarp == 0;
      if (halves) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          scale[half] = scale_of(largest_of_warp(largest[half]), top);
          if (leads && at.left > half * kHalfElements) absmax[half] = scale[half].absmax;
        }
      } else {
        const int32_t most = largest[0] > largest[1] ? largest[0] : largest[1];
        scale[0] = scale[1] = scale_of(largest_of_warp(most), top);
        if (leads && at.left > 0) *absmax = scale[0].absmax;
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        uint32_t codes = static_cast<uint32_t>(tables[k].zero) * 0x01010101u;
        if (scale[half].inverse != 0) {
          codes = 0;
#pragma unroll
          for (int j = 0; j < kInHalf; ++j) {
            const float number = read.state[k][half * kInHalf + j];
            codes |= cuda::code_of(tables[k], number, number * scale[half].inverse) << 8 * j;
          }
          // Half a byte that is of no element is zero.
          if (!kWhole) codes &= at.count(half) == kInHalf ? ~0u : (1u << 8 * at.count(half)) - 1;
        }
        if (halves) {
          codes = squeezed(codes);
          uint8_t* const to = states.place[k] + half * (kHalfElements / 2);
          if (kWhole) {
            __stcs(reinterpret_cast<unsigned short*>(to), static_cast<unsigned short>(codes));
          } else {
            store_bytes(codes, to, (at.count(half) + 1) / 2);
          }
        } else {
          uint8_t* const to = states.place[k] + half * kHalfElements;
          if (kWhole) {
            __stcs(reinterpret_cast<unsigned*>(to), codes);
          } else {
            store_bytes(codes, to, at.count(half));
          }
        }
      }
    }
  }

  static __device__ __forceinline__ int32_t largest_of_warp(int32_t mine) {
    return static_cast<int32_t>(__reduce_max_sync(0xffffffffu, static_cast<uint32_t>(mine)));
  }
  static __device__ __forceinline__ int64_t first_block(bool halves, const At& at) {
    return halves ? at.of_warp / kHalfElements : at.of_warp / (kHalves * kHalfElements);
  }
  template <class Run>
  static __device__ __forceinline__ void each(const Run& run) {
#pragma unroll
    for (int i = 0; i < kCodedWidth; ++i) run(i);
  }
  template <class Run>
  static __device__ __forceinline__ void for_states(const Run& run) {
#pragma unroll
    for (int k = 0; k < kStates; ++k) run(k);
  }

  // The ways of src/core/weight_code.h.

  using Values = float[kCodedWidth];

  __device__ __forceinline__ bool is_compensated() const {
    return task_.weight_code == WeightCode::kKahanBf16 || task_.weight_code == WeightCode::kKahanHalf;
  }
  template <Reuse kReuse>
  __device__ __forceinline__ void load_copy(const At& at, Values& weight) const {
    float copy[kCodedWidth];
    load_beside<kReuse, float>(at, copy);
    each([&](int i) {
      const float rounded = Codec<Stored>::decode(Codec<Stored>::encode(copy[i]));
      weight[i] = rules::where_equal(rounded, weight[i], copy[i], weight[i]);
    });
  }
  template <Reuse kReuse>
  __device__ __forceinline__ void load_compensated(const At& at, Values& weight) const {
    float error[kCodedWidth];
    load_beside<kReuse, Stored>(at, error);
    each([&](int i) { weight[i] += error[i]; });
  }
  template <Reuse kReuse>
  __device__ __forceinline__ void load_split(const At& at, Values& weight) const {
    int16_t low[kCodedWidth];
    load_beside<kReuse, int16_t>(at, low);
    each([&](int i) {
      const auto upper = static_cast<uint16_t>(static_cast<uint32_t>(bits_of(weight[i])) >> 16);
      weight[i] = from_bits(static_cast<int32_t>(joined(upper, low[i])));
    });
  }
  __device__ __forceinline__ void store_compensated(const At& at, const Values& value) const {
    float weight[kCodedWidth], error[kCodedWidth];
    each([&](int i) {
      weight[i] = Codec<Stored>::decode(Codec<Stored>::encode(value[i]));
      const float exact = value[i] - weight[i];
      error[i] = rules::where_equal(exact * 0.0f, 0.0f, exact, 0.0f);
    });
    store_plain<kOnce>(at, kWeight, this->weight, weight);
    store_beside<Stored>(at, error);
  }
  __device__ __forceinline__ void store_split(const At& at, const Values& value) const {
    uint16_t weight[kCodedWidth];
    int16_t low[kCodedWidth];
    each([&](int i) { split(static_cast<uint32_t>(bits_of(value[i])), weight[i], low[i]); });
    store_plain<kOnce>(at, kWeight, reinterpret_cast<uint16_t*>(this->weight), weight);
    store_beside<int16_t>(at, low);
  }
  __device__ __forceinline__ void store_at_random(const At& at, const Values& value, uint64_t draws) const {
    uint16_t weight[kCodedWidth];
    const uint64_t range = key_of_range(draws, static_cast<uint64_t>(at.of_warp));
    each([&](int i) {
      const uint32_t index = static_cast<uint32_t>(at.first(i / kInHalf)) + i % kInHalf;
      weight[i] = rounded_by(static_cast<uint32_t>(bits_of(value[i])), draw(range, index));
    });
    store_plain<kOnce>(at, kWeight, reinterpret_cast<uint16_t*>(this->weight), weight);
  }

  template <Reuse kReuse, class T>
  __device__ __forceinline__ void load_beside(const At& at, ComputeOf<T> (&x)[kCodedWidth]) const {
    load_plain<kReuse>(at, kBeside, static_cast<const T*>(task_.data[kBeside]), x);
  }
  template <class T>
  __device__ __forceinline__ void store_beside(const At& at, const ComputeOf<T> (&x)[kCodedWidth]) const {
    store_plain<kOnce>(at, kBeside, static_cast<T*>(task_.data[kBeside]), x);
  }
  template <Reuse kReuse, class T>
  __device__ __forceinline__ void load_plain(const At& at, int operand, const T* from,
                                             ComputeOf<T> (&x)[kCodedWidth]) const {
    if constexpr (!kWhole) {
      using Bits = typename Word<sizeof(T)>::Type;
      Bits found[kCodedWidth] = {};  // in memory
      load_in_order(task_.layout, operand, reinterpret_cast<const Bits*>(from), at, found);
      T stored[kCodedWidth];
      memcpy(static_cast<void*>(stored), found, sizeof found);
      each([&](int i) { x[i] = Codec<T>::decode(stored[i]); });
    } else {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        ComputeOf<T> some[kInHalf];
        load<kReuse>(from + at.first(half), some);
#pragma unroll
        for (int j = 0; j < kInHalf; ++j) x[half * kInHalf + j] = some[j];
      }
    }
  }
  template <Reuse kReuse, class T>
  __device__ __forceinline__ void store_plain(const At& at, int operand, T* to,
                                              const ComputeOf<T> (&x)[kCodedWidth]) const {
    if constexpr (!kWhole) {
      using Bits = typename Word<sizeof(T)>::Type;
      T stored[kCodedWidth];
      each([&](int i) { stored[i] = Codec<T>::encode(x[i]); });
      Bits left[kCodedWidth];  // in memory
      memcpy(left, static_cast<const void*>(stored), sizeof left);
      store_in_order(task_.layout, operand, reinterpret_cast<Bits*>(to), at, left);
    } else {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        ComputeOf<T> some[kInHalf];
#pragma unroll
        for (int j = 0; j < kInHalf; ++j) some[j] = x[half * kInHalf + j];
        store<kReuse>(to + at.first(half), some);
      }
    }
  }

  const TensorTask& task_;
};

}  // namespace fusedstep::cuda
