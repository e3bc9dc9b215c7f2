// What the passes around matrix products share: a body is run over a span of elements, a register at a time.
#pragma once
#include <cstdint>

#include "cpu_kernels/codecs.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {

// A register at a time, then the tail one by one.
template <class Body>
FUSEDSTEP_FN void run_over(const Body body, int64_t begin, int64_t end) {
  using V = Pack<typename Body::T>;
  int64_t i = begin;
  for (; i + V::size() <= end; i += V::size()) body.template run_at<V>(i);
  for (; i < end; ++i) body.template run_at<typename Body::T>(i);
}

// One factor for all elements, or a factor for each.
template <class T>
struct OneFactor {
  T factor;
  template <class V>
  FUSEDSTEP_FN V at(int64_t) const {
    return V(factor);
  }
};
template <class Stored>
struct Factors {
  const Stored* factors;
  template <class V>
  FUSEDSTEP_FN V at(int64_t i) const {
    return load<V>(factors, i);
  }
};

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
