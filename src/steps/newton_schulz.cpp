#include "src/steps/newton_schulz.h"

#include <algorithm>
#include <array>
#include <utility>

namespace fusedstep {
namespace {

using Operand = ChainOperand;

// The products so far. Each has the first level at which its operands are there and its result is free.
class Chain {
 public:
  // C = alpha A B + beta D + gamma E + identity I.
  void add(ChainKind kind, Operand a, Operand b, Operand c, double alpha = 1, Operand d = Operand::kNone,
           double beta = 0, Operand e = Operand::kNone, double gamma = 0, double identity = 0) {
    int level = std::max(written(c), read_[index(c)]);
    for (const Operand each : {a, b, d, e}) level = std::max(level, written(each));
    ++level;
    for (const Operand each : {a, b, d, e}) read_[index(each)] = std::max(read_[index(each)], level);
    written_[index(c)] = level;
    products_.push_back({kind, a, b, c, d, e, static_cast<float>(alpha), static_cast<float>(beta),
                         static_cast<float>(gamma), static_cast<float>(identity), level});
  }
  std::vector<ChainProduct> take() && {
    std::ranges::stable_sort(products_, {}, &ChainProduct::level);
    return std::move(products_);
  }

 private:
  static size_t index(Operand operand) { return static_cast<size_t>(operand); }
  int written(Operand operand) const { return operand == Operand::kNone ? -1 : written_[index(operand)]; }

  std::vector<ChainProduct> products_;
  std::array<int, kChainOperands> written_{-1, -1, -1, -1, -1, -1, -1}, read_{-1, -1, -1, -1, -1, -1, -1};
};

}  // namespace

std::vector<ChainProduct> newton_schulz_chain(std::span<const NewtonSchulzStep> steps) {
  Chain chain;
  Operand x = Operand::kX, y = Operand::kY;
  // The Gram matrix, Q, P, and what is free. After the first step of a run Q is what P was: a I is not added
  // yet.
  Operand gram = Operand::kS0, q = Operand::kS1, p = Operand::kS2, other = Operand::kS3;
  double identity = 0;
  int length = 0;
  for (const auto& [a, b, c, ends] : steps) {
    if (++length == 1) chain.add(ChainKind::kGram, x, x, gram);
    chain.add(ChainKind::kSquare, gram, gram, p, c, gram, b);
    if (!ends) {
      chain.add(ChainKind::kSquare, gram, p, other, 1, gram, a);
      chain.add(ChainKind::kSquare, other, p, gram, 1, other, a);
    }
    if (length == 1) {
      std::swap(p, q);
      identity = a;
    } else {
      if (length == 2) {  // (P' + a' I) (P + a I)
        chain.add(ChainKind::kSquare, q, p, other, 1, q, a, p, identity, identity * a);
      } else {
        chain.add(ChainKind::kSquare, q, p, other, 1, q, a);
      }
      std::swap(q, other);
      identity = 0;
    }
    if (ends) {
      const Operand d = length == 1 ? x : Operand::kNone;
      chain.add(ChainKind::kWhole, x, q, y, 1, d, identity);
      std::swap(x, y);
      length = 0;
    }
  }
  return std::move(chain).take();
}

}  // namespace fusedstep
