#include "src/steps/newton_schulz.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace fusedstep {
namespace {

using Operand = ChainOperand;

// The products so far. Each has the first level at which its operands are there and its results are free.
class Chain {
 public:
  void add(ChainProduct product) {
    const auto reads = {product.a, product.b, product.d};
    const auto writes = {product.c, product.shifted};
    int level = -1;
    for (const Operand each : reads) level = std::max(level, written_[index_of(each)]);
    for (const Operand each : writes) {
      level = std::max({level, written_[index_of(each)], read_[index_of(each)]});
    }
    product.level = ++level;
    for (const Operand each : reads) read_[index_of(each)] = std::max(read_[index_of(each)], level);
    for (const Operand each : writes) written_[index_of(each)] = level;
    // Nothing waits for the operand that is none.
    read_[index_of(Operand::kNone)] = written_[index_of(Operand::kNone)] = -1;
    products_.push_back(product);
  }
  std::vector<ChainProduct> take() && {
    std::ranges::stable_sort(products_, {}, &ChainProduct::level);
    return std::move(products_);
  }

 private:
  static constexpr std::array<int, kChainOperands> kNever = {-1, -1, -1, -1, -1, -1, -1, -1};
  std::vector<ChainProduct> products_;
  std::array<int, kChainOperands> written_ = kNever, read_ = kNever;
};

ChainProduct gram_of(Operand x, Operand gram, double alpha) {
  return {ChainKind::kGram, x, x, gram, Operand::kNone, Operand::kNone, static_cast<float>(alpha), 0, 0, 0};
}

// A scaling of a matrix in place, or factors of a matrix, which is only read.
ChainProduct scaling(ChainKind kind, Operand a, Operand c) {
  return {kind, a, Operand::kNone, c, Operand::kNone, Operand::kNone, 1, 0, 0, 0};
}

// C = alpha A B + beta D.
ChainProduct square(Operand a, Operand b, Operand c, Operand d, double beta, double alpha = 1) {
  return {ChainKind::kSquare,       a, b, c, d, Operand::kNone, static_cast<float>(alpha),
          static_cast<float>(beta), 0, 0};
}

}  // namespace

std::vector<ChainProduct> newton_schulz_chain(std::span<const NewtonSchulzStep> steps, int64_t aol_side) {
  Chain chain;
  Operand x = Operand::kX, y = Operand::kY, q = Operand::kS2, next_q = Operand::kS4;
  const Operand gram = Operand::kS0, p = Operand::kS1, middle = Operand::kS3;
  bool begins = true, is_scaled = aol_side > 0;  // in the first run
  for (const auto& [a, b, c, ends] : steps) {
    const bool is_alone = begins && ends && !is_scaled;
    if (begins) chain.add(gram_of(x, gram, is_scaled ? static_cast<double>(aol_side) : 1));
    if (begins && is_scaled) {
      chain.add(scaling(ChainKind::kFactors, gram, Operand::kNone));
      chain.add(scaling(ChainKind::kScaleBoth, gram, gram));
    }
    ChainProduct polynomial = square(gram, gram, p, gram, b, c);
    if (begins && !is_alone) {
      polynomial.shifted = q;
      polynomial.shift = static_cast<float>(a);
    }
    chain.add(polynomial);
    if (!begins) {
      chain.add(square(q, p, next_q, q, a));
      std::swap(q, next_q);
    }
    if (!ends) {
      chain.add(square(gram, p, middle, gram, a));
      chain.add(square(middle, p, gram, middle, a));
    }
    if (ends) {
      const Operand d = is_alone ? x : Operand::kNone;
      const auto beta = static_cast<float>(is_alone ? a : 0);
      const float alpha = is_scaled ? std::sqrt(static_cast<float>(aol_side)) : 1;
      if (is_scaled) chain.add(scaling(ChainKind::kScale, q, q));
      chain.add({ChainKind::kWhole, is_alone ? p : q, x, y, d, Operand::kNone, alpha, beta, 0, 0});
      std::swap(x, y);
      is_scaled = false;
    }
    begins = ends;
  }
  return std::move(chain).take();
}

}  // namespace fusedstep
