// Square roots of floats, in the kernels of every instruction set, against the definition: IEEE's.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "fusedstep/isa.h"
#include "tests/cpp/model.h"

namespace fusedstep::test {
namespace {

constexpr int kSignificandBits = 23;

// Steps of Adagrad, p - g / sqrt(s): a gradient that is the root of s, scaled down until its square is lost
// in s, makes a power of two of the weight, and another number where the root is but one unit of the last
// place off.
class RootTest : public testing::TestWithParam<std::string> {
 protected:
  static constexpr int64_t kCount = int64_t{1} << 20;
  static constexpr float kScale = 0x1p-40f;

  RootTest() : forced_(GetParam()), model_(adagrad(), dense_tensors(adagrad(), {kCount})) {}

  template <class Number>
  void expect_roots(Number number) {
    Tensor& tensor = model_.tensors()[0];
    float *weight = data(tensor.weight), *grad = data(tensor.grad), *state = data(tensor.states[0]);
    for (int64_t i = 0; i < kCount; ++i) {
      weight[i] = 0;
      state[i] = number(i);
      grad[i] = std::sqrt(state[i]) * kScale;
    }
    model_.step({});
    for (int64_t i = 0; i < kCount; ++i) {
      const float s = number(i), root = std::sqrt(s), expected = -(root * kScale / root);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(weight[i])) << "of " << s << " at " << i;
      } else {
        ASSERT_EQ(weight[i], expected) << "of " << s << " at " << i;
      }
    }
  }

 private:
  static float* data(Operand& operand) { return static_cast<float*>(operand.view().data); }
  static Case adagrad() {
    const rules::AdagradHyper hyper{.lr = 1, .lr_decay = 0, .weight_decay = 0, .eps = 0};
    return {{"adagrad", 1, false, bind_rule<rules::Adagrad>(hyper, 0), nullptr}, DType::kFloat};
  }

  ForcedIsa forced_;
  Model model_;
};

// Four times a number has the same significand, and twice its root: two neighbouring exponents stand for all.
// Those here are also the ones at the ends.
TEST_P(RootTest, OfEverySignificand) {
  for (const int exponent : {-126, -98, -97, -96, -95, -1, 0, 126, 127}) {
    for (int64_t first = 0; first < int64_t{1} << kSignificandBits; first += kCount) {
      const auto bits =
          static_cast<uint32_t>((exponent + 127) << kSignificandBits) + static_cast<uint32_t>(first);
      ASSERT_NO_FATAL_FAILURE(
          expect_roots([&](int64_t i) { return std::bit_cast<float>(bits + static_cast<uint32_t>(i)); }));
    }
  }
}

// Each in every place of a register of ordinary numbers.
TEST_P(RootTest, OfNumbersAtTheEdgesAmongOthers) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float edge : {0.0f, -0.0f, 0x1p-149f, 0x1.8p-140f, 0x1p-126f, 0x1.fffffep-97f, 0x1p-96f,
                           0x1.fffffep127f, kInfinity, std::numeric_limits<float>::quiet_NaN(), -1.0f}) {
    ASSERT_NO_FATAL_FAILURE(expect_roots(
        [&](int64_t i) { return i % 37 == 5 ? edge : 1.0f + static_cast<float>(i) * 0x1p-23f; }));
  }
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, RootTest, testing::ValuesIn(isas()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace fusedstep::test
