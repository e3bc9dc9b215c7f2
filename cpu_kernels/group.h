// Registers of floats that are worked on together, for AVX-512: what one of them waits for, the others' work
// fills.
#pragma once
#include <type_traits>

#include "cpu_kernels/codecs.h"
#include "cpu_kernels/root.h"
#include "src/core/operands.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// Unit of a kernel's loop over these operands: a group of `kRegisters` registers, or one register where there
// are no groups. are_exact() is true if the results are exact in the caller's rounding mode.
template <class Weight, class State>
struct Groups {
  template <int kRegisters>
  using Type = Pack<typename Codec<typename StoredOf<Weight>::Type>::Compute>;
  template <int kRegisters>
  using InOrder = Type<kRegisters>;
  template <int kRegisters>
  using Divided = Type<kRegisters>;
  static constexpr bool kExist = false;
  FUSEDSTEP_FN static constexpr bool are_exact() { return true; }
};

#if defined(__AVX512F__)

// Order of the elements of several registers: one register's behind those of another, or those of two
// registers in turn.
enum class Order { kBehind, kBeside };

// The roots of kEstimated registers avoid the divider, which would otherwise bound a loop.
template <Order kOrder, int kRegisters, int kEstimated = kRegisters / 2>
struct PackGroup {
  using Number = float;
  Pack<float> part[kRegisters];

  static constexpr int size() { return kRegisters * Pack<float>::size(); }

  PackGroup() = default;
  FUSEDSTEP_FN explicit PackGroup(float x) : PackGroup(of([&](int) { return Pack<float>(x); })) {}

  // The group whose k-th register is get(k).
  template <class Get>
  FUSEDSTEP_FN static PackGroup of(Get get) {
    PackGroup group;
#pragma GCC unroll 4
    for (int k = 0; k < kRegisters; ++k) group.part[k] = get(k);
    return group;
  }

  template <class Stored>
  FUSEDSTEP_FN static PackGroup load(const Stored* x) {
    if constexpr (kOrder == Order::kBehind) {
      return of([&](int k) { return Codec<Stored>::load(x + k * Pack<float>::size()); });
    } else {
      PackGroup group;
#pragma GCC unroll 4
      for (int k = 0; k < kRegisters; k += 2) {
        Codec<Stored>::load_beside(x + k * Pack<float>::size(), group.part[k], group.part[k + 1]);
      }
      return group;
    }
  }
  template <class Stored>
  FUSEDSTEP_FN void store(Stored* to) const {
    constexpr int kStep = kOrder == Order::kBehind ? 1 : 2;
#pragma GCC unroll 4
    for (int k = 0; k < kRegisters; k += kStep) {
      Stored* const at = to + k * Pack<float>::size();
      if constexpr (kOrder == Order::kBehind) {
        Codec<Stored>::store(at, part[k]);
      } else {
        Codec<Stored>::store_beside(at, part[k], part[k + 1]);
      }
    }
  }

  FUSEDSTEP_FN friend PackGroup operator+(const PackGroup& a, const PackGroup& b) {
    return of([&](int k) { return a.part[k] + b.part[k]; });
  }
  FUSEDSTEP_FN friend PackGroup operator-(const PackGroup& a, const PackGroup& b) {
    return of([&](int k) { return a.part[k] - b.part[k]; });
  }
  FUSEDSTEP_FN friend PackGroup operator*(const PackGroup& a, const PackGroup& b) {
    return of([&](int k) { return a.part[k] * b.part[k]; });
  }
  FUSEDSTEP_FN friend PackGroup operator/(const PackGroup& a, const PackGroup& b) {
    return of([&](int k) { return a.part[k] / b.part[k]; });
  }
  FUSEDSTEP_FN friend PackGroup operator-(const PackGroup& a) {
    return of([&](int k) { return -a.part[k]; });
  }
  FUSEDSTEP_FN friend PackGroup square_root(const PackGroup& a) {
    PackGroup root;
    constexpr int kDivider = kRegisters - kEstimated;
#pragma GCC unroll 4
    for (int k = 0; k < kDivider; ++k) root.part[k] = square_root(a.part[k]);
    if constexpr (kEstimated != 0) {
      estimated_square_roots<kEstimated>(a.part + kDivider, root.part + kDivider);
    }
    return root;
  }
  FUSEDSTEP_FN friend PackGroup maximum(const PackGroup& a, const PackGroup& b) {
    return of([&](int k) { return maximum(a.part[k], b.part[k]); });
  }
  FUSEDSTEP_FN friend PackGroup sign_of(const PackGroup& a) {
    return of([&](int k) { return sign_of(a.part[k]); });
  }
  FUSEDSTEP_FN friend PackGroup absolute(const PackGroup& a) {
    return of([&](int k) { return absolute(a.part[k]); });
  }
  FUSEDSTEP_FN friend PackGroup mul_add(const PackGroup& a, const PackGroup& b, const PackGroup& c) {
    return of([&](int k) { return mul_add(a.part[k], b.part[k], c.part[k]); });
  }
  FUSEDSTEP_FN friend PackGroup where_equal(const PackGroup& a, const PackGroup& b, const PackGroup& x,
                                            const PackGroup& y) {
    return of([&](int k) { return where_equal(a.part[k], b.part[k], x.part[k], y.part[k]); });
  }
};

template <class Weight, class State>
requires(!std::is_same_v<Weight, double>) struct Groups<Weight, State> {
  static constexpr bool kAllBf16 = std::is_same_v<Weight, bf16> && std::is_same_v<State, bf16>;
  template <int kRegisters>
  using Type = PackGroup<kAllBf16 ? Order::kBeside : Order::kBehind, kRegisters>;
  template <int kRegisters>
  using InOrder = PackGroup<Order::kBehind, kRegisters>;  // for sums by lanes
  template <int kRegisters>
  using Divided = PackGroup<Order::kBehind, kRegisters, 0>;  // exact in every rounding mode
  static constexpr bool kExist = true;
  FUSEDSTEP_FN static bool are_exact() { return estimated_roots_are_exact(); }
};

#endif

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
