// What a plan has bound, compared with the operands of the next step.
#include "src/bound.h"

#include <gtest/gtest.h>

#include <array>

namespace fusedstep::test {
namespace {

using Change = Bound::Change;

constexpr int64_t kMatrix[] = {6, 5}, kStrides[] = {5, 1}, kOtherSizes[] = {5, 6}, kTransposed[] = {1, 6};

class BoundTest : public testing::Test {
 protected:
  BoundTest() {
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i] = {&memory[2 * i], DType::kFloat, kMatrix, kStrides};
      grads[i] = {&memory[2 * i + 1], DType::kFloat, kMatrix, kStrides};
    }
    weights[1].sizes = grads[1].sizes = Dims(kMatrix).first(1);
    weights[1].strides = grads[1].strides = Dims(kStrides).last(1);
    weights[2].sizes = weights[2].strides = grads[2].sizes = grads[2].strides = {};
    bound.note(weights, grads);
  }

  Change compare(size_t i) const { return bound.compare(i, weights[i], grads[i]); }

  std::array<float, 8> memory{};
  std::array<TensorView, 3> weights, grads;
  Bound bound;
};

TEST_F(BoundTest, KnowsWhatItHasNoted) {
  EXPECT_EQ(bound.tensors(), 3);
  for (size_t i = 0; i < 3; ++i) {
    bound.prefetch(i);
    EXPECT_EQ(compare(i), Change::kSame);
  }
  bound.prefetch(3);
  bound.clear();
  EXPECT_EQ(bound.tensors(), 0);
}

TEST_F(BoundTest, FollowsAGradient) {
  for (size_t i = 0; i < 3; ++i) {
    grads[i].data = &memory[7];
    EXPECT_EQ(compare(i), Change::kGradMoved);
    bound.move_grad(i, grads[i].data);
    EXPECT_EQ(compare(i), Change::kSame);
  }
}

TEST_F(BoundTest, SeesEveryOtherChange) {
  const auto expect_other = [&](size_t i, auto TensorView::*field, auto value) {
    for (auto* operands : {&weights, &grads}) {
      const TensorView before = (*operands)[i];
      (*operands)[i].*field = value;
      EXPECT_EQ(compare(i), Change::kOther);
      (*operands)[i] = before;
      EXPECT_EQ(compare(i), Change::kSame);
    }
  };
  for (size_t i = 0; i < 3; ++i) {
    expect_other(i, &TensorView::dtype, DType::kBFloat16);
    expect_other(i, &TensorView::device, 0);
  }
  expect_other(0, &TensorView::sizes, Dims(kOtherSizes));
  expect_other(0, &TensorView::strides, Dims(kTransposed));
  weights[0].data = &memory[7];
  EXPECT_EQ(compare(0), Change::kOther);
  weights[2] = grads[2] = weights[1];  // another number of dimensions
  EXPECT_EQ(compare(2), Change::kOther);
}

TEST_F(BoundTest, NotesAnew) {
  weights[0].strides = kTransposed;
  bound.note(weights, grads);
  EXPECT_EQ(compare(0), Change::kSame);
  weights[0].strides = kStrides;
  EXPECT_EQ(compare(0), Change::kOther);
}

}  // namespace
}  // namespace fusedstep::test
