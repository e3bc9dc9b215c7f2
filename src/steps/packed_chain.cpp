#include "src/steps/packed_chain.h"

#include <algorithm>
#include <array>
#include <utility>

#include "src/run/product_chain.h"

namespace fusedstep {
namespace {

using cpu::BFloat16Bits;

constexpr int64_t kAlignment = 64;

int64_t blocks_of(int64_t side) { return (side + cpu::kBlockSide - 1) / cpu::kBlockSide; }

// The forms that products read an operand in. All matrices have the short side by the long side: tall
// matrices are transposed.
struct Forms {
  bool left = false, right = false, transposed_right = false;
};

// The forms of an operand that products read from number `from` on, until one writes it.
Forms forms_read(std::span<const ChainProduct> products, size_t from, ChainOperand operand) {
  Forms forms;
  for (size_t i = from; i < products.size(); ++i) {
    const ChainProduct& product = products[i];
    forms.left |= product.a == operand || product.d == operand;
    if (product.b == operand) {
      (product.kind == ChainKind::kGram ? forms.transposed_right : forms.right) = true;
    }
    if (product.c == operand || product.shifted == operand) break;
  }
  return forms;
}

// Where operands lie, in the forms that are ever read, and the factors of the batch.
struct Places {
  std::array<cpu::PackedForms, kChainOperands> of;
  float* factors = nullptr;
};

// Lays the operands of a batch into memory from number `at` on, which it moves to their end.
Places lay_out(const ChainBatch& batch, BFloat16Bits* memory, int64_t& at) {
  const int64_t rows = blocks_of(batch.side()), columns = blocks_of(std::max(batch.rows, batch.columns));
  Places places;
  if (batch.has_factors()) {
    constexpr int64_t kNumbers = sizeof(float) / sizeof(BFloat16Bits);
    places.factors = reinterpret_cast<float*>(memory + at);
    at += batch.count * rows * cpu::kBlockSide * kNumbers;
  }
  const auto take = [&](BFloat16Bits*& to, bool is_read, int64_t blocks) {
    if (is_read) to = memory + std::exchange(at, at + batch.count * blocks * cpu::kBlockNumbers);
  };
  std::array<Forms, kChainOperands> read;
  const auto note = [&](ChainOperand operand, size_t from) {
    const Forms more = forms_read(batch.products, from, operand);
    Forms& all = read[index_of(operand)];
    all = {all.left || more.left, all.right || more.right, all.transposed_right || more.transposed_right};
  };
  note(ChainOperand::kX, 0);
  for (size_t i = 0; i < batch.products.size(); ++i) {
    note(batch.products[i].c, i + 1);
    note(batch.products[i].shifted, i + 1);
  }
  // A block of X is read as D, and then written as the left operand Y: the two have one place. So have the
  // right operands of Gram matrices.
  auto &x = read[index_of(ChainOperand::kX)], &y = read[index_of(ChainOperand::kY)];
  cpu::PackedForms whole;
  take(whole.left, x.left || y.left, rows * columns);
  take(whole.transposed_right, x.transposed_right || y.transposed_right, rows * columns);
  for (int i = index_of(ChainOperand::kX); i < kChainOperands; ++i) {
    if (is_square(static_cast<ChainOperand>(i))) {
      take(places.of[i].left, read[i].left, rows * rows);
      take(places.of[i].right, read[i].right, rows * rows);
    } else {
      places.of[i] = whole;
      take(places.of[i].right, read[i].right, rows * columns);
    }
  }
  return places;
}

// Adds the products of a batch to the tasks of threads.
class Batch {
 public:
  Batch(const ChainBatch& batch, const Places& places, ProductChain& tasks)
      : batch_(batch),
        places_(places),
        tasks_(tasks),
        is_tall_(batch.rows > batch.columns),
        rows_(blocks_of(batch.side())),
        columns_(blocks_of(std::max(batch.rows, batch.columns))) {}

  void add() {
    if (batch_.products.empty()) return;
    pack();
    for (size_t i = 0; i < batch_.products.size(); ++i) {
      const ChainProduct& each = batch_.products[i];
      tasks_.add(static_cast<size_t>(each.level) + 1, batch_.count, task_of(each, i + 1));
    }
  }

 private:
  cpu::PlainMatrices plain(ChainOperand operand) const {
    return {static_cast<BFloat16Bits*>(batch_.operands[index_of(operand)]), batch_.rows, batch_.columns};
  }

  // The places of an operand's forms that are read before it is written again.
  cpu::PackedForms places_read(ChainOperand operand, size_t from) const {
    const Forms forms = forms_read(batch_.products, from, operand);
    const cpu::PackedForms& all = places_.of[index_of(operand)];
    cpu::PackedForms some;
    if (forms.left) some.left = all.left;
    if (forms.right) some.right = all.right;
    if (forms.transposed_right) some.transposed_right = all.transposed_right;
    return some;
  }

  void pack() {
    const cpu::PackedForms to = places_read(ChainOperand::kX, 0);
    if (!is_tall_) {
      tasks_.add(0, batch_.count, cpu::Packing{rows_, columns_, plain(ChainOperand::kX), to});
      return;
    }
    cpu::PackedForms of_transpose;
    of_transpose.transposed_left = to.left;
    of_transpose.transposed_right = to.right;
    of_transpose.right = to.transposed_right;
    tasks_.add(0, batch_.count, cpu::Packing{columns_, rows_, plain(ChainOperand::kX), of_transpose});
  }

  // `next`: the number of the product after this one.
  ProductChain::Task task_of(const ChainProduct& of, size_t next) const {
    const BFloat16Bits* const left = places_.of[index_of(of.a)].left;
    switch (of.kind) {
      case ChainKind::kFactors:
        return cpu::RowFactors{rows_, 1, left, places_.factors, kLeastRowSum};
      case ChainKind::kScale:
      case ChainKind::kScaleBoth:
        return cpu::Scaling{
            rows_, rows_, left, places_.factors, of.kind == ChainKind::kScaleBoth, places_read(of.c, next)};
      default:
        return product_of(of, next);
    }
  }

  cpu::Product product_of(const ChainProduct& of, size_t next) const {
    cpu::Product product;
    const bool is_gram = of.kind == ChainKind::kGram, is_whole = of.kind == ChainKind::kWhole;
    product.rows = rows_;
    product.columns = is_whole ? columns_ : rows_;
    product.depth = is_gram ? columns_ : rows_;
    product.left = places_.of[index_of(of.a)].left;
    const cpu::PackedForms& b = places_.of[index_of(of.b)];
    product.right = is_gram ? b.transposed_right : b.right;
    product.alpha = of.alpha;
    product.beta = of.beta;
    if (of.beta != 0) product.summand = places_.of[index_of(of.d)].left;
    product.is_symmetric = !is_whole;
    product.to = places_read(of.c, next);
    if (of.shifted != ChainOperand::kNone) {
      product.shifted_left = places_read(of.shifted, next).left;
      product.shift = of.shift;
    }
    if (is_whole && product.to.left == nullptr && product.to.right == nullptr &&
        product.to.transposed_right == nullptr) {
      product.plain = plain(of.c);
      product.plain_is_transposed = is_tall_;
    }
    return product;
  }

  const ChainBatch& batch_;
  const Places& places_;
  ProductChain& tasks_;
  bool is_tall_;
  int64_t rows_, columns_;
};

}  // namespace

int64_t packed_chain_bytes(std::span<const ChainBatch> batches) {
  int64_t numbers = 0;
  for (const ChainBatch& batch : batches) lay_out(batch, nullptr, numbers);
  return numbers * static_cast<int64_t>(sizeof(BFloat16Bits)) + kAlignment;
}

void run_packed_chains(const cpu::ProductKernels& kernels, int threads, std::span<const ChainBatch> batches,
                       std::byte* workspace) {
  const auto address = reinterpret_cast<uintptr_t>(workspace);
  auto* const memory = reinterpret_cast<BFloat16Bits*>((address + kAlignment - 1) / kAlignment * kAlignment);
  ProductChain tasks;
  int64_t at = 0;
  for (const ChainBatch& batch : batches) Batch(batch, lay_out(batch, memory, at), tasks).add();
  tasks.run(kernels, threads);
}

}  // namespace fusedstep
