// The ways to keep the value of a bfloat16 weight, for one element (src/core/weight_code.h).
#include "src/core/weight_code.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>

namespace fusedstep {
namespace {

float value_of(uint16_t weight) { return std::bit_cast<float>(uint32_t{weight} << 16); }

// A prime, so that all upper words meet many lower ones.
constexpr uint64_t kStride = 251, kAll = uint64_t{1} << 32;

TEST(Split, GivesEveryNumberBack) {
  for (uint64_t word = 0; word < kAll; word += kStride) {
    const auto bits = static_cast<uint32_t>(word);
    uint16_t weight = 0;
    int16_t low = 0;
    split(bits, weight, low);
    const uint32_t back = joined(weight, low);
    if (is_nan_bits(bits)) {
      ASSERT_TRUE(std::isnan(value_of(weight)) && is_nan_bits(back)) << std::hex << bits;
    } else {
      ASSERT_EQ(back, bits) << std::hex << bits;
      ASSERT_FALSE(std::isnan(value_of(weight))) << std::hex << bits;
      if ((bits & 0xffff) != 0x8000) ASSERT_EQ(weight, nearest_bf16(bits)) << std::hex << bits;
    }
  }
}

TEST(Split, TakesAWeightThatWasChangedAsItIs) {
  for (int32_t low = -0x8000; low < 0x8000; low += 97) {
    for (uint32_t weight = 0; weight <= 0xffff; weight += 1) {
      const auto kept = static_cast<uint16_t>(weight);
      const float value = value_of(kept),
                  found = std::bit_cast<float>(joined(kept, static_cast<int16_t>(low)));
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(found));
      } else if (value == 0) {
        ASSERT_LT(std::abs(found), 1e-40f);
      } else if (std::isinf(value)) {  // or what is nearest to it
        ASSERT_GT(found / std::copysign(1.0f, value), 3.39e38f);
      } else {
        ASSERT_EQ(std::signbit(found), std::signbit(value));
        ASSERT_LE(std::abs(int64_t{std::bit_cast<int32_t>(found)} - std::bit_cast<int32_t>(value)), 0x8000);
      }
    }
  }
}

TEST(Random, RoundsUpAsOftenAsTheDistanceFromBelowSays) {
  for (const uint32_t bits : {0x3f800000u, 0x3f801234u, 0xbf80ffffu, 0x00000001u, 0x80008000u, 0x7f7effffu}) {
    uint32_t ups = 0;
    for (uint32_t random = 0; random < 0x10000; ++random) {
      const uint16_t weight = rounded_by(bits, random);
      ASSERT_TRUE(weight == bits >> 16 || weight == (bits >> 16) + 1);
      ups += weight != bits >> 16;
    }
    EXPECT_EQ(ups, bits & 0xffff) << std::hex << bits;
  }
}

TEST(Random, LeavesWhatIsNotFinite) {
  for (uint32_t random = 0; random < 0x10000; random += 13) {
    for (const uint32_t bits : {0x7f800000u, 0xff800000u, 0x7f7f0000u, 0xff7f0000u, 0x00000000u}) {
      ASSERT_EQ(rounded_by(bits, random), bits >> 16) << std::hex << bits;
    }
    ASSERT_EQ(rounded_by(0x7f7f7fffu, random), 0x7f7f);  // nearest is the largest number
    ASSERT_EQ(rounded_by(0x7f7f8000u, random), 0x7f80);
    for (const uint32_t bits : {0x7fffffffu, 0x7f800001u, 0xffffffffu}) {
      ASSERT_TRUE(std::isnan(value_of(rounded_by(bits, random))));
    }
  }
}

TEST(Random, NumbersAreAsManyOfEach) {
  constexpr uint32_t kDraws = 1 << 24;
  uint32_t counts[64] = {};
  const uint64_t range = key_of_range(key_of_draws(1, 2, 3), 0);
  for (uint32_t index = 0; index < kDraws; ++index) ++counts[draw(range, index) >> 10];
  double chi2 = 0;
  for (const uint32_t count : counts) chi2 += std::pow(count - kDraws / 64.0, 2) / (kDraws / 64.0);
  EXPECT_LT(chi2, 63 + 5 * std::sqrt(2 * 63.0));
}

TEST(Random, KeysDependOnAllOfThem) {
  const uint64_t key = key_of_draws(1, 2, 3);
  EXPECT_NE(key, key_of_draws(2, 2, 3));
  EXPECT_NE(key, key_of_draws(1, 3, 3));
  EXPECT_NE(key, key_of_draws(1, 2, 4));
  EXPECT_NE(key, key_of_draws(3, 2, 1));
  EXPECT_NE(key_of_range(key, 0), key_of_range(key, uint64_t{1} << 32));
  EXPECT_EQ(key_of_range(key, 5), key_of_range(key, 6));
}

}  // namespace
}  // namespace fusedstep
