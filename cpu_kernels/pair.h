// Two registers of floats as one, for AVX-512: what one of them waits for, the other one's work fills.
#pragma once
#include <type_traits>

#include "cpu_kernels/codecs.h"
#include "cpu_kernels/root.h"
#include "src/operands.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// What a kernel over these operands goes by, and whether its results are exact in the caller's rounding mode.
// Where there are no pairs it is a register.
template <class Weight, class State>
struct Pairs {
  using Type = Pack<typename Codec<typename StoredOf<Weight>::Type>::Compute>;
  using InOrder = Type;
  FUSEDSTEP_FN static constexpr bool are_exact() { return false; }
};

#if defined(CPU_CAPABILITY_AVX512)

// Where the elements of the second register are: behind those of the first, or each beside its counterpart.
enum class Order { kBehind, kBeside };

// Its second root avoids the divider, which would otherwise bound a loop.
template <Order kOrder>
struct PackPair {
  Pack<float> first, second;

  static constexpr int size() { return 2 * Pack<float>::size(); }

  PackPair() = default;
  FUSEDSTEP_FN explicit PackPair(float x) : first(x), second(x) {}
  FUSEDSTEP_FN PackPair(const Pack<float>& a, const Pack<float>& b) : first(a), second(b) {}

  template <class Stored>
  FUSEDSTEP_FN static PackPair load(const Stored* x) {
    if constexpr (kOrder == Order::kBehind) {
      return {Codec<Stored>::load(x), Codec<Stored>::load(x + Pack<float>::size())};
    } else {
      PackPair pair;
      Codec<Stored>::load_beside(x, pair.first, pair.second);
      return pair;
    }
  }
  template <class Stored>
  FUSEDSTEP_FN void store(Stored* to) const {
    if constexpr (kOrder == Order::kBehind) {
      Codec<Stored>::store(to, first);
      Codec<Stored>::store(to + Pack<float>::size(), second);
    } else {
      Codec<Stored>::store_beside(to, first, second);
    }
  }

  FUSEDSTEP_FN friend PackPair operator+(const PackPair& a, const PackPair& b) {
    return {a.first + b.first, a.second + b.second};
  }
  FUSEDSTEP_FN friend PackPair operator-(const PackPair& a, const PackPair& b) {
    return {a.first - b.first, a.second - b.second};
  }
  FUSEDSTEP_FN friend PackPair operator*(const PackPair& a, const PackPair& b) {
    return {a.first * b.first, a.second * b.second};
  }
  FUSEDSTEP_FN friend PackPair operator/(const PackPair& a, const PackPair& b) {
    return {a.first / b.first, a.second / b.second};
  }
  FUSEDSTEP_FN friend PackPair operator-(const PackPair& a) { return {-a.first, -a.second}; }
  FUSEDSTEP_FN friend PackPair square_root(const PackPair& a) {
    return {square_root(a.first), estimated_square_root(a.second)};
  }
  FUSEDSTEP_FN friend PackPair maximum(const PackPair& a, const PackPair& b) {
    return {maximum(a.first, b.first), maximum(a.second, b.second)};
  }
  FUSEDSTEP_FN friend PackPair mul_add(const PackPair& a, const PackPair& b, const PackPair& c) {
    return {mul_add(a.first, b.first, c.first), mul_add(a.second, b.second, c.second)};
  }
  FUSEDSTEP_FN friend PackPair where_equal(const PackPair& a, const PackPair& b, const PackPair& x,
                                           const PackPair& y) {
    return {where_equal(a.first, b.first, x.first, y.first),
            where_equal(a.second, b.second, x.second, y.second)};
  }
};

template <class Weight, class State>
requires(!std::is_same_v<Weight, double>) struct Pairs<Weight, State> {
  static constexpr bool kAllBf16 = std::is_same_v<Weight, bf16> && std::is_same_v<State, bf16>;
  using Type = PackPair<kAllBf16 ? Order::kBeside : Order::kBehind>;
  using InOrder = PackPair<Order::kBehind>;  // for sums by lanes
  FUSEDSTEP_FN static bool are_exact() { return estimated_roots_are_exact(); }
};

#endif

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
