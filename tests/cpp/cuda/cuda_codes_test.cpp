// States in codes, and weights that keep their value in other ways than in a copy, on CUDA, by the emulator:
// the CPU's bits for every rule, format, kind of codes, way and layout.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/plan/code_maps.h"
#include "src/run/backend.h"
#include "tests/cpp/layouts.h"
#include "tests/cpp/model.h"

namespace fusedstep::test {
namespace {

constexpr int kDevice = 0;
constexpr float kInfinity = std::numeric_limits<float>::infinity(),
                kNaN = std::numeric_limits<float>::quiet_NaN();

// A case of the list, and what its states are kept as.
struct CodedCase {
  Case of;
  Storage storage;
};

std::string name(Storage storage) {
  switch (storage) {
    case Storage::kPlain:
      return "plain";
    case Storage::kInt8:
      return "int8";
    case Storage::kInt4:
      return "int4";
    case Storage::kFloat8:
      return "fp8";
  }
  return "?";
}
std::string name(const CodedCase& coded) { return name(coded.of) + "_" + name(coded.storage); }
void PrintTo(const CodedCase& coded, std::ostream* out) { *out << name(coded); }

// The codes of a state, with bytes around them that belong to nothing.
class Codes {
 public:
  Codes(const CodeMap& map, const Sizes& sizes, int64_t displaced)
      : map_(map),
        elements_(elements_of(sizes)),
        displaced_(displaced),
        sizes_(map.storage == Storage::kInt4 ? Sizes{map.bytes_of(elements_)} : sizes),
        strides_(strides_in_order(sizes_)),
        bytes_(kMargin + displaced + map.bytes_of(elements_) + kMargin, kFill),
        absmax_(map.blocks_of(elements_) + 2, 0.0f) {
    std::fill_n(codes(), map.bytes_of(elements_), static_cast<uint8_t>(zero_byte(map)));
    absmax_.front() = absmax_.back() = kOfNobody;
  }

  TensorView view(int device) {
    const DType dtype = map_.storage == Storage::kFloat8 ? DType::kFloat8 : DType::kUInt8;
    return {codes(), dtype, sizes_, strides_, device, absmax_.data() + 1, map_.blocks_of(elements_)};
  }
  // Codes of every kind: those of a state that has had any steps. NaN is none of them.
  void fill(uint64_t seed) {
    for (int64_t i = 0; i < map_.bytes_of(elements_); ++i) {
      const auto code = static_cast<uint8_t>(std::abs(number(seed, i)) * 1000);
      codes()[i] = map_.storage == Storage::kFloat8 && (code & 127) == 127 ? 0 : code;
    }
    if (map_.storage == Storage::kInt4 && elements_ % 2 != 0) codes()[elements_ / 2] &= 0xf0;
    for (int64_t b = 0; b < map_.blocks_of(elements_); ++b) {
      absmax_[1 + b] = static_cast<float>(std::abs(number(seed + 1, b)));
    }
  }
  bool operator==(const Codes& other) const {
    const auto same = [](float a, float b) {
      return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b));
    };
    return bytes_ == other.bytes_ && std::ranges::equal(absmax_, other.absmax_, same);
  }
  bool surroundings_untouched() const {
    const auto is_fill = [](uint8_t byte) { return byte == kFill; };
    const auto codes_begin = bytes_.begin() + kMargin + displaced_, end = bytes_.end();
    return std::all_of(bytes_.begin(), codes_begin, is_fill) && std::all_of(end - kMargin, end, is_fill) &&
           absmax_.front() == kOfNobody && absmax_.back() == kOfNobody;
  }

 private:
  static constexpr int64_t kMargin = 64;
  static constexpr uint8_t kFill = 0xa5;
  static constexpr float kOfNobody = 17;

  uint8_t* codes() { return bytes_.data() + kMargin + displaced_; }

  const CodeMap& map_;
  int64_t elements_, displaced_;
  Sizes sizes_, strides_;
  std::vector<uint8_t> bytes_;
  std::vector<float> absmax_;
};

struct Shape {
  Sizes sizes;
  Forms forms;
  int64_t margin = 0;     // of plain operands, by which they are displaced
  int64_t displaced = 0;  // bytes of codes
  bool in_codes = true;
};

Shape flat(int64_t size, int64_t margin = 0, int64_t displaced = 0) {
  return {{size}, Forms::all(dense({size})), margin, displaced};
}

class CodedTensor {
 public:
  CodedTensor(const CodedCase& test_case, const Shape& shape, uint64_t seed)
      : weight_code_(test_case.of.weight_code),
        plain_(test_case.of, shape.sizes, shape.forms, seed, shape.margin) {
    const bool in_codes = test_case.storage != Storage::kPlain && shape.in_codes;
    if (!in_codes || elements_of(shape.sizes) < 2) return;
    for (int k = 0; k < test_case.of.rule.states; ++k) {
      const bool is_signed = (test_case.of.rule.bound.not_negative >> k & 1) == 0;
      codes_.emplace_back(code_map(test_case.storage, is_signed), shape.sizes, shape.displaced);
    }
  }

  TensorOperands operands(int device) {
    TensorOperands operands = plain_.operands();
    for (size_t k = 0; k < codes_.size(); ++k) operands.states[k] = codes_[k].view(device);
    operands.weight.device = operands.grad.device = device;
    for (TensorView& state : operands.states) state.device = device;
    return operands;
  }
  Tensor& plain() { return plain_; }
  void fill_codes(uint64_t seed) {
    for (size_t k = 0; k < codes_.size(); ++k) codes_[k].fill(seed + 10 * k);
    if (weight_code_ == WeightCode::kPlain || weight_code_ == WeightCode::kRandom) return;
    // Lower bits of every size, or errors about as large as a weight's last bit.
    const double unit = weight_code_ == WeightCode::kSplit ? 0x1p14 : 0x1p-9;
    Operand& beside = plain_.states.back();
    for (int64_t i = 0; i < beside.elements(); ++i) beside.set(i, unit * number(seed + 5, i));
  }

  void expect_same(const CodedTensor& other, bool with_grad) const {
    ASSERT_TRUE(plain_.fill_untouched());
    ASSERT_EQ(plain_.weight.first_difference(other.plain_.weight), -1);
    if (with_grad) {
      ASSERT_EQ(plain_.grad.first_difference(other.plain_.grad), -1);
    }
    for (size_t k = 0; k < plain_.states.size(); ++k) {
      ASSERT_EQ(plain_.states[k].first_difference(other.plain_.states[k]), -1) << "plain state " << k;
    }
    for (size_t k = 0; k < codes_.size(); ++k) {
      ASSERT_TRUE(codes_[k] == other.codes_[k]) << "state " << k;
      ASSERT_TRUE(codes_[k].surroundings_untouched()) << "state " << k;
    }
  }

 private:
  WeightCode weight_code_;
  Tensor plain_;  // its states, but for a master copy, are not used where there are codes
  std::vector<Codes> codes_;
};

class CudaCodesTest : public testing::TestWithParam<CodedCase> {
 protected:
  struct Model {
    std::vector<CodedTensor> tensors;
    Plan plan;
    std::unique_ptr<DevicePlan> device;  // none: the CPU

    void bind() {
      for (size_t i = 0; i < tensors.size(); ++i) {
        plan.bind(i, tensors[i].operands(device ? kDevice : kHost));
      }
    }
    void fill_grads(uint64_t seed) {
      for (size_t i = 0; i < tensors.size(); ++i) tensors[i].plain().grad.fill(1000 * seed + i);
    }
  };

  static Model model(const std::vector<Shape>& shapes, int device) {
    const CodedCase& test_case = GetParam();
    std::vector<CodedTensor> tensors;
    for (const Shape& shape : shapes) tensors.emplace_back(test_case, shape, /*seed=*/tensors.size());
    Plan plan = test_case.of.plan(tensors.size(), device);
    return {std::move(tensors), std::move(plan), device == kHost ? nullptr : new_device_plan(device)};
  }
  static void step(Model& model, double count, const StepOptions& options, const DeviceInputs& inputs = {}) {
    model.bind();
    const BoundRule& rule = GetParam().of.rule.bound;
    std::vector<double> counts(model.tensors.size(), count);
    if (count > 2) counts.front() += 1;  // weights that have missed steps
    std::vector<double> numbers = with_first_numbers(rule, counts);
    if (model.device) {
      model.device->prepare(model.plan, rule, numbers, options, inputs)->run({});
    } else {
      prepare_step(model.plan, rule, numbers, options)->run({});
    }
  }
  static void expect_same(const Model& actual, const Model& expected, bool with_grad = true) {
    for (size_t i = 0; i < actual.tensors.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "tensor " << i);
      actual.tensors[i].expect_same(expected.tensors[i], with_grad);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
  // Steps on both, with every use of gradients that the case is for. The third is from codes of every kind.
  static void expect_same_steps(const std::vector<Shape>& shapes, uint64_t first = 1) {
    for (const GradUse grads : grad_uses(GetParam().of)) {
      SCOPED_TRACE(testing::Message() << "gradients " << static_cast<int>(grads));
      Model actual = model(shapes, kDevice), expected = model(shapes, kHost);
      for (uint64_t count = first; count < 4; ++count) {
        SCOPED_TRACE(testing::Message() << "step " << count);
        const StepOptions options{.threads = 2, .grad_factor = 0.75, .maximize = count == 2, .grads = grads};
        for (Model* each : {&actual, &expected}) {
          each->fill_grads(count);
          for (size_t i = 0; count == 3 && i < shapes.size(); ++i) each->tensors[i].fill_codes(i);
          step(*each, static_cast<double>(count), options);
        }
        expect_same(actual, expected, grads != GradUse::kScratch);
        if (HasFatalFailure()) return;
      }
    }
  }
};

// Around halves of bytes, words, blocks, parts and chunks; where no word begins; without codes.
std::vector<Shape> flat_shapes() {
  std::vector<Shape> shapes;
  for (const int64_t size : {0, 2, 3, 127, 128, 129, 257, 1001, 2049, 4097, 9000})
    shapes.push_back(flat(size));
  shapes.push_back(flat(3001, /*margin=*/1));
  shapes.push_back(flat(3002, /*margin=*/2, /*displaced=*/2));
  shapes.push_back(flat(3003, /*margin=*/0, /*displaced=*/1));
  shapes.push_back(flat(5000));
  shapes.back().in_codes = false;
  return shapes;
}

TEST_P(CudaCodesTest, SameBitsAsOnTheCpu) { expect_same_steps(flat_shapes()); }

TEST_P(CudaCodesTest, ABadNumberDamagesItsBlockOnly) {
  Model actual = model({flat(5000)}, kDevice), expected = model({flat(5000)}, kHost);
  for (uint64_t count = 1; count < 4; ++count) {
    for (Model* each : {&actual, &expected}) {
      each->fill_grads(count);
      each->tensors[0].plain().grad.set(700, count == 1 ? kNaN : kInfinity);
      for (int64_t i = 2048; i < 4096; ++i) each->tensors[0].plain().grad.set(i, i < 3072 ? 0.0 : 1e-30);
      step(*each, static_cast<double>(count), {});
    }
    expect_same(actual, expected);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaCodesTest, AStepCanBeLeftOut) {
  const std::vector<Shape> shapes = {flat(4500), flat(300, /*margin=*/1)};
  for (const GradUse grads : {GradUse::kScale, GradUse::kScratch, GradUse::kClear}) {
    Model actual = model(shapes, kDevice), expected = model(shapes, kDevice);
    for (Model* each : {&actual, &expected}) {
      each->fill_grads(1);
      for (CodedTensor& tensor : each->tensors) tensor.fill_codes(1);
    }
    const BoundRule& rule = GetParam().of.rule.bound;
    std::vector<float> numbers(shapes.size(), 5);
    for (const auto& number : rule.numbers) numbers.insert(numbers.end(), shapes.size(), number.first);
    std::vector<float*> places;
    for (float& each : numbers) places.push_back(&each);
    const float found_inf = 1;
    actual.bind();
    actual.device
        ->prepare_counted(actual.plan, rule, places, {.grad_factor = 0.5, .grads = grads},
                          {.found_inf = &found_inf})
        ->run({});
    EXPECT_EQ(numbers[0], 5);
    for (size_t t = 0; grads == GradUse::kClear && t < shapes.size(); ++t) {
      Operand& grad = expected.tensors[t].plain().grad;
      for (int64_t i = 0; i < grad.elements(); ++i) grad.set(i, 0);
    }
    expect_same(actual, expected);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaCodesTest, CountsOnTheDevice) {
  const std::vector<Shape> shapes = {flat(4500), flat(300)};
  Model actual = model(shapes, kDevice), expected = model(shapes, kHost);
  const BoundRule& rule = GetParam().of.rule.bound;
  std::vector<float> numbers = {3, 2};
  for (const auto& number : rule.numbers) numbers.insert(numbers.end(), shapes.size(), number.first);
  std::vector<float*> places;
  for (float& each : numbers) places.push_back(&each);
  for (Model* each : {&actual, &expected}) each->fill_grads(1);
  actual.bind();
  actual.device->prepare_counted(actual.plan, rule, places, {}, {})->run({});
  step(expected, 3, {});
  EXPECT_EQ(numbers[0], 4);
  EXPECT_EQ(numbers[1], 3);
  expect_same(actual, expected);
}

class CudaCodesNormsTest : public CudaCodesTest {};

// If a norm is that of shards, sums of other processes are added between the phases.
TEST_P(CudaCodesNormsTest, PhasesApartAreThoseOfTheCpu) {
  for (const GradUse grads : grad_uses(GetParam().of)) {
    SCOPED_TRACE(testing::Message() << "gradients " << static_cast<int>(grads));
    Model actual = model(flat_shapes(), kDevice), expected = model(flat_shapes(), kHost);
    for (Model* each : {&actual, &expected}) {
      each->fill_grads(1);
      each->bind();
    }
    const BoundRule& rule = GetParam().of.rule.bound;
    const StepOptions options{.threads = 2, .grad_factor = 0.75, .grads = grads};
    std::vector<double> numbers(actual.tensors.size(), 2), norms2(2 * numbers.size()), on_cpu(norms2.size());
    const auto there = actual.device->prepare(actual.plan, rule, numbers, options, {});
    const auto here = prepare_step(expected.plan, rule, numbers, options);
    there->run_direction(norms2.data());
    here->run_direction(on_cpu.data());
    EXPECT_EQ(norms2, on_cpu);
    for (double& norm2 : norms2) norm2 *= 1.5;
    there->run_apply(norms2.data());
    here->run_apply(norms2.data());
    expect_same(actual, expected, grads != GradUse::kScratch);
    if (HasFatalFailure()) return;
  }
}

class CudaCodesLayoutTest : public CudaCodesTest {};

// Any order of dimensions, any slice, expanded gradients: codes keep the order of rows and columns. One step
// shows where elements are looked for, and it is the third.
TEST_P(CudaCodesLayoutTest, SameBitsAsOnTheCpu) {
  std::vector<Shape> shapes;
  for (unsigned seed = 0; seed < 40; ++seed) {
    RandomLayouts random(seed);
    const Sizes sizes = random.sizes();
    shapes.push_back({sizes, random.forms(sizes), /*margin=*/16});
  }
  for (const LayoutCase& layout : layout_cases()) shapes.push_back({layout.sizes, layout.forms});
  expect_same_steps(shapes, /*first=*/3);
}

TEST_P(CudaCodesLayoutTest, TheNormOfGradients) {
  std::vector<Shape> shapes = flat_shapes();
  for (unsigned seed = 0; seed < 40; ++seed) {
    RandomLayouts random(seed);
    const Sizes sizes = random.sizes();
    shapes.push_back({sizes, random.forms(sizes), /*margin=*/16});
  }
  Model actual = model(shapes, kDevice), expected = model(shapes, kHost);
  for (Model* each : {&actual, &expected}) {
    each->fill_grads(1);
    each->bind();
  }
  double sum = 0;
  actual.device->add_grad_norm2(actual.plan, &sum);
  EXPECT_EQ(sum, grad_norm2(expected.plan, /*threads=*/2));
}

// All that may keep float32 states. The storages take turns with a rule's flags and formats; a rule without
// flags, of float32 weights, has all of them.
std::vector<CodedCase> states_in_codes() {
  std::vector<CodedCase> found;
  size_t turn = 0;
  for (const Case& each : all_cases()) {
    if (each.state_dtype != DType::kFloat || each.rule.states == 0) continue;
    constexpr Storage kStorages[] = {Storage::kInt8, Storage::kInt4, Storage::kFloat8};
    ++turn;
    for (size_t k = 0; k < std::size(kStorages); ++k) {
      if ((each.rule.flags == 0 && each.dtype == DType::kFloat) || k == turn % std::size(kStorages)) {
        found.push_back({each, kStorages[k]});
      }
    }
  }
  return found;
}

// All ways to keep the value of a weight that may have a master copy, beside float32 states and beside codes.
// Storages take turns, and ways with a rule's flags.
std::vector<CodedCase> weights_in_codes() {
  std::vector<CodedCase> found;
  size_t turn = 0;
  for (const Case& each : all_cases()) {
    if (!each.has_master) continue;
    std::vector<WeightCode> ways = {WeightCode::kKahanHalf};
    if (each.dtype == DType::kBFloat16)
      ways = {WeightCode::kSplit, WeightCode::kKahanBf16, WeightCode::kRandom};
    for (size_t way = 0; way < ways.size(); ++way) {
      if (each.rule.flags % ways.size() != way && each.rule.flags != 0) continue;
      CodedCase kept{each, Storage::kPlain};
      kept.of.weight_code = ways[way];
      kept.of.has_master = ways[way] != WeightCode::kRandom;
      found.push_back(kept);
      if (each.rule.states == 0) continue;
      constexpr Storage kStorages[] = {Storage::kInt8, Storage::kInt4, Storage::kFloat8};
      found.push_back({kept.of, kStorages[++turn % std::size(kStorages)]});
    }
  }
  return found;
}

std::vector<CodedCase> coded_cases() {
  std::vector<CodedCase> found = states_in_codes();
  for (CodedCase& each : weights_in_codes()) found.push_back(std::move(each));
  return found;
}

// One rule of each family and format, each kind of codes and way.
std::vector<CodedCase> coded_families() {
  std::vector<CodedCase> found;
  for (const CodedCase& each : coded_cases()) {
    const auto alike = [&](const CodedCase& other) {
      return other.of.rule.two_phase == each.of.rule.two_phase && other.of.dtype == each.of.dtype &&
             other.of.has_master == each.of.has_master && other.of.weight_code == each.of.weight_code &&
             (other.storage == Storage::kPlain) == (each.storage == Storage::kPlain) &&
             (other.storage == each.storage || each.of.dtype != DType::kFloat);
    };
    if (std::ranges::none_of(found, alike)) found.push_back(each);
  }
  return found;
}

// The cases of rules with norms.
std::vector<CodedCase> coded_norms() {
  std::vector<CodedCase> found = coded_cases();
  std::erase_if(found, [](const CodedCase& each) { return !each.of.rule.two_phase; });
  return found;
}

INSTANTIATE_TEST_SUITE_P(Rules, CudaCodesTest, testing::ValuesIn(coded_cases()),
                         [](const auto& info) { return name(info.param); });
INSTANTIATE_TEST_SUITE_P(Norms, CudaCodesNormsTest, testing::ValuesIn(coded_norms()),
                         [](const auto& info) { return name(info.param); });
INSTANTIATE_TEST_SUITE_P(Families, CudaCodesLayoutTest, testing::ValuesIn(coded_families()),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace fusedstep::test
