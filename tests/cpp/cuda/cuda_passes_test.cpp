// The passes around matrix products on CUDA, by the emulator, against their formulas element by element.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "src/run/backend.h"
#include "src/steps/channel_moves.h"
#include "tests/cpp/cuda/numbers.h"

namespace fusedstep::emulator {
extern int launches;
}

namespace fusedstep::test {
namespace {

// The nearest number of bfloat16, ties to even.
float as_bfloat16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}
uint16_t bits_of_bfloat16(float x) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(as_bfloat16(x)) >> 16);
}
float value_of(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Ways that a number lies in memory, and what is left of it there.
struct AsFloat {
  using Stored = float;
  using Maths = float;
  static float put(float x) { return x; }
  static float get(float x) { return x; }
};
struct AsDouble {
  using Stored = double;
  using Maths = double;
  static double put(double x) { return x; }
  static double get(double x) { return x; }
};
struct AsBFloat16 {
  using Stored = uint16_t;
  using Maths = float;
  static uint16_t put(float x) { return bits_of_bfloat16(x); }
  static float get(uint16_t x) { return value_of(x); }
};

template <PassFormat kFormat_, class Stored_, class Product_>
struct Case {
  static constexpr PassFormat kFormat = kFormat_;
  using Stored = Stored_;
  using Product = Product_;
};
using Cases =
    testing::Types<Case<PassFormat::kFloat, AsFloat, AsFloat>, Case<PassFormat::kDouble, AsDouble, AsDouble>,
                   Case<PassFormat::kBFloat16, AsBFloat16, AsBFloat16>,
                   Case<PassFormat::kFloatBFloat16, AsFloat, AsBFloat16>>;

// The tensors of a pass. More than one launch has room for, some without elements, some out of step with
// words.
template <class Case>
struct Subject {
  std::vector<int64_t> counts;
  std::vector<Numbers<typename Case::Stored>> stored, grads;
  std::vector<Numbers<typename Case::Product>> products;

  Subject() {
    std::mt19937_64 random(3);
    const std::vector<int64_t> sizes{0, 1, 3, 4, 4095, 4096, 4097, 9000};
    for (int i = 0; i < 70; ++i) {
      counts.push_back(sizes[i % sizes.size()]);
      stored.emplace_back(counts[i], i % 5 == 1, random);
      grads.emplace_back(counts[i], i % 5 == 2, random);
      products.emplace_back(counts[i], i % 5 == 3, random);
    }
  }
  std::vector<PassTensor> tensors(bool with_grads) {
    std::vector<PassTensor> all;
    for (size_t i = 0; i < counts.size(); ++i) {
      const void* const grad = with_grads ? grads[i].data() : nullptr;
      all.push_back({stored[i].data(), grad, products[i].data(), counts[i], factor(i)});
    }
    return all;
  }
  static double factor(size_t i) { return -0.01 * static_cast<double>(i + 1); }
};

template <class T>
T between(T from, T to, T share) {
  return std::abs(share) < T(0.5) ? std::fma(share, to - from, from) : std::fma(from - to, 1 - share, to);
}

template <class Case>
class CudaPassesTest : public testing::Test {};
TYPED_TEST_SUITE(CudaPassesTest, Cases);

TYPED_TEST(CudaPassesTest, AveragesAndUpdatesAreTheirFormulas) {
  using Stored = typename TypeParam::Stored;
  using Product = typename TypeParam::Product;
  using T = typename Stored::Maths;
  for (const AverageOptions options : {AverageOptions{0.05, 0.95, true}, AverageOptions{0.6, 0.4, true},
                                       AverageOptions{0.05, 0.95, false}}) {
    Subject<TypeParam> subject;
    auto expected = subject;
    for (size_t i = 0; i < subject.counts.size(); ++i) {
      for (int64_t k = 0; k < subject.counts[i]; ++k) {
        auto& average = expected.stored[i].data()[k];
        const T grad = Stored::get(expected.grads[i].data()[k]);
        average = Stored::put(between(Stored::get(average), grad, static_cast<T>(options.share)));
        const T now = Stored::get(average);
        const T update = options.leads ? between(grad, now, static_cast<T>(options.lead)) : now;
        expected.products[i].data()[k] = Product::put(update);
      }
    }
    const int before = emulator::launches;
    device_passes().average(0, TypeParam::kFormat, subject.tensors(true), options);
    EXPECT_EQ(emulator::launches - before, 2);
    for (size_t i = 0; i < subject.counts.size(); ++i) {
      EXPECT_EQ(subject.stored[i].all, expected.stored[i].all) << i;
      EXPECT_EQ(subject.grads[i].all, expected.grads[i].all) << i;
      EXPECT_EQ(subject.products[i].all, expected.products[i].all) << i;
    }
  }
}

TYPED_TEST(CudaPassesTest, WeightsDecayAndMove) {
  using Stored = typename TypeParam::Stored;
  using Product = typename TypeParam::Product;
  using T = typename Stored::Maths;
  for (const double keep : {1.0, 0.99}) {
    Subject<TypeParam> subject;
    auto expected = subject;
    for (size_t i = 0; i < subject.counts.size(); ++i) {
      for (int64_t k = 0; k < subject.counts[i]; ++k) {
        auto& weight = expected.stored[i].data()[k];
        const T kept = Stored::get(Stored::put(Stored::get(weight) * static_cast<T>(keep)));
        const T direction = Product::get(expected.products[i].data()[k]);
        weight = Stored::put(std::fma(static_cast<T>(subject.factor(i)), direction, kept));
      }
    }
    device_passes().move(0, TypeParam::kFormat, subject.tensors(false), keep);
    for (size_t i = 0; i < subject.counts.size(); ++i) {
      EXPECT_EQ(subject.stored[i].all, expected.stored[i].all) << i;
      EXPECT_EQ(subject.products[i].all, expected.products[i].all) << i;
    }
  }
}

// Batches of matrices: more than one launch has room for, sizes of no words, and of more than one block.
TEST(CudaNormsTest, MatricesAreDividedByTheirNormsInPlace) {
  constexpr double kEps = 1e-3;
  for (const bool adds_eps : {false, true}) {
    std::mt19937_64 random(5);
    std::vector<Numbers<AsBFloat16>> all;
    std::vector<NormTensor> tensors;
    const std::vector<int64_t> sizes{1, 7, 8, 16384, 16400, 40000};
    for (size_t i = 0; i < 70; ++i) {
      const int64_t size = sizes[i % sizes.size()], matrices = 1 + static_cast<int64_t>(i % 3);
      all.emplace_back(matrices * size, i % 4 == 1, random);
      if (i % 7 == 2) all.back().data()[size / 2] = 0x7fc1;  // NaN
      if (i % 7 == 3) std::fill_n(all.back().data(), size, uint16_t{0});
      tensors.push_back({nullptr, nullptr, matrices, size});
    }
    const auto before = all;
    for (size_t i = 0; i < all.size(); ++i) tensors[i].from = tensors[i].to = all[i].data();
    std::vector<float> sums(device_passes().norm_sums(tensors) + 1, -1.0f);
    device_passes().normalize(0, NormFormat::kBFloat16, tensors, {kEps, adds_eps}, sums.data());
    EXPECT_EQ(sums.back(), -1.0f);
    for (size_t i = 0; i < all.size(); ++i) {
      for (int64_t matrix = 0; matrix < tensors[i].matrices; ++matrix) {
        const int64_t first = all[i].begin + matrix * tensors[i].size;
        double squares = 0;
        for (int64_t k = first; k < first + tensors[i].size; ++k) {
          squares += std::pow(AsBFloat16::get(before[i].all[k]), 2);
        }
        const double norm = std::sqrt(squares), divisor = adds_eps ? norm + kEps : std::max(norm, kEps);
        for (int64_t k = first; k < first + tensors[i].size; ++k) {
          const double found = AsBFloat16::get(all[i].all[k]),
                       exact = AsBFloat16::get(before[i].all[k]) / divisor;
          if (std::isnan(norm)) {
            ASSERT_TRUE(std::isnan(found)) << i;
          } else {
            ASSERT_NEAR(found, exact, std::abs(exact) * 0x1.01p-8) << i;
          }
        }
      }
      const auto is_margin = [&](int64_t k) {
        return k < all[i].begin || k >= all[i].begin + tensors[i].matrices * tensors[i].size;
      };
      for (int64_t k = 0; k < static_cast<int64_t>(all[i].all.size()); ++k) {
        if (is_margin(k)) ASSERT_EQ(all[i].all[k], before[i].all[k]) << i;
      }
    }
  }
}

// A matrix with a margin, whose rows or columns lie apart.
template <class As>
struct Matrix {
  Numbers<As> numbers;
  std::array<int64_t, 2> sizes, strides;

  // `layout`: 0 in order, 1 rows apart, 2 turned, 3 turned with columns apart.
  Matrix(int64_t rows, int64_t columns, int layout, int64_t shift, std::mt19937_64& random)
      : numbers(2 * (rows + 3) * (columns + 3), shift, random), sizes{rows, columns} {
    const int64_t apart = layout % 2 == 0 ? 0 : 3;
    if (layout < 2) {
      strides = {columns + apart, 1};
    } else {
      strides = {1 + apart % 2, (1 + apart % 2) * rows + apart};
    }
  }
  TensorView view(DType dtype, int device) { return {numbers.data(), dtype, sizes, strides, device}; }
};

template <class As>
struct DTypeOf;
template <>
struct DTypeOf<AsFloat> {
  static constexpr DType kDType = DType::kFloat;
};
template <>
struct DTypeOf<AsDouble> {
  static constexpr DType kDType = DType::kDouble;
};
template <>
struct DTypeOf<AsBFloat16> {
  static constexpr DType kDType = DType::kBFloat16;
};

// The operands of moves by channels: more than one launch has room for, channels of several segments, and
// matrices without elements.
template <class Wide, class Weight, class Grad>
struct ChannelSubject {
  std::vector<Channels> channels;
  std::vector<Matrix<Wide>> lows, updates;
  std::vector<Matrix<Weight>> weights;
  std::vector<Matrix<Grad>> grads;
  std::vector<Numbers<Wide>> lasts;
  std::vector<double> lengths, memory;

  ChannelSubject() {
    std::mt19937_64 random(7);
    const std::vector<std::pair<int64_t, int64_t>> shapes{{5, 7}, {40, 132}, {1, 4},   {300, 9},
                                                          {3, 0}, {0, 3},    {2, 4200}};
    for (int i = 0; i < 63; ++i) {
      const auto [rows, columns] = shapes[i % shapes.size()];
      channels.push_back(static_cast<Channels>(i % 3));
      const int64_t rank = 1 + i % 3;
      const bool by_columns = channels.back() == Channels::kColumns;
      const int64_t low_rows = by_columns ? rank : rows, low_columns = by_columns ? columns : rank;
      lows.emplace_back(low_rows, low_columns, 0, 0, random);
      updates.emplace_back(low_rows, low_columns, 0, 0, random);
      weights.emplace_back(rows, columns, i / 2 % 4, i % 5 == 1, random);
      grads.emplace_back(rows, columns, i % 4, i % 5 == 2, random);
      lasts.emplace_back(1, 0, random);
      lasts.back().data()[0] = Wide::put(i % 4 == 0 ? 0 : 0.01F * static_cast<float>(i));
      lengths.push_back(0.5 + i);
    }
  }

  template <class As>
  static std::vector<TensorView> views(std::vector<Matrix<As>>& all, int device) {
    std::vector<TensorView> found;
    for (Matrix<As>& matrix : all) found.push_back(matrix.view(DTypeOf<As>::kDType, device));
    return found;
  }

  void run(int device, bool in_front) {
    ChannelMoves moves(views(lows, device), views(updates, device), channels);
    std::vector<TensorView> last;
    for (auto& number : lasts) last.push_back({number.data(), DTypeOf<Wide>::kDType, {}, {}, device});
    memory.assign(moves.bind(views(grads, device), last, lengths, 1) + 1, -1.0);
    moves.bind_weights(views(weights, device));
    moves.use(memory.data());
    moves.sum_gradients();
    moves.sum_updates();
    moves.scale({0.25, 1e-8});
    moves.limit({true, in_front, 1.5, 1.01, 1e-8, -0.01});
    moves.move(0, channels.size(), 0.99);
    EXPECT_EQ(memory.back(), -1.0);
  }
};

template <class As>
void expect_near(const Numbers<As>& found, const Numbers<As>& expected, double bound) {
  for (size_t k = 0; k < found.all.size(); ++k) {
    const double a = As::get(found.all[k]), b = As::get(expected.all[k]);
    ASSERT_NEAR(a, b, bound * std::max(1.0, std::abs(b))) << k;
  }
}

template <class Wide, class Weight, class Grad>
void expect_moves_of_both_engines_to_agree(double bound, double bound_of_weights) {
  for (const bool in_front : {false, true}) {
    ChannelSubject<Wide, Weight, Grad> expected, found;
    const auto before = found.weights;
    expected.run(kHost, in_front);
    found.run(0, in_front);
    int64_t channels = 0;
    for (size_t i = 0; i < found.channels.size(); ++i) {
      const auto [rows, columns] = found.weights[i].sizes;
      const Channels kind = found.channels[i];
      channels += kind == Channels::kWhole ? 1 : (kind == Channels::kRows ? rows : columns);
      expect_near(found.weights[i].numbers, expected.weights[i].numbers, bound_of_weights);
      expect_near(found.lasts[i], expected.lasts[i], bound);
      if (rows * columns > 0) EXPECT_NE(found.weights[i].numbers.all, before[i].numbers.all);
    }
    const int64_t sums = 3 * channels + static_cast<int64_t>(found.channels.size());
    for (int64_t k = 0; k < sums; ++k) {
      ASSERT_NEAR(found.memory[k], expected.memory[k], 1e-12 * std::abs(expected.memory[k])) << k;
    }
  }
}

TEST(CudaChannelsTest, MovesAreThoseOfTheCpu) {
  expect_moves_of_both_engines_to_agree<AsFloat, AsFloat, AsFloat>(1e-6, 1e-6);
  expect_moves_of_both_engines_to_agree<AsDouble, AsDouble, AsDouble>(1e-12, 1e-12);
  expect_moves_of_both_engines_to_agree<AsFloat, AsFloat, AsBFloat16>(1e-6, 1e-6);
  expect_moves_of_both_engines_to_agree<AsFloat, AsBFloat16, AsBFloat16>(1e-6, 1e-2);
}

}  // namespace
}  // namespace fusedstep::test
