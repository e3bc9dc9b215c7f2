// Chains of matrix products over batches of matrices, for the engines of a CPU and of a GPU.
#pragma once
#include <array>
#include <cstdint>
#include <span>

namespace fusedstep {

// What a product of a chain reads and writes. X and Y have the shape of the batch, [M, N]. S0 to S4 are
// symmetric matrices of the shorter side, in the chain's workspace.
enum class ChainOperand : uint8_t { kNone, kX, kY, kS0, kS1, kS2, kS3, kS4 };
constexpr int kChainOperands = 8;

constexpr int index_of(ChainOperand operand) { return static_cast<int>(operand); }
constexpr bool is_square(ChainOperand operand) { return operand >= ChainOperand::kS0; }

enum class ChainKind : uint8_t {
  kGram,    // C = A A', or A' A where that is the smaller one; B is A
  kSquare,  // C = alpha A B + beta D, of symmetric matrices that commute: C is symmetric
  // C = alpha A B + beta D, or alpha B A + beta D where A is of the columns; B and D are X or Y. A is
  // symmetric, or the columns of a symmetric A are scaled: of the columns its transpose is taken.
  kWhole,
  // What follows scales matrices by the factors of their batch, a float32 number for each row.
  kFactors,    // the factors 1 / sqrt(max(sum_j |A_ij|, kLeastRowSum)) of a symmetric A
  kScaleBoth,  // C = F A F, where F has the factors on its diagonal, and C is A
  kScale,      // C = A F, where C is A
};

// Sums of rows are taken for no less, so that factors are at most 2^10.
constexpr float kLeastRowSum = 0x1p-20f;

// A product, or a scaling. Without a D its factor is 0. C of a product is neither A nor B.
struct ChainProduct {
  ChainKind kind;
  ChainOperand a, b, c, d;
  // C, rounded, with a number added to its diagonal and rounded once more: what is added has the errors of C,
  // so that they cancel where both are factors of one product.
  ChainOperand shifted;
  float alpha, beta, shift;
  int level;  // those of one level may be computed at the same time
};

// Matrices [M, N] of one shape, contiguous, of 16-bit numbers, and what a chain does with them.
struct ChainBatch {
  int64_t count, rows, columns;
  std::array<void*, kChainOperands> operands;  // X and Y; on a GPU the others too
  std::span<const ChainProduct> products;      // by level

  int64_t side() const { return rows < columns ? rows : columns; }
  bool has_factors() const {
    for (const ChainProduct& product : products) {
      if (product.kind == ChainKind::kFactors) return true;
    }
    return false;
  }
};

}  // namespace fusedstep
