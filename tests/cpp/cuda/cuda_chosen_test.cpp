// The passes over chosen rows and columns on CUDA, by the emulator, against their formulas element by
// element.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "src/run/backend.h"
#include "tests/cpp/cuda/numbers.h"

namespace fusedstep::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                kInfinity = std::numeric_limits<float>::infinity();

// Ways that a number lies in memory.
struct AsFloat {
  using Stored = float;
  static float put(float x) { return x; }
  static float get(float x) { return x; }
};
struct AsBFloat16 {
  using Stored = uint16_t;
  static uint16_t put(float x) {
    if (std::isnan(x)) return 0x7fff;
    const auto bits = std::bit_cast<uint32_t>(x);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  static float get(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
};

template <PassFormat kFormat_, class Stored_, class Product_>
struct Case {
  static constexpr PassFormat kFormat = kFormat_;
  using Stored = Stored_;
  using Product = Product_;
};
using Cases = testing::Types<Case<PassFormat::kFloat, AsFloat, AsFloat>,
                             Case<PassFormat::kFloatBFloat16, AsFloat, AsBFloat16>,
                             Case<PassFormat::kBFloat16, AsBFloat16, AsBFloat16>>;

// NaN is equal to NaN: its bits are of no interest.
template <class As>
void expect_same(const Numbers<As>& found, const Numbers<As>& expected, size_t tensor) {
  for (size_t k = 0; k < found.all.size(); ++k) {
    const float a = As::get(found.all[k]), b = As::get(expected.all[k]);
    if (std::isnan(a) && std::isnan(b)) continue;
    ASSERT_EQ(found.all[k], expected.all[k]) << tensor << ", " << k;
    ASSERT_EQ(std::signbit(a), std::signbit(b)) << tensor << ", " << k;
  }
}

struct Form {
  int32_t matrices, rows, columns, chosen;
  Channels channels;
};
constexpr Channels kOfRows = Channels::kRows, kOfColumns = Channels::kColumns;

// Sides of 1, of no words, of several segments, and of more channels than a block has threads; one channel,
// and all of them.
const std::vector<Form> kForms{
    {1, 1, 1, 1, kOfRows},     {3, 8, 12, 3, kOfRows},       {2, 12, 8, 3, kOfColumns},
    {1, 5, 4099, 2, kOfRows},  {1, 300, 7, 4, kOfColumns},   {2, 9, 130, 9, kOfRows},
    {1, 40, 132, 10, kOfRows}, {1, 132, 40, 40, kOfColumns}, {2, 260, 136, 34, kOfColumns},
    {1, 1, 40, 1, kOfRows},    {1, 40, 1, 1, kOfColumns},    {1, 700, 8, 1, kOfRows}};

template <class Case>
struct Subject {
  std::vector<ChosenTensor> tensors;
  std::vector<Numbers<typename Case::Stored>> stored, grads;
  std::vector<Numbers<typename Case::Product>> products;
  std::vector<double> partials;
  std::vector<float> norms;
  std::vector<int32_t> positions, places;

  explicit Subject(const std::vector<Form>& forms, size_t count) {
    std::mt19937_64 random(11);
    uint32_t channels = 0, chosen = 0, sums = 0;
    for (size_t i = 0; i < count; ++i) {
      const Form& form = forms[i % forms.size()];
      const int64_t elements = int64_t{form.matrices} * form.rows * form.columns;
      const int64_t other = form.channels == kOfRows ? form.columns : form.rows;
      stored.emplace_back(elements, i % 5 == 1, random);
      grads.emplace_back(elements, i % 5 == 2, random);
      products.emplace_back(form.matrices * form.chosen * other, i % 5 == 3, random);
      tensors.push_back({nullptr, nullptr, nullptr, -0.01 * static_cast<double>(i + 1), form.matrices,
                         form.rows, form.columns, form.chosen, channels, chosen, sums, form.channels});
      channels += form.matrices * static_cast<uint32_t>(channels_of(tensors[i]));
      chosen += form.matrices * form.chosen;
      sums += static_cast<uint32_t>(partials_of(tensors[i]));
    }
    partials.assign(sums + 1, -7);
    norms.assign(channels + 1, -7);
    positions.assign(channels + 1, -7);
    places.assign(chosen + 1, -7);
  }

  // The element of a channel of a matrix.
  int64_t at(size_t i, int64_t matrix, int64_t channel, int64_t k) const {
    const ChosenTensor& of = tensors[i];
    const int64_t row = has_rows(of) ? channel : k, column = has_rows(of) ? k : channel;
    return (matrix * of.rows + row) * of.columns + column;
  }
  int64_t at_chosen(size_t i, int64_t matrix, int64_t position, int64_t k) const {
    const ChosenTensor& of = tensors[i];
    return has_rows(of) ? (matrix * of.chosen + position) * of.columns + k
                        : (matrix * of.rows + k) * of.chosen + position;
  }
  int64_t length(size_t i) const { return has_rows(tensors[i]) ? tensors[i].columns : tensors[i].rows; }
  ChoiceMemory memory() { return {partials.data(), norms.data(), positions.data(), places.data()}; }
  std::vector<ChosenTensor> bound() {
    std::vector<ChosenTensor> all = tensors;
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].stored = stored[i].data();
      all[i].grad = grads[i].data();
      all[i].product = products[i].data();
    }
    return all;
  }

  // Calls run(tensor, matrix) for all matrices.
  template <class Run>
  void for_matrices(Run run) const {
    for (size_t i = 0; i < tensors.size(); ++i) {
      for (int64_t matrix = 0; matrix < tensors[i].matrices; ++matrix) run(i, matrix);
    }
  }

  void choose(const ChoiceOptions& options) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const int64_t count = tensors[i].matrices * int64_t{tensors[i].rows} * tensors[i].columns;
      for (int64_t k = 0; k < count; ++k) {
        const float grad = grads[i].get(k);
        stored[i].put(k, options.maximizes ? stored[i].get(k) - grad : stored[i].get(k) + grad);
      }
    }
    for_matrices(
        [&](size_t i, int64_t matrix) { choose_of(i, matrix, static_cast<float>(options.momentum)); });
  }
  void choose_of(size_t i, int64_t matrix, float momentum) {
    const ChosenTensor& of = tensors[i];
    const int64_t channels = channels_of(of);
    float* const norm = norms.data() + of.first_channel + matrix * channels;
    for (int64_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (int64_t k = 0; k < length(i); ++k) sum += std::abs(double{stored[i].get(at(i, matrix, c, k))});
      norm[c] = static_cast<float>(sum);
    }
    std::vector<int32_t> order(channels);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int32_t a, int32_t b) {
      return std::isnan(norm[a]) ? !std::isnan(norm[b]) : norm[a] > norm[b];
    });
    std::sort(order.begin(), order.begin() + of.chosen);
    std::fill_n(positions.begin() + of.first_channel + matrix * channels, channels, -1);
    for (int32_t position = 0; position < of.chosen; ++position) {
      places[of.first_chosen + matrix * of.chosen + position] = order[position];
      positions[of.first_channel + matrix * channels + order[position]] = position;
      for (int64_t k = 0; k < length(i); ++k) {
        const int64_t from = at(i, matrix, order[position], k);
        const float update = stored[i].get(from);
        products[i].put(at_chosen(i, matrix, position, k), update);
        stored[i].put(from, update * momentum);
      }
    }
  }

  void move(double keep) {
    for_matrices([&](size_t i, int64_t matrix) {
      const int64_t channels = channels_of(tensors[i]);
      for (int64_t c = 0; c < channels; ++c) {
        const int32_t position = positions[tensors[i].first_channel + matrix * channels + c];
        for (int64_t k = 0; k < length(i); ++k) {
          const float direction = position < 0 ? 0 : products[i].get(at_chosen(i, matrix, position, k));
          const int64_t to = at(i, matrix, c, k);
          stored[i].put(to, stored[i].get(to) * static_cast<float>(keep));
          stored[i].put(to, std::fma(static_cast<float>(tensors[i].factor), direction, stored[i].get(to)));
        }
      }
    });
  }
};

template <class Case>
void expect_choices_to_agree(Subject<Case> found, const ChoiceOptions& options) {
  auto expected = found;
  expected.choose(options);
  device_passes().choose(0, Case::kFormat, found.bound(), found.memory(), options);
  EXPECT_EQ(found.partials.back(), -7);
  EXPECT_EQ(found.places, expected.places);
  EXPECT_EQ(found.positions, expected.positions);
  for (size_t c = 0; c < expected.norms.size(); ++c) {
    if (std::isnan(expected.norms[c])) {
      ASSERT_TRUE(std::isnan(found.norms[c])) << c;
    } else if (found.norms[c] != expected.norms[c]) {  // infinities are the same
      ASSERT_NEAR(found.norms[c], expected.norms[c], 1e-6 * expected.norms[c]) << c;
    }
  }
  for (size_t i = 0; i < found.tensors.size(); ++i) {
    expect_same(found.stored[i], expected.stored[i], i);
    expect_same(found.grads[i], expected.grads[i], i);
    expect_same(found.products[i], expected.products[i], i);
  }
}

template <class Case>
class CudaChosenTest : public testing::Test {};
TYPED_TEST_SUITE(CudaChosenTest, Cases);

TYPED_TEST(CudaChosenTest, TheLargestAreTakenAndDecayed) {
  // More than one launch has room for, and another order for each use of a form.
  const Subject<TypeParam> subject(kForms, 67);
  expect_choices_to_agree(subject, {0.95, false});
  expect_choices_to_agree(subject, {0.5, true});
}

// Of equal norms the first are chosen; of what is not a number too, which is larger than infinity.
TYPED_TEST(CudaChosenTest, OfEqualNormsTheFirstAreChosen) {
  std::vector<Form> forms;
  for (const int32_t chosen : {1, 2, 3, 17, 300, 301}) {
    forms.push_back({1, 301, 4, chosen, kOfRows});
    forms.push_back({2, 4, 301, chosen, kOfColumns});
  }
  for (const bool has_specials : {false, true}) {
    Subject<TypeParam> subject(forms, forms.size());
    subject.for_matrices([&](size_t i, int64_t matrix) {
      for (int64_t c = 0; c < channels_of(subject.tensors[i]); ++c) {
        for (int64_t k = 0; k < subject.length(i); ++k) {
          const int64_t at = subject.at(i, matrix, c, k);
          subject.stored[i].put(at, 0);
          subject.grads[i].put(at, static_cast<float>((c + matrix) % 3));
        }
        const int64_t first = subject.at(i, matrix, c, 0);
        if (has_specials && c % 50 == 7) subject.grads[i].put(first, kInfinity);
        if (has_specials && c % 100 == 31) subject.grads[i].put(first, c == 131 ? -kNan : kNan);
      }
    });
    expect_choices_to_agree(subject, {0.9, false});
  }
}

TYPED_TEST(CudaChosenTest, SidesMayBeLongerThanSharedMemory) {
  const std::vector<Form> forms{{1, 20'000, 3, 5'000, kOfRows}, {1, 130, 20'000, 19'999, kOfColumns}};
  expect_choices_to_agree(Subject<TypeParam>(forms, forms.size()), {0.95, false});
}

TYPED_TEST(CudaChosenTest, WeightsDecayAndTheChosenMove) {
  for (const double keep : {0.99, 1.0}) {
    Subject<TypeParam> found(kForms, 67);
    // Zeros of both signs keep theirs where nothing moves them.
    for (auto& weights : found.stored) {
      for (int64_t k = 0; k < static_cast<int64_t>(weights.all.size()); k += 3) {
        weights.all[k] = TypeParam::Stored::put(k % 2 == 0 ? 0.0F : -0.0F);
      }
    }
    found.for_matrices([&](size_t i, int64_t matrix) { found.choose_of(i, matrix, 1); });
    auto expected = found;
    expected.move(keep);
    device_passes().move_chosen(0, TypeParam::kFormat, found.bound(), found.memory(), keep);
    for (size_t i = 0; i < found.tensors.size(); ++i) {
      expect_same(found.stored[i], expected.stored[i], i);
      expect_same(found.products[i], expected.products[i], i);
    }
  }
}

TYPED_TEST(CudaChosenTest, AnInfiniteFactorMakesNanOfWhatItDoesNotMove) {
  Subject<TypeParam> subject({{1, 9, 16, 2, kOfRows}}, 1);
  subject.choose_of(0, 0, 1);
  subject.tensors[0].factor = -std::numeric_limits<double>::infinity();
  device_passes().move_chosen(0, TypeParam::kFormat, subject.bound(), subject.memory(), 1.0);
  for (int64_t k = 0; k < 9 * 16; ++k) {
    const bool is_chosen = subject.positions[k / 16] >= 0;
    EXPECT_EQ(std::isnan(subject.stored[0].get(k)), !is_chosen) << k;
  }
}

}  // namespace
}  // namespace fusedstep::test
