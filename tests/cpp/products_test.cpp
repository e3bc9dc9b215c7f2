// Products of packed bfloat16 matrices, and the iteration made of them: every instruction set that this
// machine has, against float64.
#include "cpu_kernels/products.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fusedstep/isa.h"
#include "src/run/dispatch.h"
#include "src/run/product_chain.h"
#include "src/steps/low_rank_products.h"
#include "src/steps/newton_schulz.h"
#include "src/steps/packed_chain.h"

namespace fusedstep::test {
namespace {

using cpu::BFloat16Bits;
using Numbers = std::vector<double>;

double value_of(BFloat16Bits x) { return std::bit_cast<float>(uint32_t{x} << 16); }

BFloat16Bits rounded(double x) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(x));
  return static_cast<BFloat16Bits>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

std::vector<const cpu::ProductKernels*> all_kernels() {
  std::vector<const cpu::ProductKernels*> found = {&cpu::base::kProducts};
  for (const std::string& name : product_isas()) {
    force_isa(name);
    found.push_back(product_kernels());
  }
  force_isa("");
  return found;
}

// Memory on a line of a cache, with bytes behind it that nothing may change.
class Memory {
 public:
  explicit Memory(int64_t numbers) : count_(numbers), held_(numbers + 2 * kMargin, kUntouched) {}
  ~Memory() {
    EXPECT_TRUE(std::all_of(data() + count_, data() + count_ + kMargin / 2,
                            [](BFloat16Bits x) { return x == kUntouched; }));
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  BFloat16Bits* data() {
    const auto address = reinterpret_cast<uintptr_t>(held_.data());
    return reinterpret_cast<BFloat16Bits*>((address + 63) / 64 * 64);
  }

 private:
  static constexpr int64_t kMargin = 64;
  static constexpr BFloat16Bits kUntouched = 0x5a5a;
  int64_t count_;
  std::vector<BFloat16Bits> held_;
};

int64_t blocks_of(int64_t side) { return (side + cpu::kBlockSide - 1) / cpu::kBlockSide; }

// [count][rows][columns] matrices.
struct Matrices {
  int64_t count, rows, columns;
  std::vector<BFloat16Bits> at;

  Matrices(int64_t count, int64_t rows, int64_t columns, unsigned seed = 0, double scale = 1)
      : count(count), rows(rows), columns(columns), at(count * rows * columns) {
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal;
    for (BFloat16Bits& x : at) x = rounded(scale * normal(generator));
  }
  cpu::PlainMatrices plain() { return {at.data(), rows, columns}; }
  double operator()(int64_t matrix, int64_t i, int64_t j) const {
    return value_of(at[(matrix * rows + i) * columns + j]);
  }
  int64_t packed_numbers() const { return count * blocks_of(rows) * blocks_of(columns) * cpu::kBlockNumbers; }
};

// The number (i, j) of packed matrices whose sums run over `depth` blocks.
BFloat16Bits left_at(const BFloat16Bits* packed, int64_t rows, int64_t depth, int64_t matrix, int64_t i,
                     int64_t k) {
  const int64_t tile = (matrix * 2 * rows + i / 16) * depth + k / 32;
  return packed[tile * cpu::kTileNumbers + i % 16 * 32 + k % 32];
}
BFloat16Bits right_at(const BFloat16Bits* packed, int64_t columns, int64_t depth, int64_t matrix, int64_t k,
                      int64_t j) {
  const int64_t tile = (matrix * 2 * columns + j / 16) * depth + k / 32;
  return packed[tile * cpu::kTileNumbers + k % 32 / 2 * 32 + j % 16 * 2 + k % 2];
}

class ProductsTest : public testing::TestWithParam<const cpu::ProductKernels*> {};

constexpr int kThreads = 3;

// Sides within a tile, a block, a square, and beyond one panel of a cache.
const std::vector<std::array<int64_t, 4>> kShapes = {{1, 1, 1, 1},    {2, 16, 16, 32},  {1, 17, 33, 31},
                                                     {3, 32, 64, 32}, {2, 65, 70, 129}, {1, 100, 260, 300},
                                                     {2, 97, 1, 520}};

TEST_P(ProductsTest, AreThoseOfFloat64WithinTheRoundingsInEveryForm) {
  for (const auto& [count, rows, columns, depth] : kShapes) {
    Matrices left(count, rows, depth, 1), right(count, depth, columns, 2), summand(count, rows, columns, 3);
    Matrices plain(count, rows, columns), transposed(count, columns, rows);
    const int64_t m = blocks_of(rows), n = blocks_of(columns), k = blocks_of(depth);
    Memory packed_left(left.packed_numbers()), packed_right(right.packed_numbers());
    const int64_t numbers = summand.packed_numbers();
    Memory result(numbers), of_right(numbers), of_left_t(numbers), of_right_t(numbers);
    ProductChain chain;
    chain.add(0, count, cpu::Packing{m, k, left.plain(), {packed_left.data()}});
    chain.add(0, count, cpu::Packing{k, n, right.plain(), {nullptr, packed_right.data()}});
    chain.add(0, count, cpu::Packing{m, n, summand.plain(), {result.data()}});
    cpu::Product product;
    product.rows = m, product.columns = n, product.depth = k;
    product.left = packed_left.data(), product.right = packed_right.data();
    product.alpha = -0.75f, product.beta = 2.5f;
    product.summand = result.data();
    product.to = {result.data(), of_right.data(), of_left_t.data(), of_right_t.data()};
    product.plain = plain.plain();
    chain.add(1, count, product);
    product.to = {};
    product.plain = transposed.plain();
    product.plain_is_transposed = true;
    product.beta = 0;
    product.summand = nullptr;
    chain.add(2, count, product);
    chain.run(*GetParam(), kThreads);
    for (int64_t matrix = 0; matrix < count; ++matrix) {
      for (int64_t i = 0; i < m * cpu::kBlockSide; ++i) {
        for (int64_t j = 0; j < n * cpu::kBlockSide; ++j) {
          const BFloat16Bits found = left_at(result.data(), m, n, matrix, i, j);
          ASSERT_EQ(right_at(of_right.data(), n, m, matrix, i, j), found);
          ASSERT_EQ(left_at(of_left_t.data(), n, m, matrix, j, i), found);
          ASSERT_EQ(right_at(of_right_t.data(), m, n, matrix, j, i), found);
          if (i >= rows || j >= columns) {
            ASSERT_EQ(value_of(found), 0) << "padding";
            continue;
          }
          double sum = 0, size = 0;
          for (int64_t d = 0; d < depth; ++d) {
            const double term = left(matrix, i, d) * right(matrix, d, j);
            sum += term;
            size += std::abs(term);
          }
          const double own = 2.5 * summand(matrix, i, j), unit = std::ldexp(1, -24);
          const double exact = -0.75 * sum + own;
          const double of_sums = static_cast<double>(depth + 4) * unit * (0.75 * size + std::abs(own));
          ASSERT_EQ(plain.at[(matrix * rows + i) * columns + j], found);
          EXPECT_LE(std::abs(value_of(found) - exact), std::ldexp(std::abs(exact) + of_sums, -8) + of_sums)
              << rows << " x " << columns << " x " << depth << " at " << i << ", " << j;
          const double alone = transposed(matrix, j, i);
          EXPECT_LE(std::abs(alone + 0.75 * sum), std::ldexp(std::abs(0.75 * sum) + of_sums, -8) + of_sums);
        }
      }
    }
  }
}

TEST_P(ProductsTest, ATriangleIsWrittenTwice) {
  for (const auto& [count, rows, unused, depth] : kShapes) {
    Matrices x(count, rows, depth, 4);
    const int64_t m = blocks_of(rows), k = blocks_of(depth), square = count * m * m * cpu::kBlockNumbers;
    Memory left(x.packed_numbers()), transposed(x.packed_numbers());
    Memory whole(square), gram(square), right_gram(square), shifted(square);
    ProductChain chain;
    cpu::PackedForms forms;
    forms.left = left.data();
    forms.transposed_right = transposed.data();
    chain.add(0, count, cpu::Packing{m, k, x.plain(), forms});
    cpu::Product product;
    product.rows = product.columns = m, product.depth = k;
    product.left = left.data(), product.right = transposed.data();
    product.to.left = whole.data();
    chain.add(1, count, product);
    product.is_symmetric = true;
    product.to = {gram.data(), right_gram.data()};
    product.shifted_left = shifted.data();
    product.shift = 3;
    chain.add(1, count, product);
    chain.run(*GetParam(), kThreads);
    for (int64_t matrix = 0; matrix < count; ++matrix) {
      for (int64_t i = 0; i < m * cpu::kBlockSide; ++i) {
        for (int64_t j = 0; j < m * cpu::kBlockSide; ++j) {
          const BFloat16Bits found = left_at(gram.data(), m, m, matrix, i, j);
          ASSERT_EQ(found, left_at(whole.data(), m, m, matrix, i, j));
          ASSERT_EQ(found, right_at(right_gram.data(), m, m, matrix, i, j));
          const double added = value_of(found) + (i == j ? 3 : 0);
          ASSERT_EQ(left_at(shifted.data(), m, m, matrix, i, j), i == j ? rounded(added) : found);
        }
      }
    }
  }
}

// The number of a row's factor, from the bits of the matrix.
double factor_of(const BFloat16Bits* packed, int64_t side, int64_t matrix, int64_t row) {
  double sum = 0;
  for (int64_t j = 0; j < side * cpu::kBlockSide; ++j) {
    sum += std::abs(value_of(left_at(packed, side, side, matrix, row, j)));
  }
  return 1 / std::sqrt(std::max(sum, double{kLeastRowSum}));
}

TEST_P(ProductsTest, ScalingsAreThoseOfFloat64WithOneRounding) {
  for (const auto& [count, rows, unused, depth] : kShapes) {
    Matrices x(count, rows, rows, 4, 1e-2);
    std::fill_n(x.at.begin(), rows, 0);  // the first row is one of zeros, whose factor is finite
    const int64_t m = blocks_of(rows);
    Memory before(x.packed_numbers()), both(x.packed_numbers()), right(x.packed_numbers());
    Memory columns(x.packed_numbers());
    std::vector<float> factors(count * m * cpu::kBlockSide);
    ProductChain chain;
    chain.add(0, count, cpu::Packing{m, m, x.plain(), {before.data()}});
    chain.add(0, count, cpu::Packing{m, m, x.plain(), {columns.data()}});
    chain.add(1, count, cpu::RowFactors{m, 1, before.data(), factors.data(), kLeastRowSum});
    chain.add(2, count, cpu::Scaling{m, m, before.data(), factors.data(), true, {both.data(), right.data()}});
    chain.add(2, count, cpu::Scaling{m, m, columns.data(), factors.data(), false, {columns.data()}});
    chain.run(*GetParam(), kThreads);
    const double unit = std::ldexp(1, -24);
    for (int64_t matrix = 0; matrix < count; ++matrix) {
      for (int64_t i = 0; i < m * cpu::kBlockSide; ++i) {
        const double own = factors[matrix * m * cpu::kBlockSide + i];
        const double exact = factor_of(before.data(), m, matrix, i);
        ASSERT_LE(std::abs(own - exact), static_cast<double>(m + 40) * unit * exact);
        for (int64_t j = 0; j < m * cpu::kBlockSide; ++j) {
          const double other = factors[matrix * m * cpu::kBlockSide + j];
          const double number = value_of(left_at(before.data(), m, m, matrix, i, j));
          const BFloat16Bits found = left_at(both.data(), m, m, matrix, i, j);
          ASSERT_EQ(right_at(right.data(), m, m, matrix, i, j), found);
          const double of_both = number * own * other, of_columns = number * other;
          EXPECT_LE(std::abs(value_of(found) - of_both), std::ldexp(1.01, -8) * std::abs(of_both));
          EXPECT_LE(std::abs(value_of(left_at(columns.data(), m, m, matrix, i, j)) - of_columns),
                    std::ldexp(1.01, -8) * std::abs(of_columns));
        }
      }
    }
  }
}

// ---- Products of float32 matrices -----------------------------------------------------------------------

// A matrix in a larger one, whose other numbers are NaN.
struct WideRows {
  int64_t rows, columns, stride;
  std::vector<float> at;

  WideRows(int64_t rows, int64_t columns, unsigned seed)
      : rows(rows),
        columns(columns),
        stride(columns + 3),
        at(rows * stride + 3, std::numeric_limits<float>::quiet_NaN()) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) at[3 + i * stride + j] = normal(generator);
    }
  }
  float* data() { return at.data() + 3; }
  float operator()(int64_t i, int64_t j) const { return at[3 + i * stride + j]; }
};

TEST_P(ProductsTest, OfFloat32AreThoseOfFloat64WithinTheRoundingsOfTheirParts) {
  std::vector<std::array<int64_t, 4>> shapes = kShapes;
  // Parts enough for large ones where one thread takes them: deep, and not; and a shorter side of two parts.
  shapes.insert(
      shapes.end(),
      {{1, 3100, 40, 40}, {1, 800, 1700, 3}, {1, 3100, 33, 140}, {1, 33, 3100, 140}, {1, 514, 514, 129}});
  for (const auto& [unused, rows, columns, depth] : shapes) {
    for (const ProductForm form :
         {ProductForm::kRowsRows, ProductForm::kRowsColumns, ProductForm::kColumnsColumns}) {
      const bool a_by_rows = form != ProductForm::kColumnsColumns, b_by_rows = form != ProductForm::kRowsRows;
      WideRows a(a_by_rows ? rows : depth, a_by_rows ? depth : rows, 1);
      WideRows b(b_by_rows ? depth : columns, b_by_rows ? columns : depth, 2);
      for (const int parts : {1, 2}) {
        for (const float beta : {0.0f, 0.25f}) {
          const WideRows before(rows, columns, 3);
          WideRows c = before, again = before;
          if (beta == 0) std::ranges::fill(c.at, std::numeric_limits<float>::quiet_NaN());
          LowRankProduct product{a.data(),
                                 b.data(),
                                 c.data(),
                                 a.stride,
                                 b.stride,
                                 c.stride,
                                 static_cast<int>(rows),
                                 static_cast<int>(columns),
                                 static_cast<int>(depth),
                                 -0.75f,
                                 beta,
                                 form};
          run_low_rank_products(*GetParam(), {&product, 1}, parts, kThreads);
          product.c = again.data();
          run_low_rank_products(*GetParam(), {&product, 1}, parts, 1);
          const double unit = std::ldexp(1, -24),
                       of_part = parts == 1 ? std::ldexp(1.01, -7) : std::ldexp(3, -16);
          for (int64_t i = 0; i < rows; ++i) {
            for (int64_t j = 0; j < columns; ++j) {
              double sum = 0, size = 0;
              for (int64_t d = 0; d < depth; ++d) {
                const double term = double{a_by_rows ? a(i, d) : a(d, i)} * (b_by_rows ? b(d, j) : b(j, d));
                sum += term;
                size += std::abs(term);
              }
              const double own = beta * before(i, j), exact = -0.75 * sum + own;
              const double bound = 0.75 * size * (of_part + static_cast<double>(3 * depth + 4) * unit);
              ASSERT_LE(std::abs(c(i, j) - exact), bound + unit * (std::abs(own) + std::abs(exact)))
                  << rows << " x " << columns << " x " << depth << " at " << i << ", " << j;
              ASSERT_EQ(c(i, j), again(i, j)) << "by one thread";
            }
            for (int64_t j = columns; j < c.stride; ++j) ASSERT_TRUE(std::isnan(c(i, j)));
          }
        }
      }
    }
  }
}

// Kernels that compute nothing, and count the blocks that are packed of the operand at each address. What is
// packed begins with the number of its operand until it is overwritten.
class Packed {
 public:
  static cpu::ProductKernels kernels() {
    blocks_.clear();
    cpu::ProductKernels counting = cpu::base::kProducts;
    counting.pack_wide = [](const cpu::WidePacking& packing, const cpu::Square& square) {
      blocks_[packing.from.data] += square.rows * square.columns;
      if (square.i == 0 && square.j == 0) packing.to[0] = number_of(packing.from.data);
    };
    counting.multiply_wide = [](const cpu::WideProduct& product, const cpu::Square& square) {
      const bool is_left = product.left_is_packed();
      EXPECT_EQ(product.packed[0], number_of(is_left ? product.of.a : product.of.b));
      blocks_[is_left ? product.of.b : product.of.a] +=
          (is_left ? square.columns : square.rows) * product.depth;
    };
    return counting;
  }
  static int64_t blocks(const float* operand) { return blocks_[operand]; }

 private:
  static BFloat16Bits number_of(const float* operand) {
    return static_cast<BFloat16Bits>(reinterpret_cast<uintptr_t>(operand) / sizeof(float));
  }
  static inline std::map<const float*, int64_t> blocks_;
};

TEST(LowRankProductsTest, PackEachOperandOnce) {
  // Projections and ways back of matrices from either side, so many that there are groups of them.
  const std::vector<std::array<int, 3>> shapes = {{2304, 128, 768}, {128, 3072, 768}, {2304, 768, 128},
                                                  {768, 3072, 128}, {512, 4096, 800}, {4096, 512, 800},
                                                  {768, 768, 128},  {768, 128, 768}};
  constexpr int kCopies = 12;
  std::vector<float> addresses(2 * kCopies * shapes.size());
  std::vector<LowRankProduct> products;
  for (int copy = 0; copy < kCopies; ++copy) {
    for (const auto& [rows, columns, depth] : shapes) {
      const float* const a = &addresses[2 * products.size()];
      products.push_back({a, a + 1, nullptr, depth, columns, columns, rows, columns, depth, 1, 0,
                          ProductForm::kRowsColumns});
    }
  }
  run_low_rank_products(Packed::kernels(), products, 2, 1);
  for (const LowRankProduct& product : products) {
    EXPECT_EQ(Packed::blocks(product.a), blocks_of(product.rows) * blocks_of(product.depth));
    EXPECT_EQ(Packed::blocks(product.b), blocks_of(product.depth) * blocks_of(product.columns));
  }
}

// ---- The iteration --------------------------------------------------------------------------------------

constexpr NewtonSchulzStep kStep{3.4445, -4.7750, 2.0315, true};
const std::vector<bool> kUsual(5, true), kGram = {false, true, false, true, true},
                                         kLongRun = {false, false, true, false, true};

// Where runs end, and whether the iteration begins with the AOL start.
const std::vector<std::pair<std::vector<bool>, bool>> kIterations = {
    {kUsual, false}, {kGram, false}, {kLongRun, false}, {kUsual, true}, {kGram, true}, {kLongRun, true}};

// x of a step, in float64.
Numbers iterated(Numbers x, int64_t rows, int64_t columns, bool is_aol) {
  const auto times = [](const Numbers& a, const Numbers& b, int64_t m, int64_t k, int64_t n) {
    Numbers product(m * n);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t d = 0; d < k; ++d) {
        for (int64_t j = 0; j < n; ++j) product[i * n + j] += a[i * k + d] * b[d * n + j];
      }
    }
    return product;
  };
  const auto gram_of = [&](const Numbers& of) {
    Numbers transposed(of.size());
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) transposed[j * rows + i] = of[i * columns + j];
    }
    return times(of, transposed, rows, columns, rows);
  };
  if (is_aol) {
    const Numbers gram = gram_of(x);
    for (int64_t i = 0; i < rows; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < rows; ++j) sum += std::abs(gram[i * rows + j]);
      const double least = double{kLeastRowSum} / static_cast<double>(rows);
      for (int64_t k = 0; k < columns; ++k) x[i * columns + k] /= std::sqrt(std::max(sum, least));
    }
  }
  for (size_t i = 0; i < kUsual.size(); ++i) {
    const Numbers gram = gram_of(x);
    Numbers polynomial = times(gram, gram, rows, rows, rows);
    for (size_t e = 0; e < gram.size(); ++e) polynomial[e] = kStep.b * gram[e] + kStep.c * polynomial[e];
    const Numbers moved = times(polynomial, x, rows, rows, columns);
    for (size_t e = 0; e < x.size(); ++e) x[e] = kStep.a * x[e] + moved[e];
  }
  return x;
}

// Batches of three shapes, one a list of one matrix.
std::vector<Matrices> normalized_batches() {
  std::vector<Matrices> batches;
  for (const auto& [count, rows, columns] :
       std::vector<std::array<int64_t, 3>>{{2, 70, 200}, {1, 150, 33}, {3, 48, 48}, {1, 1, 5}, {1, 17, 1}}) {
    const double scale = 1 / std::sqrt(static_cast<double>(rows * columns));
    batches.emplace_back(count, rows, columns, 5, scale);
  }
  return batches;
}

std::vector<std::vector<BFloat16Bits>> orthogonalized(const cpu::ProductKernels& kernels,
                                                      std::vector<Matrices>& x, const std::vector<bool>& ends,
                                                      int threads, bool is_aol = false) {
  std::vector<NewtonSchulzStep> steps(ends.size(), kStep);
  for (size_t i = 0; i < ends.size(); ++i) steps[i].ends = ends[i];
  std::vector<std::vector<ChainProduct>> products;
  // An odd number of ends leaves the results in Y.
  std::vector<std::vector<BFloat16Bits>> kept, out;
  std::vector<ChainBatch> batches;
  for (Matrices& each : x) {
    kept.push_back(each.at);
    out.emplace_back(each.at.size());
  }
  const bool is_in_x = std::ranges::count(ends, true) % 2 == 0;
  for (const Matrices& each : x) {
    products.push_back(newton_schulz_chain(steps, is_aol ? std::min(each.rows, each.columns) : 0));
  }
  for (size_t i = 0; i < x.size(); ++i) {
    ChainBatch batch{x[i].count, x[i].rows, x[i].columns, {}, products[i]};
    batch.operands[index_of(ChainOperand::kX)] = kept[i].data();
    batch.operands[index_of(ChainOperand::kY)] = out[i].data();
    batches.push_back(batch);
  }
  const int64_t bytes = packed_chain_bytes(batches);
  Memory workspace(bytes / 2);
  run_packed_chains(kernels, threads, batches, reinterpret_cast<std::byte*>(workspace.data()));
  return is_in_x ? kept : out;
}

TEST_P(ProductsTest, TheIterationIsThatOfFloat64WithinTheErrorsOfBFloat16) {
  for (const auto& [ends, is_aol] : kIterations) {
    std::vector<Matrices> batches = normalized_batches();
    const std::vector<Matrices> before = batches;
    const auto found = orthogonalized(*GetParam(), batches, ends, kThreads, is_aol);
    for (size_t b = 0; b < batches.size(); ++b) {
      const Matrices& x = batches[b];
      EXPECT_EQ(x.at, before[b].at);
      const bool is_tall = x.rows > x.columns;
      for (int64_t matrix = 0; matrix < x.count; ++matrix) {
        Numbers wide(x.rows * x.columns);
        const auto at = [&](int64_t i, int64_t j) { return is_tall ? j * x.rows + i : i * x.columns + j; };
        for (int64_t i = 0; i < x.rows; ++i) {
          for (int64_t j = 0; j < x.columns; ++j) wide[at(i, j)] = x(matrix, i, j);
        }
        const Numbers expected =
            iterated(wide, std::min(x.rows, x.columns), std::max(x.rows, x.columns), is_aol);
        double error = 0, size = 0;
        for (int64_t i = 0; i < x.rows; ++i) {
          for (int64_t j = 0; j < x.columns; ++j) {
            const double exact = expected[at(i, j)];
            error += std::pow(value_of(found[b][(matrix * x.rows + i) * x.columns + j]) - exact, 2);
            size += exact * exact;
          }
        }
        // The AOL start rounds the first Gram matrix and polynomial once more.
        EXPECT_LT(std::sqrt(error / size), is_aol ? 0.1 : 0.08) << x.rows << " x " << x.columns;
      }
    }
  }
}

TEST_P(ProductsTest, SameBitsForAnyNumberOfThreads) {
  for (const auto& [ends, is_aol] : kIterations) {
    std::vector<Matrices> batches = normalized_batches();
    batches.emplace_back(2, 160, 330, 6, 1e-3);
    const auto expected = orthogonalized(*GetParam(), batches, ends, 1, is_aol);
    for (const int threads : {2, 3, 7})
      EXPECT_EQ(orthogonalized(*GetParam(), batches, ends, threads, is_aol), expected);
  }
}

TEST_P(ProductsTest, WhatIsNotANumberStaysInItsMatrix) {
  for (const auto& [ends, is_aol] : kIterations) {
    std::vector<Matrices> batches = normalized_batches();
    const auto expected = orthogonalized(*GetParam(), batches, ends, kThreads, is_aol);
    for (const double value :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      std::vector<Matrices> spoilt = batches;
      spoilt[0].at[70 * 200 + 1234] = rounded(value);
      auto found = orthogonalized(*GetParam(), spoilt, ends, kThreads, is_aol);
      for (int64_t e = 0; e < 70 * 200; ++e) {
        ASSERT_TRUE(std::isnan(value_of(found[0][70 * 200 + e])));
        found[0][70 * 200 + e] = expected[0][70 * 200 + e];
      }
      EXPECT_EQ(found, expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(OfEachIsa, ProductsTest, testing::ValuesIn(all_kernels()),
                         [](const auto& tested) { return std::string(tested.param->isa); });

}  // namespace
}  // namespace fusedstep::test
