// A chain of matrix products over batches of matrices, for the engines of a CPU and of a GPU.
#pragma once
#include <array>
#include <cstdint>
#include <span>

namespace fusedstep {

// What a product of a chain reads and writes. X and Y have the shape of the batch, [M, N]. S0 to S3 are
// symmetric matrices of the shorter side, in the chain's workspace.
enum class ChainOperand : uint8_t { kNone, kX, kY, kS0, kS1, kS2, kS3 };
constexpr int kChainOperands = 7, kChainSquares = 4;

enum class ChainKind : uint8_t {
  kGram,    // C = A A', or A' A where that is the smaller one
  kSquare,  // C = alpha A B + beta D + gamma E + identity I, of symmetric matrices that commute
  kWhole,   // C = B A + beta D, or A B + beta D where B is of the columns; B is symmetric
};

// A product. Without a D or E its factor is 0. C is neither A nor B.
struct ChainProduct {
  ChainKind kind;
  ChainOperand a, b, c, d, e;
  float alpha, beta, gamma, identity;
  int level;  // products of one level may be computed at the same time
};

// Matrices [M, N] of one shape, contiguous, of 16-bit numbers, and what a chain does with them.
struct ChainBatch {
  int64_t count, rows, columns;
  std::array<void*, kChainOperands> operands;  // null if the chain does not name it
  std::span<const ChainProduct> products;      // by level

  int64_t side() const { return rows < columns ? rows : columns; }
  // Rows of the symmetric matrices are so far apart.
  int64_t square_stride() const { return (side() + 7) / 8 * 8; }
};

}  // namespace fusedstep
