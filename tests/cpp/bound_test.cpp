// Operands that a plan has bound, compared with those of the next step.
#include "src/plan/bound.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <new>

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

// A tensor that begins where a page does, behind a page that nobody may read.
class GuardedTensor {
 public:
  static constexpr size_t kWordsInFront = 3;

  GuardedTensor() : page_(sysconf(_SC_PAGESIZE)) {
    memory_ = mmap(nullptr, 2 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED || mprotect(memory_, page_, PROT_NONE) != 0) throw std::bad_alloc();
    std::fill_n(words(), kWordsInFront, reinterpret_cast<int64_t>(memory_));  // like addresses
    std::fill_n(words() + kWordsInFront, 2 * kMostSizesInTensor, 1);
  }
  GuardedTensor(const GuardedTensor&) = delete;
  GuardedTensor& operator=(const GuardedTensor&) = delete;
  ~GuardedTensor() { munmap(memory_, 2 * page_); }

  // `apart` words are between the sizes and the strides.
  TensorView view(size_t apart) const {
    const int64_t* const sizes = words() + kWordsInFront;
    return {memory_, DType::kFloat, {sizes, 1}, {sizes + apart, 1}};
  }

 private:
  int64_t* words() const { return reinterpret_cast<int64_t*>(static_cast<std::byte*>(memory_) + page_); }

  size_t page_;
  void* memory_;
};

TEST(TensorAddressesTest, NothingInFrontOfATensorIsRead) {
  const GuardedTensor tensor;
  const TensorView inside = tensor.view(kMostSizesInTensor);
  for (size_t words = 0; words <= GuardedTensor::kWordsInFront; ++words) {
    const TensorAddresses addresses(inside, words);
    EXPECT_TRUE(addresses.are_of(inside));
    addresses.prefetch();
  }
  // It looks at all words but the first: of two more, the second is in the page that nobody may read.
  EXPECT_DEATH(TensorAddresses(inside, GuardedTensor::kWordsInFront + 2).prefetch(), "");
}

TEST(TensorAddressesTest, NothingIsReadInFrontOfSizesThatLieOutsideOfATensor) {
  const GuardedTensor tensor;
  for (const size_t apart : {kMostSizesInTensor - 1, kMostSizesInTensor + 1}) {
    TensorAddresses(tensor.view(apart), GuardedTensor::kWordsInFront + 2).prefetch();
  }
}

}  // namespace
}  // namespace fusedstep::test
