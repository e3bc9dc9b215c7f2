// The same bits on every instruction set, for every number of threads and from run to run.
#include <gtest/gtest.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "fusedstep/isa.h"
#include "src/core/reduction.h"
#include "src/run/session.h"
#include "tests/cpp/model.h"

namespace fusedstep::test {
namespace {

constexpr int kSteps = 2;

// Around registers, lanes, blocks of the walk and chunks; together enough for a team of threads.
Sizes sizes_around_everything() {
  Sizes sizes(34);
  std::iota(sizes.begin(), sizes.end(), 0);
  const int64_t chunk = kChunkElements;
  for (const int64_t size : {63, 64, 65, 1023, 1024, 1025}) sizes.push_back(size);
  for (const int64_t size : {chunk - 1, chunk, chunk + 1, 2 * chunk + 5, int64_t{100003}})
    sizes.push_back(size);
  return sizes;
}

// Numbers at the edges of a dtype, for every combination of weight and gradient.
const double kExtremes[] = {0.0,
                            -0.0,
                            1.0,
                            -1.0,
                            0x1p-1074,
                            0x1.8p-149,
                            -0x1p-140,
                            0x1p-126,
                            0x1p-24,
                            -0x1.8p-25,
                            6e4,
                            -65504,
                            1e19,
                            -3e38,
                            1e300,
                            std::numeric_limits<double>::infinity(),
                            -std::numeric_limits<double>::infinity(),
                            std::numeric_limits<double>::quiet_NaN()};

Tensor extremes(const Case& test_case) {
  constexpr int64_t kCount = std::size(kExtremes);
  Tensor tensor(test_case, {kCount * kCount}, Forms::all(dense({kCount * kCount})), /*seed=*/0);
  for (int64_t i = 0; i < kCount * kCount; ++i) {
    tensor.weight.set(i, kExtremes[i / kCount]);
    tensor.grad.set(i, kExtremes[i % kCount]);
  }
  return tensor;
}

// Result of a run.
struct Outcome {
  std::vector<std::vector<Operand>> operands;  // of each tensor
  std::vector<double> ratios;

  explicit Outcome(Model& model) {
    for (size_t t = 0; t < model.tensors().size(); ++t) {
      Tensor& tensor = model.tensors()[t];
      operands.push_back({std::move(tensor.weight), std::move(tensor.grad)});
      for (Operand& state : tensor.states) operands.back().push_back(std::move(state));
      ratios.push_back(model.ratio(t));
    }
  }
};

void expect_same(const Outcome& outcome, const Outcome& expected) {
  for (size_t t = 0; t < expected.operands.size(); ++t) {
    for (size_t k = 0; k < expected.operands[t].size(); ++k) {
      if (outcome.operands[t][k].bytes() == expected.operands[t][k].bytes()) continue;
      EXPECT_EQ(outcome.operands[t][k].first_difference(expected.operands[t][k]), -1)
          << "operand " << k << " of tensor " << t;
    }
    EXPECT_TRUE(outcome.ratios[t] == expected.ratios[t] ||
                (std::isnan(outcome.ratios[t]) && std::isnan(expected.ratios[t])))
        << "ratio of tensor " << t << ": " << outcome.ratios[t] << " and " << expected.ratios[t];
  }
}

class DeterminismTest : public testing::TestWithParam<Case> {
 protected:
  // Runs a few steps from the same start as every other run. The last tensor keeps its gradient. From the
  // second on threads may `steal`, as if there was more work than the caches hold, and prefetch as far
  // `ahead`.
  Outcome run(const std::vector<Tensor>& start, const std::vector<std::vector<Operand>>& grads,
              const std::string& isa, const StepOptions& options, bool steal = false,
              PrefetchDistance ahead = {}) {
    const ForcedIsa forced(isa);
    Model model(GetParam(), start);
    for (const std::vector<Operand>& of_step : grads) {
      for (size_t t = 0; t < of_step.size(); ++t) model.tensors()[t].grad = of_step[t];
      model.step(options);
      EXPECT_EQ(model.plan().memory().ran_on, isa);
      model.plan().memory().step_balance.may_steal = steal;
      for (size_t t = 0; t < start.size(); ++t) model.plan().task(t).ahead = ahead;
    }
    return Outcome(model);
  }

  std::vector<std::vector<Operand>> grads_of_steps(std::vector<Tensor> tensors) {
    std::vector<std::vector<Operand>> grads(kSteps);
    for (int step = 0; step < kSteps; ++step) {
      for (size_t t = 0; t < tensors.size(); ++t) {
        tensors[t].grad.fill(1000 * step + t);
        grads[step].push_back(tensors[t].grad);
      }
    }
    return grads;
  }

  std::vector<GradUse> grad_uses() const {
    return GetParam().rule.two_phase ? std::vector{GradUse::kLeave, GradUse::kScratch}
                                     : std::vector{GradUse::kLeave};
  }
};

TEST_P(DeterminismTest, SameBitsForAllInstructionSetsAndThreads) {
  std::vector<Tensor> start = dense_tensors(GetParam(), sizes_around_everything());
  for (const Tensor& tensor : tensors_beyond_squares(GetParam())) start.push_back(tensor);
  const std::vector<std::vector<Operand>> grads = grads_of_steps(start);
  start.push_back(extremes(GetParam()));
  for (const GradUse use : grad_uses()) {
    const Outcome expected = run(start, grads, "base", {.threads = 1, .grads = use});
    for (const std::string& isa : isas()) {
      // Every number of threads on one instruction set, and one and several on the others.
      const bool every_number = isa == isas().front() && !kSanitized;
      for (const int threads : every_number ? std::vector{1, 2, 3, 7, 64} : std::vector{1, 7}) {
        SCOPED_TRACE(testing::Message()
                     << isa << ", " << threads << " threads, gradients " << static_cast<int>(use));
        expect_same(run(start, grads, isa, {.threads = threads, .grads = use}), expected);
      }
    }
  }
}

TEST_P(DeterminismTest, SameBitsWithPrefetchesAndWithout) {
  const std::vector<Tensor> start = dense_tensors(GetParam(), sizes_around_everything());
  const std::vector<std::vector<Operand>> grads = grads_of_steps(start);
  for (const GradUse use : grad_uses()) {
    const StepOptions options{.threads = 2, .grads = use};
    const Outcome expected = run(start, grads, "base", options);
    for (const std::string& isa : isas()) {
      SCOPED_TRACE(isa);
      for (const PrefetchDistance ahead : {PrefetchDistance{.first = 1024, .second = 6144}, {.first = 512}}) {
        expect_same(run(start, grads, isa, options, /*steal=*/false, ahead), expected);
      }
      expect_same(run(start, grads, isa, options), expected);
    }
  }
}

TEST_P(DeterminismTest, SameBitsFromRunToRun) {
  const std::vector<Tensor> start = dense_tensors(GetParam(), {100003, 33, 50000});
  const std::vector<std::vector<Operand>> grads = grads_of_steps(start);
  const StepOptions options{.threads = 3, .grads = GradUse::kScratch};
  const Outcome expected = run(start, grads, isa(), options);
  for (int i = 0; i < 5; ++i) expect_same(run(start, grads, isa(), options), expected);
  for (int i = 0; i < 5; ++i) expect_same(run(start, grads, isa(), options, /*steal=*/true), expected);
}

// A tensor's result does not depend on the others of its list.
TEST_P(DeterminismTest, SameBitsAloneAndInAList) {
  const std::vector<Tensor> start = dense_tensors(GetParam(), {50000, 33, 100003});
  const std::vector<std::vector<Operand>> grads = grads_of_steps(start);
  const StepOptions options{.threads = 3, .grads = GradUse::kScratch};
  const Outcome together = run(start, grads, isa(), options);
  for (size_t t = 0; t < start.size(); ++t) {
    std::vector<std::vector<Operand>> own;
    for (const std::vector<Operand>& of_step : grads) own.push_back({of_step[t]});
    const Outcome alone = run({start[t]}, own, isa(), options);
    EXPECT_EQ(alone.ratios[0], together.ratios[t]);
    for (size_t k = 0; k < alone.operands[0].size(); ++k) {
      EXPECT_EQ(alone.operands[0][k].first_difference(together.operands[t][k]), -1)
          << "operand " << k << " of tensor " << t;
    }
  }
}

#if defined(__x86_64__)

// Workers take over the caller's rounding and flush-to-zero; encoding to 16 bits depends on neither.
TEST_P(DeterminismTest, SameBitsInEveryFloatingPointEnvironment) {
  std::vector<Tensor> start = dense_tensors(GetParam(), {2 * kSerialElements, 33});
  const std::vector<std::vector<Operand>> grads = grads_of_steps(start);
  start.push_back(extremes(GetParam()));
  const unsigned own = _mm_getcsr();
  const unsigned denormals_are_zero = 0x40;
  const unsigned modes[] = {_MM_FLUSH_ZERO_ON | denormals_are_zero, _MM_ROUND_UP, _MM_ROUND_DOWN,
                            _MM_ROUND_TOWARD_ZERO};
  for (const unsigned mode : modes) {
    SCOPED_TRACE(testing::Message() << "MXCSR " << std::hex << mode);
    _mm_setcsr(own | mode);
    const Outcome expected = run(start, grads, "base", {.threads = 1});
    for (const std::string& isa : isas()) expect_same(run(start, grads, isa, {.threads = 3}), expected);
    _mm_setcsr(own);
  }
}

#endif

INSTANTIATE_TEST_SUITE_P(Rules, DeterminismTest, testing::ValuesIn(all_cases()),
                         [](const auto& info) { return name(info.param); });

// Without the update in the gradient's memory it is computed a second time: to the same bits, or else the two
// ways would train differently.
class StoredUpdateTest : public DeterminismTest {};

TEST_P(StoredUpdateTest, SameBitsStoredAndRecomputed) {
  const std::vector<Tensor> start = dense_tensors(GetParam(), {1, 33, 1025, 50000});
  const std::vector<std::vector<Operand>> grads = grads_of_steps(start);
  const Outcome stored = run(start, grads, isa(), {.threads = 2, .grads = GradUse::kScratch});
  const Outcome recomputed = run(start, grads, isa(), {.threads = 2, .grads = GradUse::kLeave});
  EXPECT_EQ(stored.ratios, recomputed.ratios);
  const bool precise = GetParam().dtype == DType::kFloat || GetParam().dtype == DType::kDouble;
  for (size_t t = 0; t < start.size(); ++t) {
    for (size_t k = 0; k < stored.operands[t].size(); ++k) {
      const bool holds_update = k == kGrad && precise;
      EXPECT_EQ(stored.operands[t][k].first_difference(recomputed.operands[t][k]) == -1, !holds_update)
          << "operand " << k << " of tensor " << t;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, StoredUpdateTest, testing::ValuesIn(two_phase_cases()),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace fusedstep::test
