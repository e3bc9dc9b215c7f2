// Scalings of symmetric matrices on CUDA, by the emulator, against float64.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cuda_kernels/matrix_scalings.h"
#include "src/core/matrix_chain.h"

namespace fusedstep::test {
namespace {

using cuda::ScalingLaunch;

constexpr float kBehind = 7;  // what lies behind a row

template <class T>
struct Format;
template <>
struct Format<__nv_bfloat16> {
  static constexpr bool kIsBFloat16 = true;
  static constexpr int kBits = 8;
  static __nv_bfloat16 of(float x) { return __float2bfloat16_rn(x); }
  static double value(__nv_bfloat16 x) { return __bfloat162float(x); }
};
template <>
struct Format<__half> {
  static constexpr bool kIsBFloat16 = false;
  static constexpr int kBits = 11;
  static __half of(float x) { return __float2half_rn(x); }
  static double value(__half x) { return __half2float(x); }
};

// [count][side][stride] numbers, and the factors of rows.
template <class T>
struct Squares {
  int64_t count, side, stride;
  std::vector<T> at;
  std::vector<float> factors;

  Squares(int64_t count, int64_t side, unsigned seed)
      : count(count),
        side(side),
        stride((side + 7) / 8 * 8),
        at(count * side * stride),
        factors(count * stride, kBehind) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (int64_t row = 0; row < count * side; ++row) {
      for (int64_t j = 0; j < stride; ++j) {
        // The first row of each matrix is one of zeros.
        const float number = row % side == 0 ? 0 : normal(generator);
        at[row * stride + j] = Format<T>::of(j < side ? number : kBehind);
      }
    }
  }
  double value(int64_t row, int64_t j) const { return Format<T>::value(at[row * stride + j]); }
  double factor(int64_t matrix, int64_t row) const { return factors[matrix * stride + row]; }
};

template <class T>
class CudaScalings : public testing::Test {};
using Formats = testing::Types<__nv_bfloat16, __half>;
TYPED_TEST_SUITE(CudaScalings, Formats);

// Sides within the numbers of a thread, of a warp, and beyond.
template <class T>
std::vector<Squares<T>> batches() {
  std::vector<Squares<T>> found;
  unsigned seed = 0;
  for (const auto& [count, side] : {std::pair{3, 1}, {2, 8}, {5, 13}, {1, 256}, {2, 300}, {1, 9}}) {
    found.emplace_back(count, side, ++seed);
  }
  return found;
}

template <class T>
ScalingLaunch launch_of(std::vector<Squares<T>>& batches, bool has_rows) {
  ScalingLaunch launch{};
  launch.has_rows = has_rows;
  for (Squares<T>& each : batches) {
    const int64_t rows = each.count * each.side;
    launch.batches[launch.count++] = {
        each.at.data(), each.factors.data(), rows, static_cast<int>(each.side), static_cast<int>(each.stride),
        launch.blocks};
    launch.blocks += static_cast<uint32_t>((rows + cuda::kScalingRows - 1) / cuda::kScalingRows);
  }
  return launch;
}

TYPED_TEST(CudaScalings, AreThoseOfFloat64WithOneRounding) {
  using OfFormat = Format<TypeParam>;
  const double unit = std::ldexp(1, -24);
  for (const bool has_rows : {false, true}) {
    auto known = batches<TypeParam>();
    const auto before = known;
    const ScalingLaunch launch = launch_of(known, has_rows);
    launch_factors(launch, OfFormat::kIsBFloat16);
    launch_scaling(launch, OfFormat::kIsBFloat16);
    for (size_t b = 0; b < known.size(); ++b) {
      const auto &found = known[b], &from = before[b];
      for (int64_t row = 0; row < from.count * from.side; ++row) {
        const int64_t matrix = row / from.side;
        double sum = 0;
        for (int64_t j = 0; j < from.side; ++j) sum += std::abs(from.value(row, j));
        const double exact = 1 / std::sqrt(std::max(sum, double{kLeastRowSum}));
        const double own = found.factor(matrix, row % from.side);
        ASSERT_LE(std::abs(own - exact), static_cast<double>(from.side + 8) * unit * exact);
        for (int64_t j = 0; j < from.side; ++j) {
          const double expected = from.value(row, j) * (has_rows ? own : 1) * found.factor(matrix, j);
          const double bound = std::ldexp(1.01, -OfFormat::kBits) * std::abs(expected);
          ASSERT_LE(std::abs(found.value(row, j) - expected), bound + std::ldexp(1, -25));
        }
        for (int64_t j = from.side; j < from.stride; ++j) ASSERT_EQ(found.value(row, j), kBehind);
      }
    }
  }
}

TYPED_TEST(CudaScalings, ASumThatIsNotANumberStays) {
  using OfFormat = Format<TypeParam>;
  auto known = batches<TypeParam>();
  known[2].at[1 * known[2].stride + 3] = OfFormat::of(std::numeric_limits<float>::quiet_NaN());
  launch_factors(launch_of(known, true), OfFormat::kIsBFloat16);
  for (int64_t row = 0; row < known[2].side; ++row) {
    EXPECT_EQ(std::isnan(known[2].factor(0, row)), row == 1);
    EXPECT_FALSE(std::isnan(known[2].factor(1, row)));
  }
}

}  // namespace
}  // namespace fusedstep::test
