// Divisions and roots of several numbers at a time, by the emulator's estimates: rounded as IEEE wants.
#include "tests/cpp/cuda/emulator.h"
//
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cuda_kernels/elementwise.cuh"
#include "tests/cpp/words.h"

namespace fusedstep::cuda {
namespace {

using Four = Pack<float, 4>;

uint32_t bits(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  return bits;
}
float from_bits(uint32_t bits) {
  float x = 0;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

void expect_quotients(const float (&a)[4], const float (&b)[4]) {
  const Four quotient = Four(a) / Four(b);
  for (int j = 0; j < 4; ++j) EXPECT_EQ(bits(quotient.of[j]), bits(a[j] / b[j])) << a[j] << " / " << b[j];
}

TEST(PackTest, QuotientsOfRandomNumbersAreRounded) {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    float a[4], b[4];
    for (int j = 0; j < 4; ++j) {
      a[j] = from_bits((random() & 0x807fffff) | (60 + random() % 100) << 23);
      b[j] = from_bits((random() & 0x807fffff) | (70 + random() % 80) << 23);
    }
    expect_quotients(a, b);
  }
}

// The quotient of a power of two and the last float before another is next to the middle of two floats.
TEST(PackTest, QuotientsByTheLastFloatBeforeAPowerOfTwoAreRounded) {
  for (int exponent = -50; exponent < 50; ++exponent) {
    const float a = std::ldexp(1.0f, exponent), b = std::nextafter(2.0f, 0.0f);
    expect_quotients({a, -a, a * 1.5f, 0.0f}, {b, b, b, b});
    expect_quotients({a, a, -a, a}, {b * 0.25f, std::nextafter(b, 0.0f), 3.0f, -b});
  }
}

TEST(PackTest, QuotientsOutOfRangeAreRounded) {
  const float inf = INFINITY, tiny = from_bits(1);
  expect_quotients({1.0f, -1.0f, 0.0f, -0.0f}, {0.0f, 0.0f, 1.0f, 1.0f});
  expect_quotients({tiny, 1.0f, inf, 1e38f}, {3.0f, tiny, 2.0f, 1e-38f});
  expect_quotients({1e-38f, 1e-30f, -1.0f, 2.0f}, {3.0f, 7e8f, inf, 1e38f});
}

TEST(PackTest, RootsAreRounded) {
  std::mt19937 random(2);
  for (int i = 0; i < 200000; ++i) {
    float x[4];
    for (float& of : x) of = from_bits(random() & 0x7f7fffff);
    const Four root = square_root(Four(x));
    for (int j = 0; j < 4; ++j) EXPECT_EQ(bits(root.of[j]), bits(std::sqrt(x[j]))) << x[j];
  }
}

// The words of rules, of four numbers and of one.
template <test::Word kWord>
void expect_word() {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const float y : {0.0f, 1.0f, -2.0f, inf, nan}) {
    const float all[] = {0.0f, -0.0f, 1.0f, -2.0f,        inf,           -inf,
                         nan,  -nan,  3.0f, from_bits(1), -from_bits(1), 0.5f};
    for (int first = 0; first < 12; first += 4) {
      const Four words = test::word_of<kWord>(Four(all + first), Four(y));
      for (int j = 0; j < 4; ++j) {
        const float expected = test::word_of<kWord>(all[first + j], y);
        if (std::isnan(expected)) {
          EXPECT_TRUE(std::isnan(words.of[j]))
              << test::kWordNames[kWord] << " " << all[first + j] << " " << y;
        } else {
          EXPECT_EQ(bits(words.of[j]), bits(expected)) << test::kWordNames[kWord] << " " << all[first + j];
        }
      }
    }
  }
}

TEST(PackTest, WordsAreThoseOfOneNumber) {
  expect_word<test::kSignOf>();
  expect_word<test::kAbsolute>();
  expect_word<test::kMaximum>();
  expect_word<test::kWhereEqual>();
  expect_word<test::kMulAdd>();
  expect_word<test::kNegate>();
}

// A weight and its gradient alone, in words with a tail and element by element.
TEST(StatelessTest, ARuleMayHaveNoState) {
  constexpr int kCount = 1001;
  for (const Access access : {kInWords, kByElement}) {
    alignas(kWordBytes) float weight[kCount], grad[kCount];
    for (int i = 0; i < kCount; ++i) {
      weight[i] = static_cast<float>(i);
      grad[i] = static_cast<float>(i % 5) - 2;
    }
    TensorTask task{};
    task.data[kWeight] = weight;
    const Grad of_weight{grad, nullptr, false};
    const NumberedChunk chunk{{.tensor = 0, .begin = 0, .end = kCount}, 0};
    Launch launch{};
    launch.tensors = &task;
    launch.grads = &of_weight;
    launch.chunks = &chunk;
    launch.chunk_count = 1;
    const auto scalars = rules::Plain<1>::prepare<float>({.lr = 0.125}, 1);
    std::memcpy(&launch.scalars, &scalars, sizeof scalars);
    launch.sign = 1;
    launch.grad_factor = 3;
    if (access == kInWords) {
      launch_update<kInWords, rules::Plain<1>, float, float>(launch);
    } else {
      launch_update<kByElement, rules::Plain<1>, float, float>(launch);
    }
    for (int i = 0; i < kCount; ++i) {
      const float sign = static_cast<float>((grad[i] > 0) - (grad[i] < 0));
      ASSERT_EQ(weight[i], static_cast<float>(i) - 0.125f * sign) << i;
    }
  }
}

}  // namespace
}  // namespace fusedstep::cuda
