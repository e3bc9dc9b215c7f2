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

// Steps of Adagrad, p - g / (sqrt(s) + eps), from p = 0, by gradients whose squares are lost in s.
class Roots {
 public:
  static constexpr int64_t kCount = int64_t{1} << 20;

  // With prefetches `ahead`, by which kernels may have other loops.
  Roots(const std::string& isa, double eps, PrefetchDistance ahead)
      : forced_(isa),
        eps_(static_cast<float>(eps)),
        model_(adagrad(eps), dense_tensors(adagrad(eps), {kCount})) {
    model_.step({});
    model_.plan().task(0).ahead = ahead;  // the plan stays as it is, since its operands do
  }

  // Expects the root of number(i) in place i, as the update of the gradient grad(number(i)) shows it.
  template <class Number, class Grad>
  void expect(Number number, Grad grad) {
    Tensor& tensor = model_.tensors()[0];
    float *weights = data(tensor.weight), *grads = data(tensor.grad), *states = data(tensor.states[0]);
    for (int64_t i = 0; i < kCount; ++i) {
      weights[i] = 0;
      states[i] = number(i);
      grads[i] = grad(states[i]);
    }
    model_.step({});
    for (int64_t i = 0; i < kCount; ++i) {
      const float s = number(i), expected = -(grad(s) / (std::sqrt(s) + eps_));
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(weights[i])) << "of " << s << " at " << i;
      } else {
        ASSERT_EQ(weights[i], expected) << "of " << s << " at " << i;
      }
    }
  }

 private:
  static float* data(Operand& operand) { return static_cast<float*>(operand.view().data); }
  static Case adagrad(double eps) {
    const rules::AdagradHyper hyper{.lr = 1, .lr_decay = 0, .weight_decay = 0, .eps = eps};
    return {{"adagrad", 1, false, bind_rule<rules::Adagrad>(hyper, 0), nullptr}, DType::kFloat};
  }

  ForcedIsa forced_;
  float eps_;
  Model model_;
};

class RootTest : public testing::TestWithParam<std::string> {
 protected:
  static constexpr PrefetchDistance kAheads[] = {{}, {.first = 1024, .second = 6144}};
};

// By a gradient that is the root scaled down: a power of two where the root is right, another number where it
// is but one unit of the last place off. Four times a number has the same significand, and twice its root:
// two neighbouring exponents stand for all. Those here are also the ones at the ends. Kernels may take the
// roots of half of two or four neighbouring registers in another way: each number is in both halves.
TEST_P(RootTest, OfEverySignificand) {
  for (const PrefetchDistance ahead : kAheads) {
    Roots roots(GetParam(), 0, ahead);
    for (const int exponent : {-126, -98, -97, -96, -95, -1, 0, 126, 127}) {
      for (int64_t first = 0; first < int64_t{1} << kSignificandBits; first += Roots::kCount) {
        const auto bits =
            static_cast<uint32_t>((exponent + 127) << kSignificandBits) + static_cast<uint32_t>(first);
        for (const uint32_t other_register : {0, 48}) {
          ASSERT_NO_FATAL_FAILURE(roots.expect(
              [&](int64_t i) {
                return std::bit_cast<float>(bits + (static_cast<uint32_t>(i) ^ other_register));
              },
              [](float s) { return std::sqrt(s) * 0x1p-40f; }));
        }
      }
    }
  }
}

// Each in every place of a register of ordinary numbers. With eps the quotient of a root of zero is a number.
TEST_P(RootTest, OfNumbersAtTheEdgesAmongOthers) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const PrefetchDistance ahead : kAheads) {
    Roots roots(GetParam(), 1, ahead);
    for (const float edge : {0.0f, -0.0f, 0x1p-149f, 0x1.8p-140f, 0x1p-126f, 0x1.fffffep-97f, 0x1p-96f,
                             0x1.fffffep127f, kInfinity, std::numeric_limits<float>::quiet_NaN(), -1.0f}) {
      ASSERT_NO_FATAL_FAILURE(roots.expect(
          [&](int64_t i) { return i % 37 == 5 ? edge : 1.0f + static_cast<float>(i) * 0x1p-23f; },
          [](float) { return 0x1p-100f; }));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, RootTest, testing::ValuesIn(isas()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace fusedstep::test
