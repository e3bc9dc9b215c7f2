// The words of rules on every instruction set, register by register, against one element at a time; and that
// against IEEE and torch.
#include "tests/cpp/words.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fusedstep/isa.h"

namespace fusedstep::test {
namespace {

constexpr int kMostTogether = 64;

const Words& words_of(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return cpu::avx512::kWords;
  if (isa == "avx2") return cpu::avx2::kWords;
#endif
  return cpu::base::kWords;
}

template <class T>
std::vector<T> edges() {
  using Limits = std::numeric_limits<T>;
  std::vector<T> edges = {0,
                          1,
                          T(1.5),
                          3,
                          Limits::min(),
                          Limits::denorm_min(),
                          Limits::max(),
                          Limits::infinity(),
                          Limits::quiet_NaN()};
  for (size_t i = 0, count = edges.size(); i < count; ++i) edges.push_back(-edges[i]);
  return edges;
}

// All pairs of edges, and random numbers up to a multiple of what is worked on together.
template <class T>
void operands(std::vector<T>& x, std::vector<T>& y) {
  for (const T a : edges<T>()) {
    for (const T b : edges<T>()) {
      x.push_back(a);
      y.push_back(b);
    }
  }
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  while (x.size() % kMostTogether != 0 || x.size() < 1024) {
    x.push_back(static_cast<T>(normal(random)));
    y.push_back(static_cast<T>(normal(random)));
  }
}

template <class T>
bool same(T a, T b) {
  // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): its bits are what is compared
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0;
}

template <Word kWord, class T>
void expect_word(RunWord<T> run) {
  std::vector<T> x, y;
  operands(x, y);
  std::vector<T> result(x.size());
  run(x.data(), y.data(), result.data(), static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    const T expected = word_of<kWord>(x[i], y[i]);
    ASSERT_TRUE(same(result[i], expected)) << kWordNames[kWord] << "(" << x[i] << ", " << y[i] << ") is "
                                           << result[i] << ", should be " << expected;
  }
}

template <int... kWord>
void expect_words(const Words& words, std::integer_sequence<int, kWord...>) {
  for (const auto& of_floats : words.of_floats) {
    (expect_word<static_cast<Word>(kWord)>(of_floats[kWord]), ...);
  }
  (expect_word<static_cast<Word>(kWord)>(words.of_doubles[kWord]), ...);
}

class WordsTest : public testing::TestWithParam<std::string> {
 protected:
  const Words& words() const { return words_of(GetParam()); }
};

TEST_P(WordsTest, OfRegistersAreThoseOfTheirElements) {
  EXPECT_EQ(words().isa, GetParam());
  expect_words(words(), std::make_integer_sequence<int, kWords>());
}

// A span of a weight and a gradient alone: registers, groups of them and the tail.
TEST_P(WordsTest, ARuleMayHaveNoState) {
  for (const unsigned flags : {0u, 1u}) {
    for (const int64_t count : {0, 1, 7, 16, 64, 1000}) {
      std::vector<float> weight, grad;
      for (int64_t i = 0; i < count; ++i) {
        weight.push_back(static_cast<float>(i));
        grad.push_back(static_cast<float>(i % 5) - 2);
      }
      const std::vector<float> before = weight;
      const rules::PlainScalars<float> scalars = rules::Plain<0>::prepare<float>({.lr = 0.125}, 1);
      cpu::Span span{};
      span.operand[kWeight] = weight.data();
      span.operand[kGrad] = grad.data();
      span.rows = 1;
      span.count = count;
      span.scalars = &scalars;
      span.grad_factor = -3;
      const cpu::SpanKernel& kernel = words().plain[static_cast<int>(Format::kFloat)][flags];
      EXPECT_EQ(kernel.reads, 0b11u);
      EXPECT_EQ(kernel.writes, 0b01u);
      kernel.run(span);
      for (int64_t i = 0; i < count; ++i) {
        const float move = flags == 0 ? -3 * grad[i] : static_cast<float>((grad[i] < 0) - (grad[i] > 0));
        ASSERT_EQ(weight[i], before[i] - 0.125f * move) << i << " of " << count;
      }
    }
  }
}

// The master copy is then the only state.
TEST_P(WordsTest, ARuleWithoutStateMayHaveAMaster) {
  constexpr int64_t kCount = 100;
  std::vector<uint16_t> weight(kCount, 0x3f80), grad(kCount, 0x3f80);  // 1 in bfloat16
  std::vector<float> master(kCount, 1.0f);
  const rules::PlainScalars<float> scalars = rules::Plain<0>::prepare<float>({.lr = 0x1p-12}, 1);
  cpu::Span span{};
  span.operand[kWeight] = weight.data();
  span.operand[kGrad] = grad.data();
  span.operand[kFirstState] = master.data();
  span.rows = 1;
  span.count = kCount;
  span.scalars = &scalars;
  span.grad_factor = 1;
  const cpu::SpanKernel& kernel = words().plain[static_cast<int>(Format::kBFloat16Master)][0];
  EXPECT_EQ(kernel.writes, 0b101u);
  kernel.run(span);
  for (int64_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(master[i], 1 - 0x1p-12f);
    ASSERT_EQ(weight[i], 0x3f80);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, WordsTest, testing::ValuesIn(isas()),
                         [](const auto& info) { return info.param; });

// As torch.sign: 0 for zeros of either sign and for NaN.
TEST(WordTest, SignOf) {
  for (const float x : {0.0f, -0.0f, std::nanf(""), -std::nanf("")}) {
    EXPECT_EQ(std::bit_cast<uint32_t>(rules::sign_of(x)), 0u) << x;
    EXPECT_EQ(std::bit_cast<uint64_t>(rules::sign_of(static_cast<double>(x))), 0u) << x;
  }
  for (const float x : {1.0f, 0x1p-149f, INFINITY}) {
    EXPECT_EQ(rules::sign_of(x), 1.0f);
    EXPECT_EQ(rules::sign_of(-x), -1.0f);
    EXPECT_EQ(rules::sign_of(static_cast<double>(-x)), -1.0);
  }
}

TEST(WordTest, Absolute) {
  for (const float x : {0.0f, 1.0f, 0x1p-149f, INFINITY}) {
    for (const float of : {x, -x}) {
      EXPECT_EQ(std::bit_cast<uint32_t>(rules::absolute(of)), std::bit_cast<uint32_t>(x)) << of;
      EXPECT_EQ(rules::absolute(static_cast<double>(of)), static_cast<double>(x)) << of;
    }
  }
  EXPECT_TRUE(std::isnan(rules::absolute(-std::nanf(""))));
}

TEST(WordTest, MaximumKeepsNan) {
  EXPECT_EQ(rules::maximum(1.0f, 2.0f), 2.0f);
  EXPECT_EQ(rules::maximum(-1.0, -2.0), -1.0);
  EXPECT_TRUE(std::isnan(rules::maximum(std::nanf(""), 1.0f)));
  EXPECT_TRUE(std::isnan(rules::maximum(1.0f, std::nanf(""))));
}

}  // namespace
}  // namespace fusedstep::test
