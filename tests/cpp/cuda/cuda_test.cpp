// The CUDA backend beside the CPU's: the same bits for every rule, format and layout. On the host, by the
// emulator; tests/test_cuda.py has the GPU's.
#include <gtest/gtest.h>

#include <algorithm>

#include "src/run/backend.h"
#include "tests/cpp/layouts.h"
#include "tests/cpp/model.h"

namespace fusedstep::test {
namespace {

// Around words, segments, parts and chunks, and more of these than are summed in one group.
const Sizes kSizes = {0, 1, 3, 16, 127, 129, 1000, 4097, 33000};

void step_cpu(Model& model, const std::vector<double>& counts, const StepOptions& options) {
  for (size_t i = 0; i < model.tensors().size(); ++i) model.plan().bind(i, model.tensors()[i].operands());
  run_step(model.plan(), model.rule().bound, counts, options);
}

// The numbers of tensors where a device keeps them. Those beside the step counts have their first values.
struct NumbersThere {
  NumbersThere(const BoundRule& rule, std::vector<float> counts)
      : tensors(counts.size()), values(std::move(counts)) {
    for (const auto& number : rule.numbers) values.insert(values.end(), tensors, number.first);
    for (float& value : values) places.push_back(&value);
  }
  std::vector<float> counts() const {
    return {values.begin(), values.begin() + static_cast<int64_t>(tensors)};
  }

  size_t tensors;
  std::vector<float> values;
  std::vector<float*> places;
};

// A rule of each family, in each format.
std::vector<Case> cases_of_families() {
  std::vector<Case> found;
  for (const Case& each : all_cases()) {
    const auto alike = [&](const Case& other) {
      return other.rule.two_phase == each.rule.two_phase && other.dtype == each.dtype &&
             other.state_dtype == each.state_dtype && other.has_master == each.has_master;
    };
    if (std::ranges::none_of(found, alike)) found.push_back(each);
  }
  return found;
}

bool is_of_families(const Case& each) {
  static const std::vector<Case> found = cases_of_families();
  return std::ranges::any_of(found, [&](const Case& other) { return name(other) == name(each); });
}

class CudaTest : public testing::TestWithParam<Case> {
 protected:
  void step_cuda(Model& model, const std::vector<double>& counts, const StepOptions& options,
                 const DeviceInputs& inputs = {}) {
    bind(model);
    std::vector<double> numbers = with_first_numbers(model.rule().bound, counts);
    device_->prepare(model.plan(), model.rule().bound, numbers, options, inputs)->run({});
  }
  void bind(Model& model) {
    for (size_t i = 0; i < model.tensors().size(); ++i) model.plan().bind(i, model.tensors()[i].operands());
  }
  DevicePlan& device() { return *device_; }
  void forget_device() { device_ = new_device_plan(0); }

  // Compares all operands, except gradients that a step may leave anything in.
  static void expect_same(Model& actual, Model& expected, GradUse grads = GradUse::kLeave) {
    for (size_t t = 0; t < expected.tensors().size(); ++t) {
      const Tensor &ours = actual.tensors()[t], &theirs = expected.tensors()[t];
      SCOPED_TRACE(testing::Message() << "tensor " << t);
      ASSERT_TRUE(ours.fill_untouched());
      ASSERT_EQ(ours.weight.first_difference(theirs.weight), -1);
      if (grads != GradUse::kScratch) ASSERT_EQ(ours.grad.first_difference(theirs.grad), -1);
      for (size_t k = 0; k < ours.states.size(); ++k) {
        ASSERT_EQ(ours.states[k].first_difference(theirs.states[k]), -1) << "state " << k;
      }
    }
  }

  // Dense tensors, of which some begin where no word does, and one of each layout.
  std::vector<Tensor> all_tensors() const {
    std::vector<Tensor> tensors = all_dense();
    for (const Tensor& tensor : tensors_beyond_squares(GetParam())) tensors.push_back(tensor);
    for (const LayoutCase& layout : layout_cases()) {
      tensors.emplace_back(GetParam(), layout.sizes, layout.forms, /*seed=*/tensors.size());
    }
    return tensors;
  }
  // A layout that is gone over in tiles.
  std::vector<Tensor> dense_and_few() const {
    std::vector<Tensor> tensors = all_dense();
    for (const Tensor& tensor : few_tensors()) tensors.push_back(tensor);
    return tensors;
  }
  // For what does not depend on the layout: one of each way to go over tensors.
  std::vector<Tensor> few_tensors() const {
    std::vector<Tensor> tensors = dense_tensors(GetParam(), {0, 17000});
    tensors.push_back(displaced(1));
    tensors.emplace_back(GetParam(), Sizes{30, 50}, Forms::all(slice({30, 99}, {0, 1}, {1, 2})), /*seed=*/3);
    return tensors;
  }

 private:
  std::vector<Tensor> all_dense() const {
    std::vector<Tensor> tensors = dense_tensors(GetParam(), kSizes);
    for (const int64_t margin : {1, 2, 4}) tensors.push_back(displaced(margin));
    return tensors;
  }
  Tensor displaced(int64_t margin) const {
    return Tensor(GetParam(), {5000}, Forms::all(dense({5000})), static_cast<uint64_t>(margin), margin);
  }

  std::unique_ptr<DevicePlan> device_ = new_device_plan(0);
};

// Every layout with every use of gradients for a rule of each family, with one use for the others.
TEST_P(CudaTest, SameBitsAsOnTheCpu) {
  const std::vector<GradUse> uses = grad_uses(GetParam());
  const bool in_all_layouts = is_of_families(GetParam());
  const size_t turn = static_cast<size_t>(GetParam().dtype) % uses.size();
  for (size_t use = 0; use < uses.size(); ++use) {
    const GradUse grads = uses[use];
    SCOPED_TRACE(testing::Message() << "gradients " << static_cast<int>(grads));
    forget_device();
    const std::vector<Tensor> tensors = in_all_layouts || use == turn ? all_tensors() : dense_and_few();
    Model actual(GetParam(), tensors), expected(GetParam(), tensors);
    for (uint64_t step = 1; step < 3; ++step) {
      const std::vector<double> counts(actual.tensors().size(), static_cast<double>(step));
      const StepOptions options{.threads = 2, .grad_factor = 0.75, .maximize = step == 2, .grads = grads};
      for (Model* model : {&actual, &expected}) model->fill_grads(step);
      step_cuda(actual, counts, options);
      step_cpu(expected, counts, options);
      expect_same(actual, expected, grads);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CudaTest, StepCountsOfTheirOwn) {
  const std::vector<Tensor> start = dense_tensors(GetParam(), {50, 5000, 50});
  Model actual(GetParam(), start), expected(GetParam(), start);
  std::vector<double> counts = {3, 1, 3};
  for (Model* model : {&actual, &expected}) model->fill_grads(1);
  step_cuda(actual, counts, {});
  step_cpu(expected, counts, {});
  expect_same(actual, expected);
}

TEST_P(CudaTest, CountsOnTheDeviceAreRaisedThere) {
  const std::vector<Tensor> start = dense_tensors(GetParam(), {50, 5000, 50});
  Model actual(GetParam(), start), expected(GetParam(), start);
  std::vector<float> counts = {2, 0, 2};
  for (const double raised : {0.0, 1.0}) {
    for (Model* model : {&actual, &expected}) model->fill_grads(static_cast<uint64_t>(raised));
    bind(actual);
    NumbersThere numbers(actual.rule().bound, counts);
    device().prepare_counted(actual.plan(), actual.rule().bound, numbers.places, {}, {})->run({});
    counts = numbers.counts();
    step_cpu(expected, {3 + raised, 1 + raised, 3 + raised}, {});
    expect_same(actual, expected);
  }
  EXPECT_EQ(counts, (std::vector<float>{4, 2, 4}));
}

TEST_P(CudaTest, CountsOnTheDeviceOfMoreTensorsThanAWarpHasThreads) {
  const std::vector<Tensor> tensors = dense_tensors(GetParam(), Sizes(70, 30));
  Model actual(GetParam(), tensors), expected(GetParam(), tensors);
  for (Model* model : {&actual, &expected}) model->fill_grads(1);
  std::vector<float> counts;
  std::vector<double> raised;
  for (size_t i = 0; i < tensors.size(); ++i) {
    counts.push_back(static_cast<float>(i % 5));
    raised.push_back(counts.back() + 1);
  }
  bind(actual);
  NumbersThere numbers(actual.rule().bound, counts);
  device().prepare_counted(actual.plan(), actual.rule().bound, numbers.places, {}, {})->run({});
  step_cpu(expected, raised, {});
  expect_same(actual, expected);
  EXPECT_EQ(numbers.counts(), std::vector<float>(raised.begin(), raised.end()));
}

// Nothing changes, but for gradients that are to be zero.
TEST_P(CudaTest, AStepCanBeLeftOut) {
  for (const GradUse grads : {GradUse::kScale, GradUse::kScratch, GradUse::kClear}) {
    Model actual(GetParam(), few_tensors()), expected(GetParam(), few_tensors());
    for (Model* model : {&actual, &expected}) model->fill_grads(1);
    NumbersThere numbers(actual.rule().bound, std::vector<float>(actual.tensors().size(), 5));
    const std::vector<float> before = numbers.values;
    const float found_inf = 1;
    bind(actual);
    device()
        .prepare_counted(actual.plan(), actual.rule().bound, numbers.places,
                         {.grad_factor = 0.5, .grads = grads}, {.found_inf = &found_inf})
        ->run({});
    for (size_t t = 0; grads == GradUse::kClear && t < expected.tensors().size(); ++t) {
      if (!actual.plan().grad_is_writable(t)) continue;
      expected.tensors()[t].grad.clear();
    }
    expect_same(actual, expected);
    EXPECT_EQ(numbers.values, before);
    forget_device();
  }
}

TEST_P(CudaTest, AFactorOnTheDeviceIsOneOfTheHosts) {
  Model actual(GetParam(), few_tensors()), expected(GetParam(), few_tensors());
  for (Model* model : {&actual, &expected}) model->fill_grads(1);
  const std::vector<double> counts(actual.tensors().size(), 1);
  const double factor = 0.3;
  step_cuda(actual, counts, {.grad_factor = 0.5, .grads = GradUse::kScale}, {.grad_factor = &factor});
  step_cpu(expected, counts, {.grad_factor = 0.5 * 0.3, .grads = GradUse::kScale});
  expect_same(actual, expected);
}

TEST_P(CudaTest, NormOfGradients) {
  Sizes sizes(70, 300);  // more chunks than a group has
  sizes.push_back(40000);
  std::vector<Tensor> tensors = few_tensors();
  for (Tensor& tensor : dense_tensors(GetParam(), sizes)) tensors.push_back(tensor);
  Model model(GetParam(), tensors);
  model.fill_grads(3);
  bind(model);
  double norm2 = 0.25;
  device().add_grad_norm2(model.plan(), &norm2);
  EXPECT_EQ(norm2, 0.25 + grad_norm2(model.plan(), 2));
}

// A graph of chunks that is cut anew, a gradient that is no longer aligned, weights elsewhere.
TEST_P(CudaTest, FollowsWhatMoves) {
  const std::vector<Tensor> start = dense_tensors(GetParam(), {500, 20000});
  Model actual(GetParam(), start), expected(GetParam(), start);
  const auto compare = [&](uint64_t step) {
    for (Model* model : {&actual, &expected}) model->fill_grads(step);
    const std::vector<double> counts(2, static_cast<double>(step));
    step_cuda(actual, counts, {.grads = GradUse::kScratch});
    step_cpu(expected, counts, {.grads = GradUse::kScratch});
    expect_same(actual, expected, GradUse::kScratch);
  };
  compare(1);
  for (Model* model : {&actual, &expected}) {
    model->tensors()[0].grad = Operand(GetParam().dtype, {500}, dense({500}), /*margin=*/1);
  }
  compare(2);
  for (Model* model : {&actual, &expected}) {
    for (Tensor& tensor : model->tensors()) tensor.weight = Operand(tensor.weight);
  }
  compare(3);
  for (Model* model : {&actual, &expected}) {
    model->tensors()[1] = Tensor(GetParam(), {300, 90}, Forms::all(dense({300, 90}, {1, 0})), /*seed=*/9);
  }
  compare(4);
}

class CudaTwoPhaseTest : public CudaTest {};

// They go through both phases by themselves; with a larger one among them all go as that does.
// If a norm is that of shards, sums of other processes are added in between.
TEST_P(CudaTwoPhaseTest, PhasesApartAreThoseOfTheCpu) {
  for (const GradUse grads : grad_uses(GetParam())) {
    SCOPED_TRACE(testing::Message() << "gradients " << static_cast<int>(grads));
    forget_device();
    Model actual(GetParam(), few_tensors()), expected(GetParam(), few_tensors());
    for (Model* model : {&actual, &expected}) {
      model->fill_grads(1);
      bind(*model);
    }
    const BoundRule& rule = actual.rule().bound;
    const StepOptions options{.threads = 2, .grad_factor = 0.75, .grads = grads};
    std::vector<double> numbers(actual.tensors().size(), 2), norms2(2 * numbers.size()),
        on_cpu(norms2.size());
    const auto there = device().prepare(actual.plan(), rule, numbers, options, {});
    const auto here = prepare_step(expected.plan(), rule, numbers, options);
    there->run_direction(norms2.data());
    here->run_direction(on_cpu.data());
    EXPECT_EQ(norms2, on_cpu);
    for (double& norm2 : norms2) norm2 *= 1.5;
    there->run_apply(norms2.data());
    here->run_apply(norms2.data());
    expect_same(actual, expected, grads);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaTwoPhaseTest, TensorsOfOneChunk) {
  for (const GradUse grads : {GradUse::kLeave, GradUse::kScale, GradUse::kScratch, GradUse::kClear}) {
    SCOPED_TRACE(testing::Message() << "gradients " << static_cast<int>(grads));
    forget_device();
    const std::vector<Tensor> tensors = dense_tensors(GetParam(), {0, 1, 3, 16, 127, 129, 1000, 4096});
    Model actual(GetParam(), tensors), expected(GetParam(), tensors);
    for (const double count : {1.0, 2.0}) {
      const std::vector<double> counts(tensors.size(), count);
      const StepOptions options{.grad_factor = 0.75, .grads = grads};
      for (Model* model : {&actual, &expected}) model->fill_grads(static_cast<uint64_t>(count));
      step_cuda(actual, counts, options);
      step_cpu(expected, counts, options);
      expect_same(actual, expected, grads);
      if (HasFatalFailure()) return;
    }
    NumbersThere numbers(actual.rule().bound, std::vector<float>(tensors.size(), 2));
    const float found_inf = 1;
    device()
        .prepare_counted(actual.plan(), actual.rule().bound, numbers.places, {.grads = grads},
                         {.found_inf = &found_inf})
        ->run({});
    expect_same(actual, expected, grads);
  }
}

class CudaLayoutTest : public CudaTest {};

// Any order of dimensions, any slice, expanded gradients.
TEST_P(CudaLayoutTest, SameBitsAsOnTheCpu) {
  for (const GradUse grads : {GradUse::kScale, GradUse::kClear}) {
    SCOPED_TRACE(testing::Message() << "gradients " << static_cast<int>(grads));
    std::vector<Tensor> tensors;
    for (unsigned seed = 0; seed < 60; ++seed) {
      RandomLayouts random(seed);
      const Sizes sizes = random.sizes();
      tensors.emplace_back(GetParam(), sizes, random.forms(sizes), seed, /*margin=*/16);
    }
    forget_device();
    Model actual(GetParam(), tensors), expected(GetParam(), tensors);
    for (Model* model : {&actual, &expected}) model->fill_grads(1);
    const std::vector<double> counts(tensors.size(), 1);
    step_cuda(actual, counts, {.grad_factor = 0.75, .grads = grads});
    step_cpu(expected, counts, {.grad_factor = 0.75, .grads = grads});
    expect_same(actual, expected);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, CudaLayoutTest, testing::ValuesIn(cases_of_families()),
                         [](const auto& info) { return name(info.param); });
INSTANTIATE_TEST_SUITE_P(Rules, CudaTwoPhaseTest, testing::ValuesIn(two_phase_cases()),
                         [](const auto& info) { return name(info.param); });
INSTANTIATE_TEST_SUITE_P(Rules, CudaTest, testing::ValuesIn(all_cases()),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace fusedstep::test
