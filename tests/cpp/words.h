// The words of rules, and a rule without states, as kernels of each instruction set: for words_test.cpp.
#pragma once
#include <cstdint>

#include "cpu_kernels/kernel_table.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

struct PlainHyper {
  double lr;
};
template <class T>
struct PlainScalars {
  T neg_lr;
};

// Descent without memory, along the gradient or along its sign.
template <unsigned kFlags>
struct Plain {
  using Hyper = PlainHyper;
  template <class T>
  using Scalars = PlainScalars<T>;
  static constexpr unsigned kFlagCombinations = 2;
  static constexpr int kStates = 0;

  template <class T>
  FUSEDSTEP_FN static Scalars<T> prepare(const Hyper& h, double) {
    return {T(-h.lr)};
  }
  template <class V, class T>
  FUSEDSTEP_FN static V direction(const Scalars<T>&, V, V g, States<V, kStates>&) {
    return kFlags == 0 ? g : sign_of(g);
  }
  template <class V, class T>
  FUSEDSTEP_FN static void apply(const Scalars<T>& s, V& p, V u) {
    p = mul_add(V(s.neg_lr), u, p);
  }
};

}  // namespace fusedstep::rules

namespace fusedstep::test {

enum Word : int { kSignOf, kAbsolute, kMaximum, kWhereEqual, kMulAdd, kSquareRoot, kDivide, kNegate, kWords };
constexpr const char* kWordNames[kWords] = {"sign_of", "absolute",    "maximum", "where_equal",
                                            "mul_add", "square_root", "divide",  "negate"};

// A word of one element or of a register of them.
template <Word kWord, class V>
FUSEDSTEP_FN V word_of(const V& x, const V& y) {
  using namespace rules;  // NOLINT(google-build-using-namespace): packs bring words of their own
  if constexpr (kWord == kSignOf) return sign_of(x);
  if constexpr (kWord == kAbsolute) return absolute(x);
  if constexpr (kWord == kMaximum) return maximum(x, y);
  if constexpr (kWord == kWhereEqual) return where_equal(x, y, x * x, y);
  if constexpr (kWord == kMulAdd) return mul_add(x, y, x);
  if constexpr (kWord == kSquareRoot) return square_root(x);
  if constexpr (kWord == kDivide) return x / y;
  if constexpr (kWord == kNegate) return -x;
}

// `count` elements at a time, which is a multiple of what is worked on together.
template <class T>
using RunWord = void (*)(const T* x, const T* y, T* result, int64_t count);

struct Words {
  const char* isa;
  static constexpr int kWidths = 3;  // registers that are worked on together: 1, 2, 4
  RunWord<float> of_floats[kWidths][kWords];
  RunWord<double> of_doubles[kWords];
  cpu::SpanKernel plain[static_cast<int>(Format::kCount)][rules::Plain<0>::kFlagCombinations];
};

}  // namespace fusedstep::test

namespace fusedstep::cpu {
namespace base {
extern const test::Words kWords;
}
namespace avx2 {
extern const test::Words kWords;
}
namespace avx512 {
extern const test::Words kWords;
}
}  // namespace fusedstep::cpu
