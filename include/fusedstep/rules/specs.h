// The words by which a rule tells what it is, besides its maths: the states that it has.
//
// The hyper-parameters are the members of the rule's Hyper: doubles only, of which the first is `lr`, in the
// order of `kNames`. Their initial values are the defaults, and `flags()` is what they choose among the
// variants that are compiled. Everything else asks these: operators, Python's classes and those of C++.
#pragma once
#include <cstddef>

#include "fusedstep/vocabulary.h"

namespace fusedstep::rules {

enum class Sign { kAny, kNotNegative };

// A tensor that a rule keeps for each weight.
struct StateSpec {
  const char* name;
  Sign sign = Sign::kAny;
  unsigned flag = 0;  // the flag that it needs; 0: it is always there
};

// Counts those of these states that a rule with these flags has.
template <size_t kCount>
constexpr int states_with(const StateSpec (&states)[kCount], unsigned flags) {
  int count = 0;
  for (const StateSpec& state : states) count += state.flag == 0 || (flags & state.flag) != 0;
  return count;
}

// Tells if steps round states in codes of 8 bits by another threshold at each step (src/core/code_map.h):
// where one of them is never negative, as those are by whose root a step divides.
template <size_t kCount>
constexpr bool rounds_by_step(const StateSpec (&states)[kCount]) {
  for (const StateSpec& state : states) {
    if (state.sign == Sign::kNotNegative) return true;
  }
  return false;
}

// A float32 number that a rule keeps for each weight beside the step count.
struct NumberSpec {
  const char* name;
  float first;
};

// Counts a rule's numbers: the length of its list `kNumbers`, if it has one.
template <class Rule>
constexpr size_t count_numbers() {
  if constexpr (requires { Rule::kNumbers[0].first; }) {
    return sizeof(Rule::kNumbers) / sizeof(Rule::kNumbers[0]);
  } else {
    return 0;
  }
}
template <class Rule>
inline constexpr size_t kNumbersOf = count_numbers<Rule>();

// A moving average: a = a + share (x - a). A difference is rounded by the larger of two numbers, and hides a
// small x that counts for most: from a share of a half on, the average is kept a + share x. Coefficients
// choose, so that an element's computation is the same; products by 1 and 0 are exact.
template <class T>
struct Average {
  T share, past, kept;

  FUSEDSTEP_FN static Average of(double beta) {
    const bool is_short = 1 - beta >= 0.5;
    return {T(1 - beta), T(is_short ? 0 : -1), T(is_short ? beta : 1)};
  }
  template <class V>
  FUSEDSTEP_FN V operator()(V before, V x) const {
    return mul_add(V(share), mul_add(V(past), before, x), V(kept) * before);
  }
};

// The scalars of step number `step` of a rule. Its numbers, before the step, become those after it.
template <class Rule, class T>
FUSEDSTEP_FN typename Rule::template Scalars<T> prepare(const typename Rule::Hyper& hyper, double step,
                                                        double* numbers) {
  if constexpr (kNumbersOf<Rule> == 0) {
    return Rule::template prepare<T>(hyper, step);
  } else {
    return Rule::template prepare<T>(hyper, step, numbers);
  }
}

}  // namespace fusedstep::rules

// Declares the members of a Hyper, from a list of X(type, name, default value) with these types:
//   double     a number
//   bool       a flag: a number that is 0 or 1
//   TwoBetas   two numbers, `beta1` and `beta2`, which are one option; the list has both defaults
// A rule of FUSEDSTEP_PLAIN_RULES (list.h) has this list, FUSEDSTEP_OPTIONS_OF_<Rule>, and one of
// X(name, the other members of a StateSpec), FUSEDSTEP_STATES_OF_<Rule>: its C++ class follows from the two.
#define FUSEDSTEP_HYPER(LIST)  \
  LIST(FUSEDSTEP_HYPER_MEMBER) \
  static constexpr const char* kNames[] = {LIST(FUSEDSTEP_HYPER_NAME)};
#define FUSEDSTEP_HYPER_MEMBER(type, ...) FUSEDSTEP_HYPER_MEMBER_##type(__VA_ARGS__)
#define FUSEDSTEP_HYPER_MEMBER_double(name, value) double name = value;
#define FUSEDSTEP_HYPER_MEMBER_bool(name, value) double name = value;
#define FUSEDSTEP_HYPER_MEMBER_TwoBetas(name, first, second) double beta1 = first, beta2 = second;
#define FUSEDSTEP_HYPER_NAME(type, name, ...) FUSEDSTEP_HYPER_NAME_##type(name)
#define FUSEDSTEP_HYPER_NAME_double(name) #name,
#define FUSEDSTEP_HYPER_NAME_bool(name) #name,
#define FUSEDSTEP_HYPER_NAME_TwoBetas(name) "beta1", "beta2",

// A member of kAllStates.
#define FUSEDSTEP_STATE_SPEC(name, ...) {#name, __VA_ARGS__},
