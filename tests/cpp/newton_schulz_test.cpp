// The Newton–Schulz iteration as a chain of products, run in double by an interpreter of chains.
#include "src/steps/newton_schulz.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fusedstep::test {
namespace {

// A matrix by rows.
struct Matrix {
  int rows = 0, columns = 0;
  std::vector<double> of;

  Matrix(int rows, int columns)
      : rows(rows), columns(columns), of(static_cast<size_t>(rows) * static_cast<size_t>(columns)) {}
  double& at(int r, int c) {
    return of[static_cast<size_t>(r) * static_cast<size_t>(columns) + static_cast<size_t>(c)];
  }
  double at(int r, int c) const {
    return of[static_cast<size_t>(r) * static_cast<size_t>(columns) + static_cast<size_t>(c)];
  }
  Matrix transposed() const {
    Matrix result(columns, rows);
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns; ++c) result.at(c, r) = at(r, c);
    }
    return result;
  }
};

Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix result(a.rows, b.columns);
  for (int r = 0; r < a.rows; ++r) {
    for (int c = 0; c < b.columns; ++c) {
      for (int k = 0; k < a.columns; ++k) result.at(r, c) += a.at(r, k) * b.at(k, c);
    }
  }
  return result;
}

// a x + b y.
Matrix sum(double a, const Matrix& x, double b, const Matrix& y) {
  Matrix result = x;
  for (size_t i = 0; i < x.of.size(); ++i) result.of[i] = a * x.of[i] + b * y.of[i];
  return result;
}

// The factors of rows that the AOL start has, but for the floor, of a matrix of norm 1.
std::vector<double> factors_of(const Matrix& gram, double least) {
  std::vector<double> factors;
  for (int r = 0; r < gram.rows; ++r) {
    double size = 0;
    for (int c = 0; c < gram.columns; ++c) size += std::abs(gram.at(r, c));
    factors.push_back(1 / std::sqrt(std::max(size, least)));
  }
  return factors;
}

Matrix scaled(Matrix x, const std::vector<double>& of_rows, const std::vector<double>& of_columns) {
  for (int r = 0; r < x.rows; ++r) {
    for (int c = 0; c < x.columns; ++c) {
      if (!of_rows.empty()) x.at(r, c) *= of_rows[static_cast<size_t>(r)];
      if (!of_columns.empty()) x.at(r, c) *= of_columns[static_cast<size_t>(c)];
    }
  }
  return x;
}

Matrix usual_form(Matrix x, const std::vector<NewtonSchulzStep>& steps, bool is_aol) {
  if (is_aol) x = scaled(x, factors_of(x * x.transposed(), kLeastRowSum / x.rows), {});
  for (const auto& [a, b, c, ends] : steps) {
    const Matrix gram = x * x.transposed();
    x = sum(a, x, 1, sum(b, gram, c, gram * gram) * x);
  }
  return x;
}

// Runs a chain on X, which is wide or tall.
Matrix run(const Matrix& x, const std::vector<NewtonSchulzStep>& steps, bool is_aol) {
  const bool is_wide = x.rows <= x.columns;
  std::map<ChainOperand, Matrix> operands;
  operands.insert_or_assign(ChainOperand::kX, x);
  operands.insert_or_assign(ChainOperand::kNone, Matrix(0, 0));
  std::vector<double> factors;
  for (const ChainProduct& product : newton_schulz_chain(steps, is_aol ? std::min(x.rows, x.columns) : 0)) {
    const Matrix &a = operands.at(product.a), &b = operands.at(product.b);
    Matrix c(0, 0);
    switch (product.kind) {
      case ChainKind::kGram:
        c = is_wide ? a * b.transposed() : a.transposed() * b;
        break;
      case ChainKind::kSquare:
        c = a * b;
        break;
      case ChainKind::kWhole:
        c = is_wide ? a * b : b * a.transposed();
        break;
      case ChainKind::kFactors:
        factors = factors_of(a, kLeastRowSum);
        continue;
      case ChainKind::kScaleBoth:
        c = scaled(a, factors, factors);
        break;
      case ChainKind::kScale:
        c = scaled(a, {}, factors);
        break;
    }
    for (double& each : c.of) each *= product.alpha;
    if (product.beta != 0) c = sum(1, c, product.beta, operands.at(product.d));
    if (product.shifted != ChainOperand::kNone) {
      Matrix shifted = c;
      for (int i = 0; i < c.rows; ++i) shifted.at(i, i) += product.shift;
      operands.insert_or_assign(product.shifted, shifted);
    }
    operands.insert_or_assign(product.c, c);
  }
  const auto ends = std::ranges::count_if(steps, &NewtonSchulzStep::ends);
  return operands.at(ends % 2 == 0 ? ChainOperand::kX : ChainOperand::kY);
}

// Steps that end where `ends` has a one, and leave singular values of 1 as they are.
std::vector<NewtonSchulzStep> steps_with(const std::string& ends) {
  std::vector<NewtonSchulzStep> steps;
  for (size_t i = 0; i < ends.size(); ++i) {
    const auto number = static_cast<double>(i);
    steps.push_back({1.5 + 0.25 * number, -0.75 - 0.375 * number, 0.25 + 0.125 * number, ends[i] == '1'});
  }
  return steps;
}

// Where runs end, and whether the iteration begins with the AOL start.
class NewtonSchulzChain : public testing::TestWithParam<std::tuple<const char*, bool>> {};

TEST_P(NewtonSchulzChain, IsTheUsualForm) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  const auto& [ends, is_aol] = GetParam();
  const auto steps = steps_with(ends);
  // The roots of the shorter sides are numbers of float32.
  for (const auto& [rows, columns] : {std::pair{4, 9}, {9, 4}, {4, 4}, {1, 3}}) {
    Matrix x(rows, columns);
    for (double& each : x.of) each = normal(random) / 64;
    const Matrix expected = rows <= columns ? usual_form(x, steps, is_aol)
                                            : usual_form(x.transposed(), steps, is_aol).transposed();
    const Matrix found = run(x, steps, is_aol);
    ASSERT_EQ(found.rows, rows);
    for (size_t i = 0; i < expected.of.size(); ++i) {
      EXPECT_NEAR(found.of[i], expected.of[i], 1e-12 * std::max(1.0, std::abs(expected.of[i]))) << i;
    }
  }
}

// With factors of rows below the floor, a matrix of zeros stays one, and nothing is infinite.
TEST(NewtonSchulzChainOfZeros, StaysZero) {
  Matrix x(3, 5);
  for (int c = 0; c < x.columns; ++c) x.at(1, c) = 0.5;
  const Matrix found = run(x, steps_with("011"), true);
  for (int c = 0; c < x.columns; ++c) {
    EXPECT_EQ(found.at(0, c), 0);
    EXPECT_GT(found.at(1, c), 0);
    EXPECT_EQ(found.at(2, c), 0);
  }
}

// No product of a level reads or writes what another one of the level writes, but for a product's own D and
// E. Scalings write what they read, and read the factors, which are there once.
TEST_P(NewtonSchulzChain, ProductsOfALevelAreIndependent) {
  const auto& [ends, is_aol] = GetParam();
  const auto chain = newton_schulz_chain(steps_with(ends), is_aol ? 4 : 0);
  const auto factors = std::ranges::find(chain, ChainKind::kFactors, &ChainProduct::kind);
  EXPECT_EQ(factors != chain.end(), is_aol);
  for (size_t i = 0; i < chain.size(); ++i) {
    const bool is_scaling = chain[i].kind == ChainKind::kScaleBoth || chain[i].kind == ChainKind::kScale;
    if (chain[i].kind == ChainKind::kFactors) continue;
    EXPECT_EQ(chain[i].c == chain[i].a, is_scaling);
    EXPECT_NE(chain[i].c, chain[i].b);
    EXPECT_FALSE(is_scaling && chain[i].level <= factors->level) << i;
    for (size_t j = 0; j < chain.size(); ++j) {
      if (i == j || chain[i].level != chain[j].level) continue;
      const std::set others{chain[j].a, chain[j].b, chain[j].c, chain[j].d, chain[j].shifted};
      EXPECT_FALSE(others.contains(chain[i].c)) << i << ' ' << j;
      const bool is_shifted = chain[i].shifted != ChainOperand::kNone;
      EXPECT_FALSE(is_shifted && others.contains(chain[i].shifted)) << i << ' ' << j;
    }
  }
  EXPECT_TRUE(std::ranges::is_sorted(chain, {}, &ChainProduct::level));
}

INSTANTIATE_TEST_SUITE_P(Ends, NewtonSchulzChain,
                         testing::Combine(testing::Values("1", "01", "001", "0001", "11111", "01001", "01011",
                                                          "0010101"),
                                          testing::Bool()));

}  // namespace
}  // namespace fusedstep::test
