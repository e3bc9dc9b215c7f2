// The search for torch's negative bit, in memory that looks like that of tensors.
#include "src/ops/negative_bit.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <vector>

namespace fusedstep::test {
namespace {

// A tensor from its sizes on: sizes and strides, words that nobody has written, and the word with the bit.
struct TensorInMemory {
  std::array<int64_t, 5> sizes, strides;
  std::array<uint64_t, 14> behind;
};

constexpr size_t kKeys = 6;  // the word behind strides with the bit
constexpr uint64_t kBit = uint64_t{1} << 40;

class NegativeBitTest : public testing::Test {
 protected:
  NegativeBitTest() {
    for (Kinds& each : kinds) {
      for (TensorInMemory& tensor : each) {
        for (uint64_t& word : tensor.behind) word = random();
        tensor.behind[kKeys] &= ~kBit;
      }
      each[1].behind[kKeys] |= kBit;
    }
  }

  ops::NegativeBit search() const {
    std::vector<ops::NegativeBit::Trial> trials;
    for (const Kinds& each : kinds) {
      trials.push_back({each[0].sizes.data(), each[1].sizes.data(), each[2].sizes.data()});
    }
    return ops::NegativeBit::among(trials);
  }

  static std::optional<bool> of(const ops::NegativeBit& bit, const TensorInMemory& tensor) {
    return bit.of(Dims(tensor.sizes.data(), 2), Dims(tensor.strides.data(), 2));
  }

  using Kinds = std::array<TensorInMemory, 3>;  // a tensor, its negated view, and that of that one
  std::mt19937_64 random{1};
  std::array<Kinds, 24> kinds;
};

TEST_F(NegativeBitTest, IsFoundBehindWhatNobodyHasWritten) {
  const ops::NegativeBit bit = search();
  for (const Kinds& each : kinds) {
    EXPECT_EQ(of(bit, each[0]), false);
    EXPECT_EQ(of(bit, each[1]), true);
    EXPECT_EQ(of(bit, each[2]), false);
  }
}

TEST_F(NegativeBitTest, IsNotWhatViewsLieUpon) {
  for (Kinds& each : kinds) {
    each[0].behind[1] = 0;
    each[1].behind[1] = each[2].behind[1] = 4;
  }
  const ops::NegativeBit bit = search();
  EXPECT_EQ(of(bit, kinds[0][1]), true);
  EXPECT_EQ(of(bit, kinds[0][2]), false);
}

TEST_F(NegativeBitTest, IsOneBit) {
  for (Kinds& each : kinds) each[1].behind[kKeys] |= 3, each[0].behind[kKeys] = each[2].behind[kKeys] = 0;
  EXPECT_EQ(of(search(), kinds[0][1]), std::nullopt);
}

TEST_F(NegativeBitTest, IsUnknownWhereNoBitTells) {
  kinds[5][2].behind[kKeys] |= kBit;
  EXPECT_EQ(of(search(), kinds[0][0]), std::nullopt);
  EXPECT_EQ(of(ops::NegativeBit::among({}), kinds[0][0]), std::nullopt);
}

TEST_F(NegativeBitTest, IsOfTensorsThatKeepTheirSizes) {
  const ops::NegativeBit bit = search();
  const std::array<int64_t, 2> sizes{}, strides{};
  EXPECT_EQ(bit.of(sizes, strides), std::nullopt);
}

}  // namespace
}  // namespace fusedstep::test
