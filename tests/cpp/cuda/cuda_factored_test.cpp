// Steps of weights with factored second moments on CUDA, by the emulator: the CPU's bits.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "src/run/backend.h"

namespace fusedstep::emulator {
extern int launches;
}

namespace fusedstep::test {
namespace {

enum class Layout { kRows, kColumns, kSliced };  // how matrices lie in memory

// A number of a type of memory, by its bytes.
void put(std::byte* to, int size, bool is_half, double value) {
  if (size == 8) {
    std::memcpy(to, &value, 8);
    return;
  }
  const auto narrow = static_cast<float>(value);
  uint32_t bits = 0;
  std::memcpy(&bits, &narrow, 4);
  if (size == 4) {
    std::memcpy(to, &bits, 4);
    return;
  }
  // The bits of a half: the sign, an exponent near one and the first bits of the significand.
  const auto of_half = static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x3400 | (bits >> 13 & 0x3ff));
  const auto of_bfloat16 = static_cast<uint16_t>(bits >> 16);
  std::memcpy(to, is_half ? &of_half : &of_bfloat16, 2);
}

// Memory of a tensor's matrices, with a margin around it.
struct Memory {
  Memory(int64_t count, int64_t rows, int64_t columns, Layout layout, int size)
      : wide(layout == Layout::kSliced ? columns + 3 : columns),
        bytes((count * rows * wide + 2 * kMargin) * size),
        row(layout == Layout::kColumns ? 1 : wide),
        column(layout == Layout::kColumns ? rows : 1) {
    outer = {rows * wide};
  }
  Matrices matrices(int size) { return {bytes.data() + kMargin * size, outer, row, column}; }

  static constexpr int64_t kMargin = 5;
  int64_t wide;
  std::vector<std::byte> bytes;
  int64_t row, column;
  std::vector<int64_t> outer;
};

// A tensor and what it owns. Copies own their own.
class Subject {
 public:
  Subject(FactoredFormat format, int64_t count, int64_t rows, int64_t columns, Layout layout, bool has_moment,
          uint64_t seed)
      : format_(format),
        count_(count),
        rows_(rows),
        columns_(columns),
        has_moment_(has_moment),
        weight_(count, rows, columns, layout, size_of_weight(format)),
        grad_(count, rows, columns, Layout::kRows, size_of_grad(format)),
        moment_(count, rows, columns, layout, size_of_maths(format)),
        row_moments_(count * rows * size_of_maths(format)),
        column_moments_(count * columns * size_of_maths(format)) {
    std::mt19937_64 random(seed);
    const bool is_half = format == FactoredFormat::kHalf || format == FactoredFormat::kHalfMaster;
    fill(weight_.bytes, size_of_weight(format), is_half, random);
    fill(grad_.bytes, size_of_grad(format), is_half, random);
    fill(moment_.bytes, size_of_maths(format), false, random);
    for (auto* moments : {&row_moments_, &column_moments_}) {
      fill(*moments, size_of_maths(format), false, random, /*least=*/0.1);
    }
  }

  FactoredTensor tensor() {
    FactoredTensor tensor{};
    tensor.weight = weight_.matrices(size_of_weight(format_));
    tensor.grad = grad_.matrices(size_of_grad(format_));
    if (has_moment_) tensor.moment = moment_.matrices(size_of_maths(format_));
    tensor.outer = {&count_, 1};
    tensor.count = count_;
    tensor.rows = rows_;
    tensor.columns = columns_;
    tensor.format = format_;
    tensor.row_moments = rows_ == 1 ? nullptr : row_moments_.data();
    tensor.column_moments = column_moments_.data();
    return tensor;
  }
  // The bytes of all, margins included.
  bool operator==(const Subject& other) const {
    return weight_.bytes == other.weight_.bytes && grad_.bytes == other.grad_.bytes &&
           moment_.bytes == other.moment_.bytes && row_moments_ == other.row_moments_ &&
           column_moments_ == other.column_moments_;
  }

 private:
  static void fill(std::vector<std::byte>& bytes, int size, bool is_half, std::mt19937_64& random,
                   double least = -1) {
    std::uniform_real_distribution<double> numbers(least, 1);
    for (size_t i = 0; i < bytes.size(); i += size) put(&bytes[i], size, is_half, numbers(random));
  }

  FactoredFormat format_;
  int64_t count_, rows_, columns_;
  bool has_moment_;
  Memory weight_, grad_, moment_;
  std::vector<std::byte> row_moments_, column_moments_;
};

// Sums that processes exchange of a tensor. The whole has more rows, columns and elements by these factors.
struct Share {
  static constexpr int kRows = 4, kColumns = 2, kElements = 8;

  explicit Share(const FactoredTensor& tensor)
      : row_sums(tensor.count * tensor.rows),
        column_sums(tensor.count * tensor.columns),
        mean_sums(tensor.count),
        numbers{row_sums.data(),
                column_sums.data(),
                mean_sums.data(),
                norms2.data(),
                kRows * tensor.rows,
                kColumns * tensor.columns,
                kElements * tensor.count * tensor.rows * tensor.columns} {}

  std::vector<double> row_sums, column_sums, mean_sums, norms2 = std::vector<double>(2, 0.0);
  FactoredShare numbers;
};

class CudaFactoredTest : public testing::TestWithParam<FactoredFormat> {
 protected:
  static void step(std::vector<Subject>& subjects, const FactoredOptions& options, bool on_device,
                   FactoredPart part = FactoredPart::kWhole,
                   const std::vector<std::unique_ptr<Share>>* shares = nullptr) {
    std::vector<FactoredTensor> tensors;
    for (Subject& subject : subjects) {
      tensors.push_back(subject.tensor());
      if (shares) tensors.back().share = (*shares)[tensors.size() - 1]->numbers;
    }
    if (!on_device) return factored_step(tensors, options, part, 2);
    step_there(tensors, {{options}, {}}, part);
  }

  static void step_there(const std::vector<FactoredTensor>& tensors, const OptionsOfTensors& options,
                         FactoredPart part = FactoredPart::kWhole, const DeviceInputs& inputs = {}) {
    const auto step = new_factored_step(0, tensors, options, part, inputs);
    std::vector<std::byte> scratch(step->scratch_bytes() + kAlignment, std::byte{0xa5});
    const auto address = reinterpret_cast<uintptr_t>(scratch.data());
    step->use(scratch.data() + (kAlignment - address % kAlignment));
    step->run({});
  }

  // As if the other processes had the same numbers as this one: sums grow as much as what they are divided
  // by.
  static void step_in_parts(std::vector<Subject>& subjects, const FactoredOptions& options, bool on_device) {
    std::vector<std::unique_ptr<Share>> shares;
    for (Subject& subject : subjects) shares.push_back(std::make_unique<Share>(subject.tensor()));
    const auto add_up = [&](std::vector<double> Share::*sums, int processes) {
      for (const auto& share : shares) {
        for (double& sum : (*share).*sums) sum *= processes;
      }
    };
    step(subjects, options, on_device, FactoredPart::kSums, &shares);
    add_up(&Share::row_sums, Share::kColumns);
    step(subjects, options, on_device, FactoredPart::kRows, &shares);
    add_up(&Share::column_sums, Share::kRows);
    add_up(&Share::mean_sums, Share::kRows);
    step(subjects, options, on_device, FactoredPart::kNorms, &shares);
    add_up(&Share::norms2, Share::kElements);
    step(subjects, options, on_device, FactoredPart::kApply, &shares);
  }

  static constexpr size_t kAlignment = 256;
};

// In transformers' variant and in torch's: factors that are limited are in the latter only.
constexpr FactoredOptions kOptions[] = {
    {.rate = 0.3,
     .added = 1e-3,
     .least_mean = 0,
     .most = 1e30,
     .step = 0.01,
     .scaled = 1,
     .least_scale = 1e-3,
     .threshold = 0.7,
     .decay = 0.1,
     .decays_by_length = 1,
     .beta = 0.9,
     .grad_factor = 1},
    {.rate = 0.5,
     .added = 0,
     .least_mean = 0.9,
     .most = 1.5,
     .step = 0.02,
     .scaled = 0,
     .least_scale = 0,
     .threshold = 2,
     .decay = 0.001,
     .decays_by_length = 0,
     .beta = 0,
     .grad_factor = -1},
};

TEST_P(CudaFactoredTest, SameBitsAsOnTheCpu) {
  const FactoredFormat format = GetParam();
  for (const bool has_moment : {true, false}) {
    std::vector<Subject> actual;
    const auto add = [&](int64_t count, int64_t rows, int64_t columns, Layout layout = Layout::kRows) {
      actual.emplace_back(format, count, rows, columns, layout, has_moment, actual.size());
    };
    add(1, 1, 1);  // vectors: one row without moments of rows
    add(1, 1, 700);
    add(1, 7, 5);
    add(1, 33, 31, Layout::kColumns);
    add(1, 64, 256);
    add(1, 66, 258, Layout::kSliced);
    add(3, 70, 40, Layout::kColumns);
    add(5, 3, 2);
    add(1, 1100, 3);  // more tiles below one another than are summed in one group
    add(1, 2, 4400);  // and side by side
    std::vector<Subject> expected = actual;
    for (const FactoredOptions& options : kOptions) {
      const int before = emulator::launches;
      step(actual, options, true);
      EXPECT_EQ(emulator::launches - before, 6);  // whatever the number of tensors
      step(expected, options, false);
      for (size_t t = 0; t < actual.size(); ++t) EXPECT_EQ(actual[t], expected[t]) << "tensor " << t;
    }
  }
}

TEST_P(CudaFactoredTest, TensorsHaveOptionsOfTheirOwn) {
  std::vector<Subject> actual;
  for (const int64_t rows : {1, 66, 30}) {
    actual.emplace_back(GetParam(), 1, rows, 258, Layout::kRows, true, actual.size());
  }
  std::vector<Subject> expected = actual;
  std::vector<FactoredTensor> there;
  for (Subject& subject : actual) there.push_back(subject.tensor());
  step_there(there, {{kOptions[0], kOptions[1]}, {1, 0, 1}});
  for (size_t t = 0; t < expected.size(); ++t) {
    std::vector<Subject> one{expected[t]};
    step(one, kOptions[t == 1 ? 0 : 1], false);
    EXPECT_EQ(actual[t], one[0]) << "tensor " << t;
  }
}

TEST_P(CudaFactoredTest, AFactorOnTheDeviceMultipliesGradients) {
  std::vector<Subject> actual{{GetParam(), 1, 66, 258, Layout::kRows, true, 1}}, expected = actual;
  const double more = 0.25;
  FactoredOptions options = kOptions[0];
  step_there({actual[0].tensor()}, {{options}, {}}, FactoredPart::kWhole, {.grad_factor = &more});
  options.grad_factor *= more;
  step(expected, options, false);
  EXPECT_EQ(actual, expected);
}

TEST_P(CudaFactoredTest, AStepThatIsSkippedChangesNothing) {
  std::vector<Subject> actual{{GetParam(), 1, 66, 258, Layout::kRows, true, 1}}, expected = actual;
  const float found_inf = 1;
  step_there({actual[0].tensor()}, {{kOptions[0]}, {}}, FactoredPart::kWhole, {.found_inf = &found_inf});
  EXPECT_EQ(actual, expected);
}

TEST_P(CudaFactoredTest, AVectorAlone) {
  std::vector<Subject> actual{{GetParam(), 1, 1, 300, Layout::kRows, false, 1}}, expected = actual;
  step(actual, kOptions[0], true);
  step(expected, kOptions[0], false);
  EXPECT_EQ(actual[0], expected[0]);
}

TEST_P(CudaFactoredTest, PartsAreTheWholeStep) {
  const FactoredFormat format = GetParam();
  std::vector<Subject> expected;
  const auto add = [&](int64_t count, int64_t rows, int64_t columns) {
    expected.emplace_back(format, count, rows, columns, Layout::kRows, true, expected.size());
  };
  add(1, 1, 700);
  add(1, 66, 258);
  add(3, 70, 40);
  add(1, 1100, 3);
  add(1, 2, 4400);
  std::vector<Subject> here = expected, there = expected;
  for (const FactoredOptions& options : kOptions) {
    step(expected, options, false);
    step_in_parts(here, options, false);
    const int before = emulator::launches;
    step_in_parts(there, options, true);
    EXPECT_EQ(emulator::launches - before, 11);
    for (size_t t = 0; t < expected.size(); ++t) {
      EXPECT_EQ(here[t], expected[t]) << "tensor " << t;
      EXPECT_EQ(there[t], expected[t]) << "tensor " << t;
    }
  }
}

std::string name_of_format(const testing::TestParamInfo<FactoredFormat>& info) {
  constexpr const char* kNames[] = {
#define FUSEDSTEP_NAME(name, weight, grad) #name,
      FUSEDSTEP_FACTORED_FORMATS(FUSEDSTEP_NAME)
#undef FUSEDSTEP_NAME
  };
  return kNames[static_cast<int>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(Formats, CudaFactoredTest,
                         testing::Values(FactoredFormat::kFloat, FactoredFormat::kDouble,
                                         FactoredFormat::kBFloat16, FactoredFormat::kHalf,
                                         FactoredFormat::kBFloat16Master, FactoredFormat::kHalfMaster),
                         name_of_format);

// Formats together have launches of their own, one after another.
TEST(CudaFactoredFormats, TogetherAreThoseAlone) {
  std::vector<Subject> actual;
  for (const FactoredFormat format :
       {FactoredFormat::kHalf, FactoredFormat::kFloat, FactoredFormat::kDouble, FactoredFormat::kFloat}) {
    actual.emplace_back(format, 1, 65, 30, Layout::kRows, true, actual.size());
  }
  std::vector<Subject> expected = actual;
  std::vector<FactoredTensor> there, here;
  for (Subject& subject : actual) there.push_back(subject.tensor());
  for (Subject& subject : expected) here.push_back(subject.tensor());
  const auto step = new_factored_step(0, there, {{kOptions[0]}, {}}, FactoredPart::kWhole);
  const auto scratch = std::make_unique<std::byte[]>(step->scratch_bytes());
  step->use(scratch.get());
  step->run({});
  factored_step(here, kOptions[0], FactoredPart::kWhole, 1);
  EXPECT_EQ(actual, expected);
}

}  // namespace
}  // namespace fusedstep::test
