// Conversion to and from 16 bits: one element at a time against the definition of the formats, and the
// registers of every instruction set against each other. Codes of states, as steps round to them. Compiled
// with the definitions of a kernel source.
#include "cpu_kernels/codecs.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "fusedstep/isa.h"
#include "src/plan/code_maps.h"
#include "src/run/dispatch.h"
#include "tests/cpp/model.h"

namespace fusedstep::test {
namespace {

using cpu::FUSEDSTEP_ISA::ScalarBf16;
using cpu::FUSEDSTEP_ISA::ScalarF16;

constexpr uint32_t kPatterns = 1u << 16;

float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

struct Bf16Format {
  static constexpr int kMantissaBits = 7, kBias = 127;
  static constexpr uint16_t kInfinity = 0x7f80, kCanonicalNan = 0x7fc0;
  static float decode(uint16_t bits) { return ScalarBf16::decode({bits}); }
  static uint16_t encode(float x) { return ScalarBf16::encode(x).bits; }
};

struct F16Format {
  static constexpr int kMantissaBits = 10, kBias = 15;
  static constexpr uint16_t kInfinity = 0x7c00;
  static float decode(uint16_t bits) { return ScalarF16::decode({bits}); }
  static uint16_t encode(float x) { return ScalarF16::encode(x).bits; }
};

// Returns the value of a finite pattern, by IEEE 754, section 3.4.
template <class Format>
double meaning(uint16_t bits) {
  const int exponent = (bits & 0x7fff) >> Format::kMantissaBits;
  const int mantissa = bits & ((1 << Format::kMantissaBits) - 1);
  const int hidden = exponent == 0 ? 0 : 1 << Format::kMantissaBits;
  const double magnitude =
      std::ldexp(hidden + mantissa, std::max(exponent, 1) - Format::kBias - Format::kMantissaBits);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

template <class Format>
class CodecTest : public testing::Test {};
using Formats = testing::Types<Bf16Format, F16Format>;
TYPED_TEST_SUITE(CodecTest, Formats);

TYPED_TEST(CodecTest, DecodesEveryPattern) {
  for (uint32_t bits = 0; bits < kPatterns; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float decoded = TypeParam::decode(half);
    if ((half & 0x7fff) > TypeParam::kInfinity) {
      ASSERT_TRUE(std::isnan(decoded)) << half;
    } else if ((half & 0x7fff) == TypeParam::kInfinity) {
      ASSERT_TRUE(std::isinf(decoded)) << half;
    } else {
      ASSERT_EQ(decoded, meaning<TypeParam>(half)) << half;
    }
    ASSERT_EQ(std::signbit(decoded), (half & 0x8000) != 0) << half;
  }
}

TYPED_TEST(CodecTest, EncodesWhatItDecoded) {
  for (uint32_t bits = 0; bits < kPatterns; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    if ((half & 0x7fff) > TypeParam::kInfinity) continue;  // a NaN
    ASSERT_EQ(TypeParam::encode(TypeParam::decode(half)), half);
  }
}

// Halfway between two neighbours: to the even one. A float32 to either side of that: to the nearer one.
// Beyond the largest number the next one would be where infinity is.
TYPED_TEST(CodecTest, RoundsToNearestEven) {
  for (uint16_t low = 0; low < TypeParam::kInfinity; ++low) {
    const uint16_t high = low + 1;
    const auto halfway = static_cast<float>((meaning<TypeParam>(low) + meaning<TypeParam>(high)) / 2);
    const float below = std::nextafter(halfway, 0.0f), above = std::nextafter(halfway, INFINITY);
    ASSERT_EQ(TypeParam::encode(halfway), low % 2 == 0 ? low : high) << low;
    ASSERT_EQ(TypeParam::encode(below), low) << low;
    ASSERT_EQ(TypeParam::encode(above), high) << low;
    ASSERT_EQ(TypeParam::encode(-halfway), 0x8000 | (low % 2 == 0 ? low : high)) << low;
    ASSERT_EQ(TypeParam::encode(-below), 0x8000 | low) << low;
    ASSERT_EQ(TypeParam::encode(-above), 0x8000 | high) << low;
  }
  EXPECT_EQ(TypeParam::encode(INFINITY), TypeParam::kInfinity);
  EXPECT_EQ(TypeParam::encode(-INFINITY), 0x8000 | TypeParam::kInfinity);
}

TYPED_TEST(CodecTest, NumbersTooSmallBecomeZerosOfTheirSign) {
  for (const float x : {0.0f, float_of(1), 0x1p-149f * 3, float_of(0x00000123)}) {
    EXPECT_EQ(TypeParam::encode(x), 0);
    EXPECT_EQ(TypeParam::encode(-x), 0x8000);
  }
}

// Every exponent, mantissas of every kind: the bits around where they are cut, ones, and random ones.
template <class Check>
void for_floats_of_every_kind(Check check) {
  std::mt19937 random(1);
  for (uint32_t sign_and_exponent = 0; sign_and_exponent < 512; ++sign_and_exponent) {
    const uint32_t base = sign_and_exponent << 23;
    for (uint32_t shift = 0; shift <= 23; ++shift) {
      for (const uint32_t mantissa : {1u << shift, (1u << shift) - 1, (3u << shift), (1u << shift) + 1,
                                      ~((1u << shift) - 1), 0x555555u << shift}) {
        check(base | (mantissa & 0x7fffff));
      }
    }
    for (int i = 0; i < 2000; ++i) check(base | (random() & 0x7fffff));
  }
}

TEST(F16Test, EncodesAsTheCompiler) {
  for_floats_of_every_kind([](uint32_t bits) {
    const auto expected = std::bit_cast<uint16_t>(static_cast<_Float16>(float_of(bits)));
    ASSERT_EQ(F16Format::encode(float_of(bits)), expected) << std::hex << bits;
  });
}

TEST(F16Test, DecodesAsTheCompiler) {
  for (uint32_t bits = 0; bits < kPatterns; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const auto expected = static_cast<float>(std::bit_cast<_Float16>(half));
    ASSERT_EQ(bits_of(F16Format::decode(half)), bits_of(expected)) << std::hex << half;
  }
}

TEST(Bf16Test, EncodesAsIntegersRound) {
  for_floats_of_every_kind([](uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffff, cut = magnitude & 0xffff;
    uint32_t kept = magnitude >> 16;
    if (cut > 0x8000 || (cut == 0x8000 && kept % 2 == 1)) ++kept;
    const uint32_t expected = magnitude > 0x7f800000 ? Bf16Format::kCanonicalNan : (bits >> 31 << 15) | kept;
    ASSERT_EQ(Bf16Format::encode(float_of(bits)), expected) << std::hex << bits;
  });
}

TEST(CodecNanTest, StayNan) {
  for (const uint32_t nan : {0x7fc00000u, 0x7f800001u, 0xffc00000u, 0xffffffffu, 0x7fbfffffu, 0xff800100u}) {
    EXPECT_EQ(Bf16Format::encode(float_of(nan)), Bf16Format::kCanonicalNan);
    const uint16_t half = F16Format::encode(float_of(nan));
    EXPECT_EQ(half & 0x7e00, 0x7e00) << std::hex << nan;  // quiet
    EXPECT_EQ(half >> 15, nan >> 31) << std::hex << nan;
  }
}

// ---- The registers of every instruction set -------------------------------------------------------------

// Tensors of a rule with one state, which holds every 16-bit pattern where `pattern` says so.
class PatternTest : public testing::TestWithParam<DType> {
 protected:
  struct Run {
    std::vector<uint16_t> weight, state;
  };

  static uint16_t* data(Operand& operand) { return static_cast<uint16_t*>(operand.view().data); }

  // Adagrad with these 16-bit numbers; weights, gradients and states of 65536 patterns and a few, so that
  // there is a tail.
  using Pattern = std::function<uint16_t(uint32_t)>;
  Run run(const std::string& isa, const rules::AdagradHyper& hyper, const Pattern& weight,
          const Pattern& grad, const Pattern& state) {
    constexpr int64_t kCount = kPatterns + 3;
    const ForcedIsa forced(isa);
    const Case adagrad{{"adagrad", 1, false, bind_rule<rules::Adagrad>(hyper, 0), nullptr}, GetParam()};
    Model model(adagrad, dense_tensors(adagrad, {kCount}));
    Tensor& tensor = model.tensors()[0];
    for (uint32_t i = 0; i < kCount; ++i) {
      data(tensor.weight)[i] = weight(i);
      data(tensor.grad)[i] = grad(i);
      data(tensor.states[0])[i] = state(i);
    }
    model.step({});
    return {{data(tensor.weight), data(tensor.weight) + kCount},
            {data(tensor.states[0]), data(tensor.states[0]) + kCount}};
  }

  uint16_t round_trip(uint16_t half) const {
    return GetParam() == DType::kBFloat16 ? Bf16Format::encode(Bf16Format::decode(half))
                                          : F16Format::encode(F16Format::decode(half));
  }
};

uint16_t zero(uint32_t) { return 0; }
uint16_t every(uint32_t i) { return static_cast<uint16_t>(i); }
uint16_t shuffled(uint32_t i) { return static_cast<uint16_t>(i * 40503u + 12345u); }

// No gradient, no step: weights and states go through a register and back.
TEST_P(PatternTest, EveryPatternGoesThroughARegister) {
  const rules::AdagradHyper no_step{.lr = 0, .lr_decay = 0, .weight_decay = 0, .eps = 1};
  for (const std::string& isa : isas()) {
    const Run weights = run(isa, no_step, every, zero, zero), states = run(isa, no_step, zero, zero, every);
    for (uint32_t i = 0; i < weights.weight.size(); ++i) {
      ASSERT_EQ(weights.weight[i], round_trip(every(i))) << isa << ", pattern " << i;
      if (every(i) != 0x8000) {  // 0 * 0 is added to it
        ASSERT_EQ(states.state[i], round_trip(every(i))) << isa << ", pattern " << i;
      }
    }
  }
}

// Results of all magnitudes, rounded in registers and one by one. Which of several NaNs a sum keeps is open.
TEST_P(PatternTest, UpdatesOfEveryPatternAgree) {
  const rules::AdagradHyper hyper{.lr = 0.37, .lr_decay = 0, .weight_decay = 0, .eps = 1e-3};
  const Run expected = run("base", hyper, every, shuffled, zero);
  const auto is_nan = [&](uint16_t half) {
    return (half & 0x7fff) > (GetParam() == DType::kBFloat16 ? Bf16Format::kInfinity : F16Format::kInfinity);
  };
  const auto same = [&](uint16_t a, uint16_t b) { return a == b || (is_nan(a) && is_nan(b)); };
  for (const std::string& isa : isas()) {
    const Run actual = run(isa, hyper, every, shuffled, zero);
    for (uint32_t i = 0; i < expected.weight.size(); ++i) {
      ASSERT_TRUE(same(actual.weight[i], expected.weight[i])) << isa << ", weight " << i;
      ASSERT_TRUE(same(actual.state[i], expected.state[i])) << isa << ", state " << i;
    }
  }
}

// From every number of a binade, half of the distance to the next one is subtracted, or a little less or
// more: a gradient divided by its own magnitude is one.
TEST_P(PatternTest, RegistersRoundToNearestEven) {
  const bool bf16 = GetParam() == DType::kBFloat16;
  const int mantissa_bits = bf16 ? Bf16Format::kMantissaBits : F16Format::kMantissaBits;
  const auto one = static_cast<uint16_t>(bf16 ? 0x3f80 : 0x3c00);
  const auto number = [&](uint32_t i) {
    return static_cast<uint16_t>((i & 0x400) << 5 | (one + (i * 5 & ((1u << mantissa_bits) - 1))));
  };
  const float half = std::ldexp(1.0f, -mantissa_bits - 1);
  for (const float lr : {half, std::nextafter(half, 0.0f), std::nextafter(half, 1.0f)}) {
    const rules::AdagradHyper hyper{.lr = lr, .lr_decay = 0, .weight_decay = 0, .eps = 0};
    for (const std::string& isa : isas()) {
      const Run actual = run(
          isa, hyper, number, [&](uint32_t) { return one; }, zero);
      for (uint32_t i = 0; i < actual.weight.size(); ++i) {
        const float p = bf16 ? Bf16Format::decode(number(i)) : F16Format::decode(number(i));
        const uint16_t expected = bf16 ? Bf16Format::encode(p - lr) : F16Format::encode(p - lr);
        ASSERT_EQ(actual.weight[i], expected) << isa << ", weight " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, PatternTest, testing::Values(DType::kBFloat16, DType::kHalf),
                         [](const auto& info) { return name(info.param); });

// Codes of states (src/core/code_map.h), in steps that round by their number.

TEST(RoundingOfStepTest, IsSpreadOverAnyStepsInARow) {
  EXPECT_EQ(rounding_of_step(1), CodeMap::kToNearest);
  constexpr int kParts = 16, kInAPart = 64, kInARow = kInAPart * kParts;
  for (const int64_t first :
       {int64_t{1}, int64_t{12'345}, (int64_t{1} << 24) - 100, (int64_t{1} << 32) - 500}) {
    int found[kParts] = {};
    for (int64_t step = first; step < first + kInARow; ++step) {
      const float rounding = rounding_of_step(static_cast<double>(step));
      ASSERT_GE(rounding, 0x1p-12f);
      ASSERT_LE(rounding, 1 - 0x1p-12f);
      ++found[static_cast<int>(rounding * kParts)];
    }
    for (const int count : found) EXPECT_NEAR(count, kInAPart, 3) << first;
  }
}

// Calls run(storage, map) for each map of codes of eight bits by which steps round.
template <class Run>
void for_step_maps(Run run) {
  for (const Storage storage : {Storage::kInt8, Storage::kFloat8}) {
    for (const bool is_signed : {true, false}) {
      SCOPED_TRACE(testing::Message() << (storage == Storage::kInt8 ? "int8" : "fp8") << is_signed);
      by_storage(storage, [&](auto constant) { run(constant, step_map(storage, is_signed)); });
    }
  }
}
// The code of a positive number by a map.
template <Storage kStorage>
int32_t code_by(const CodeMap& map, float number, float absmax = 1) {
  return code_of<kStorage>(map, number, number * scale_of(fusedstep::bits_of(absmax), map.top).inverse);
}

constexpr int kSteps = 1000;

TEST(CodesOfStepsTest, ANumberThatIsACodesKeepsIt) {
  for_step_maps([]<Storage kStorage>(StorageIs<kStorage>, const CodeMap& map) {
    const int highest = kStorage == Storage::kFloat8 ? 126 : map.is_signed() ? 254 : 255;
    for (int step = 1; step <= kSteps; ++step) {
      const CodeMap by = rounding_by(map, rounding_of_step(step));
      for (const float absmax : {1.0f, 0.7f, 3e-9f, 1.9e8f}) {
        for (int code = map.zero + std::max(map.floor, 1); code <= highest; ++code) {
          const float number = value_of<kStorage>(map, code) * (absmax / map.top);
          ASSERT_EQ(code_by<kStorage>(by, number, absmax), code) << step << ", absmax " << absmax;
        }
      }
    }
  });
}

TEST(CodesOfStepsTest, ANumberBetweenTwoCodesGetsEachInItsShareOfTheSteps) {
  for_step_maps([]<Storage kStorage>(StorageIs<kStorage>, const CodeMap& map) {
    const int lowest = map.zero + std::max(map.floor, 1);
    const int highest = kStorage == Storage::kFloat8 ? 126 : map.is_signed() ? 254 : 255;
    for (const float part : {0.02f, 0.3f, 0.5f, 0.81f}) {
      std::vector<int> ups(highest);
      for (int step = 1; step <= kSteps; ++step) {
        const CodeMap by = rounding_by(map, rounding_of_step(step));
        for (int code = lowest; code < highest; ++code) {
          const float low = value_of<kStorage>(map, code), high = value_of<kStorage>(map, code + 1);
          const int32_t found = code_by<kStorage>(by, (low + part * (high - low)) / map.top);
          ASSERT_TRUE(found == code || found == code + 1) << found << " instead of " << code;
          ups[code] += found - code;
        }
      }
      for (int code = lowest; code < highest; ++code) ASSERT_NEAR(ups[code], part * kSteps, 4) << code;
    }
  });
}

TEST(CodesOfStepsTest, NoPositiveSecondMomentIsBelowTheFloor) {
  for_step_maps([]<Storage kStorage>(StorageIs<kStorage>, const CodeMap& map) {
    if (map.is_signed()) return;
    const int32_t floor = kStorage == Storage::kInt8 ? 15 : 8;
    for (int step = 1; step <= kSteps; ++step) {
      const CodeMap by = rounding_by(map, rounding_of_step(step));
      EXPECT_EQ(code_by<kStorage>(by, 0), 0);
      float number = 1;
      while (number > 0) {
        ASSERT_GE(code_by<kStorage>(by, number), floor);
        number *= 0.4f;
      }
    }
  });
}

// Numbers of both signs beside each border between two levels, beside each level and of each exponent, in
// blocks that begin with the absolute maximum.
std::vector<float> numbers_at_borders(const CodeMap& map, float absmax) {
  std::vector<float> shares;
  for (const float threshold : map.threshold) shares.push_back(threshold);
  for (int code = 0; code < (map.storage == Storage::kInt4 ? 16 : 256); ++code) {
    by_storage(map.storage, [&]<Storage kStorage>(StorageIs<kStorage>) {
      shares.push_back(std::abs(value_of<kStorage>(map, code)) / map.top);
    });
  }
  for (int exponent = -149; exponent <= 0; ++exponent) shares.push_back(std::ldexp(1.0f, exponent));
  std::vector<float> numbers;
  const auto add = [&](float number) {
    if (numbers.size() % map.block == 0) numbers.push_back(absmax);
    numbers.push_back(number);
  };
  for (const float share : shares) {
    if (!(share <= 1)) continue;
    const int32_t middle = fusedstep::bits_of(share * absmax);
    for (int32_t bits = std::max(middle - 8, 0); bits <= middle + 8; ++bits) {
      const float number = std::min(from_bits(bits), absmax);
      add(number);
      add(-number);
    }
  }
  numbers.resize(numbers.size() - numbers.size() % 64 + 37);  // groups of registers, registers and elements
  return numbers;
}

TEST(CodesOfStepsTest, RegistersOfEveryInstructionSetFindTheCodesOfElements) {
  for (const CodeMap& map : code_maps()) {
    for (const float rounding : {CodeMap::kToNearest, 0x1p-12f, 0.37f, 1 - 0x1p-12f}) {
      const CodeMap by = rounding_by(map, rounding);
      for (const float absmax : {1.0f, 0.7f, 3e-9f}) {
        const std::vector<float> numbers = numbers_at_borders(map, absmax);
        const auto count = static_cast<int64_t>(numbers.size());
        const float inverse = scale_of(fusedstep::bits_of(absmax), map.top).inverse;
        for (const std::string& isa : isas()) {
          const ForcedIsa forced(isa);
          std::vector<uint8_t> codes(map.bytes_of(count));
          std::vector<float> maxima(map.blocks_of(count)), values(count);
          const CodedState state{&map, maxima.data()};
          kernels().encode(state, rounding, numbers.data(), 0, count, codes.data());
          kernels().decode(state, codes.data(), 0, count, values.data());
          by_storage(map.storage, [&]<Storage kStorage>(StorageIs<kStorage>) {
            for (int64_t i = 0; i < count; ++i) {
              const int byte = codes[i / map.elements_per_byte()];
              const int code = kStorage != Storage::kInt4 ? byte : i % 2 == 0 ? byte >> 4 : byte & 15;
              ASSERT_EQ(code, code_of<kStorage>(by, numbers[i], numbers[i] * inverse))
                  << isa << ", " << numbers[i] << " of " << absmax << ", rounding " << rounding;
              const float value = value_of<kStorage>(map, code) * (absmax / map.top);
              ASSERT_EQ(bits_of(values[i]), bits_of(value)) << isa << ", code " << code;
            }
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace fusedstep::test
