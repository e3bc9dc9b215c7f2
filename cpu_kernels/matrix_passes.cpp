// Compiled once for each instruction set: the passes around the matrix products of a step.
#include "cpu_kernels/matrix_passes.h"

#include "cpu_kernels/codecs.h"
#include "fusedstep/vocabulary.h"

namespace fusedstep::cpu::FUSEDSTEP_ISA {
namespace {

template <class V, class T>
FUSEDSTEP_FN V interpolated(const V& from, const V& to, T share) {
  using rules::mul_add;
  const V way = to - from;
  return rules::absolute(share) < T(0.5) ? mul_add(V(share), way, from) : mul_add(-way, V(T(1) - share), to);
}

template <class Stored, class Product>
struct Update {
  using T = typename Codec<Stored>::Compute;
  const Stored *average, *grad;
  Product* update;
  T share, lead;
  bool leads;

  template <class V>
  FUSEDSTEP_FN void run_at(int64_t i) const {
    const V g = load<V>(grad, i);
    const V m = rounded<Stored>(interpolated(load<V>(average, i), g, share));
    store(update, i, leads ? rounded<Stored>(interpolated(g, m, lead)) : m);
  }
};

template <class Stored, class Product>
struct Advance {
  using T = typename Codec<Stored>::Compute;
  Stored *average, *weight;
  const Stored* grad;
  const Product* direction;
  T share, keep, factor;

  template <class V>
  FUSEDSTEP_FN void run_at(int64_t i) const {
    using rules::mul_add;
    store(average, i, interpolated(load<V>(average, i), load<V>(grad, i), share));
    const V decayed = rounded<Stored>(load<V>(weight, i) * V(keep));
    store(weight, i, mul_add(V(factor), load<V>(direction, i), decayed));
  }
};

template <class From, class To>
struct Quotient {
  using T = float;
  const From* from;
  To* to;
  float divisor;

  template <class V>
  FUSEDSTEP_FN void run_at(int64_t i) const {
    store(to, i, load<V>(from, i) / V(divisor));
  }
};

// A register at a time, then the tail one by one.
template <class Body>
FUSEDSTEP_FN void run_over(const Body body, int64_t begin, int64_t end) {
  using V = Pack<typename Body::T>;
  int64_t i = begin;
  for (; i + V::size() <= end; i += V::size()) body.template run_at<V>(i);
  for (; i < end; ++i) body.template run_at<typename Body::T>(i);
}

template <class Stored, class Product>
void update(const PassTensor& tensor, const AverageOptions& options, int64_t begin, int64_t end) {
  Update<Stored, Product> body{};
  body.average = static_cast<const Stored*>(tensor.stored);
  body.grad = static_cast<const Stored*>(tensor.grad);
  body.update = static_cast<Product*>(tensor.product);
  body.share = static_cast<typename decltype(body)::T>(options.share);
  body.lead = static_cast<typename decltype(body)::T>(options.lead);
  body.leads = options.leads;
  run_over(body, begin, end);
}

template <class Stored, class Product>
void advance(const AdvanceTensor& tensor, const AdvanceOptions& options, int64_t begin, int64_t end) {
  Advance<Stored, Product> body{};
  body.average = static_cast<Stored*>(tensor.average);
  body.weight = static_cast<Stored*>(tensor.weight);
  body.grad = static_cast<const Stored*>(tensor.grad);
  body.direction = static_cast<const Product*>(tensor.direction);
  body.share = static_cast<typename decltype(body)::T>(options.share);
  body.keep = static_cast<typename decltype(body)::T>(options.keep);
  // A CPU's operation on a weight takes a factor in the weight's dtype.
  body.factor = rounded<Stored>(static_cast<typename decltype(body)::T>(tensor.factor));
  run_over(body, begin, end);
}

// Element i of a sum is in lane i % kSquareLanes. The lanes are added in a tree.
constexpr int kSquareLanes = 64;

template <class From>
float sum_squares(const NormTensor& tensor, int64_t begin, int64_t end) {
  using V = Pack<float>;
  using rules::mul_add;
  constexpr int kParts = kSquareLanes / V::size();
  const auto* const from = static_cast<const From*>(tensor.from);
  V sums[kParts];
  for (V& part : sums) part = V(0);
  const int64_t whole = end - (end - begin) % kSquareLanes;
  for (int64_t i = begin; i < whole; i += kSquareLanes) {
#pragma GCC unroll 16
    for (int k = 0; k < kParts; ++k) {
      const V x = load<V>(from, i + k * V::size());
      sums[k] = mul_add(x, x, sums[k]);
    }
  }
  float lanes[kSquareLanes];
  for (int k = 0; k < kParts; ++k) store(lanes, k * V::size(), sums[k]);
  for (int64_t i = whole; i < end; ++i) {
    const auto x = load<float>(from, i);
    lanes[i - whole] = mul_add(x, x, lanes[i - whole]);
  }
  for (int width = kSquareLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

template <class From, class To>
void divide(const NormTensor& tensor, float divisor, int64_t begin, int64_t end) {
  run_over(Quotient<From, To>{static_cast<const From*>(tensor.from), static_cast<To*>(tensor.to), divisor},
           begin, end);
}

}  // namespace

#define FUSEDSTEP_PASSES(name, Stored, Product) {update<Stored, Product>, advance<Stored, Product>},
#define FUSEDSTEP_NORMS(name, From, To) {sum_squares<From>, divide<From, To>},
extern const PassTable kPasses = {{FUSEDSTEP_PASS_FORMATS(FUSEDSTEP_PASSES)},
                                  {FUSEDSTEP_NORM_FORMATS(FUSEDSTEP_NORMS)}};
#undef FUSEDSTEP_PASSES
#undef FUSEDSTEP_NORMS

}  // namespace fusedstep::cpu::FUSEDSTEP_ISA
