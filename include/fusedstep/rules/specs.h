// The words by which a rule tells what it is, besides its maths: the states that it has.
//
// The hyper-parameters are the members of the rule's Hyper: doubles only, of which the first is `lr`, in the
// order of `kNames`. Their initial values are the defaults, and `flags()` is what they choose among the
// variants that are compiled. Everything else asks these: operators, Python's classes and those of C++.
#pragma once
#include <cstddef>

namespace fusedstep::rules {

enum class Sign { kAny, kNotNegative };

// A tensor that a rule keeps for each weight.
struct StateSpec {
  const char* name;
  Sign sign = Sign::kAny;
  unsigned flag = 0;  // the flag that it needs; 0: it is always there
};

// How many of these states a rule with these flags has.
template <size_t kCount>
constexpr int states_with(const StateSpec (&states)[kCount], unsigned flags) {
  int count = 0;
  for (const StateSpec& state : states) count += state.flag == 0 || (flags & state.flag) != 0;
  return count;
}

}  // namespace fusedstep::rules
