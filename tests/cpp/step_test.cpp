// step({.max_norm, .zero_grad}) does what clip_grad_norm_(), step() and zero_grad() do one by one.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/cpp/optim_cases.h"

namespace fusedstep::optim {
namespace {

constexpr ZeroGrad kAll[] = {ZeroGrad::kNo, ZeroGrad::kInPlace, ZeroGrad::kSetToNone};

// Of two groups, the second of which has a weight without a gradient.
template <class Row>
struct Run {
  explicit Run(const Tensors& values, const typename Row::Options& options) : weights(clones(values)) {
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(Tensors(weights.begin(), weights.begin() + 2));
    groups.emplace_back(Tensors(weights.begin() + 2, weights.end()));
    optimizer = std::make_unique<typename Row::Optimizer>(groups, options);
  }
  void set(uint64_t step) {
    set_grads(weights, step);
    weights[3].mutable_grad() = Tensor();
  }
  Tensors grads() const {
    Tensors found;
    for (const Tensor& weight : weights) {
      if (weight.grad().defined()) found.push_back(weight.grad());
    }
    return found;
  }

  Tensors weights;
  std::unique_ptr<typename Row::Optimizer> optimizer;
};

template <class Row>
class StepTest : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(1); }
  static constexpr bool kUsesGrads = std::is_same_v<typename Row::Optimizer, Lamb>;
};

TYPED_TEST_SUITE(StepTest, Rows, RowName);

TYPED_TEST(StepTest, ClipsAndClearsAsTheSeparateCalls) {
  for (const double own_max_norm : {kNoLimit, 0.25}) {
    for (const double max_norm : {0.5, 1e6}) {
      for (const ZeroGrad zero_grad : kAll) {
        auto options = TypeParam::options();
        if (std::isfinite(own_max_norm)) options.max_grad_norm(own_max_norm);
        const Tensors values = make_weights();
        Run<TypeParam> run(values, options), twin(values, options);
        for (uint64_t step = 0; step < 3; ++step) {
          run.set(step);
          twin.set(step);
          const Tensors before = run.grads();
          const double norm = torch::nn::utils::clip_grad_norm_(twin.weights, max_norm);
          const Tensors clipped = clones(twin.grads());
          twin.optimizer->step();
          const Tensor found = run.optimizer->step({.max_norm = max_norm, .zero_grad = zero_grad});
          EXPECT_EQ(found.dtype(), torch::kFloat64);
          EXPECT_NEAR(found.item<double>(), norm, 1e-5 * norm);
          expect_close(run.weights, twin.weights, 1e-5);
          const Tensors after = run.grads();
          if (zero_grad == ZeroGrad::kSetToNone) {
            EXPECT_TRUE(after.empty());
          } else if (zero_grad == ZeroGrad::kInPlace) {
            for (const Tensor& grad : before) EXPECT_EQ(grad.count_nonzero().template item<int64_t>(), 0);
          } else if (!TestFixture::kUsesGrads) {
            expect_close(before, clipped, 1e-6);
          }
        }
      }
    }
  }
}

// Each is scaled or zeroed once, though no kernel may write it.
TYPED_TEST(StepTest, TreatsGradientsThatNoKernelWrites) {
  const Tensor values = torch::randn({4, 5});
  const auto run = [&](const StepOptions& asked) {
    const Tensors weights = {torch::ones({4, 5}), torch::ones({4, 5}), torch::ones({4, 5}),
                             torch::ones({4, 5}), torch::ones({4, 5})};
    const Tensor shared = values.clone();
    weights[0].mutable_grad() = shared;
    weights[1].mutable_grad() = shared;
    weights[2].mutable_grad() = values.slice(0, 0, 1).expand({4, 5});
    weights[3].mutable_grad() = at::_neg_view(-values);
    weights[4].mutable_grad() = at::_efficientzerotensor({4, 5}, values.options());
    typename TypeParam::Optimizer optimizer(weights, TypeParam::options());
    const double factor = 0.5 / optimizer.step(asked).template item<double>();
    const double expected = asked.zero_grad == ZeroGrad::kInPlace ? 0 : factor;
    for (const size_t i : {0, 1, 3}) {
      EXPECT_TRUE(torch::allclose(weights[i].grad(), values * expected)) << "tensor " << i;
    }
    EXPECT_TRUE(torch::allclose(weights[2].grad(), values.slice(0, 0, 1).expand({4, 5}) * expected));
    EXPECT_EQ(weights[4].grad().count_nonzero().template item<int64_t>(), 0);
  };
  run({.max_norm = 0.5});
  run({.max_norm = 0.5, .zero_grad = ZeroGrad::kInPlace});
}

TYPED_TEST(StepTest, ReturnsTheLossElseTheNormElseNothing) {
  const Tensors weights = {torch::ones({2})};
  typename TypeParam::Optimizer optimizer(weights, TypeParam::options());
  EXPECT_EQ(optimizer.step({.max_norm = 1}).template item<double>(), 0);  // no gradient
  int calls = 0;
  const auto closure = [&] {
    ++calls;
    weights[0].mutable_grad() = torch::tensor({3.0F, 4.0F});
    return torch::tensor(7.0);
  };
  EXPECT_EQ(optimizer.step({.max_norm = 1}, closure).template item<double>(), 7);
  closure();
  EXPECT_EQ(optimizer.step({.max_norm = kNoLimit}).template item<double>(), 5);
  closure();
  EXPECT_FALSE(optimizer.step({}).defined());
  EXPECT_FALSE(optimizer.step({.zero_grad = ZeroGrad::kSetToNone}).defined());
  EXPECT_FALSE(weights[0].grad().defined());
  EXPECT_EQ(calls, 3);
  const Tensor before = weights[0].clone();
  for (const double wrong : {-1.0, std::nan("")}) {
    const std::string error = error_of([&] { optimizer.step({.max_norm = wrong}, closure); });
    EXPECT_TRUE(error.starts_with("Invalid max_norm value: ")) << error;
  }
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(torch::equal(weights[0], before));
  typename TypeParam::Optimizer without(std::vector<OptimizerParamGroup>{}, TypeParam::options());
  EXPECT_EQ(without.step({.max_norm = 1}).template item<double>(), 0);
}

TYPED_TEST(StepTest, TakesClearedGradientsOutOfGraphs) {
  const Tensor weight = torch::ones({2}), source = torch::ones({2}, torch::requires_grad());
  typename TypeParam::Optimizer optimizer(Tensors{weight}, TypeParam::options());
  for (const Tensor& grad : {source * 2, torch::ones({2}, torch::requires_grad())}) {
    weight.mutable_grad() = grad;
    optimizer.step({.zero_grad = ZeroGrad::kInPlace});
    EXPECT_FALSE(weight.grad().requires_grad());
    EXPECT_EQ(weight.grad().count_nonzero().template item<int64_t>(), 0);
  }
}

TEST(StepOptionsTest, ANormThatIsNoNumberMakesNaNs) {
  const Tensors weights = {torch::ones({2}), torch::ones({3})};
  SGD optimizer(weights, 0.1);
  weights[0].mutable_grad() = torch::ones({2});
  weights[1].mutable_grad() = torch::full({3}, std::nan(""));
  EXPECT_TRUE(std::isnan(optimizer.step({.max_norm = 1}).item<double>()));
  for (const Tensor& weight : weights) EXPECT_TRUE(weight.isnan().all().item<bool>());
}

TEST(StepOptionsTest, SparseGradientsAreClippedAndCleared) {
  const auto check = [](auto make) {
    for (const ZeroGrad zero_grad : kAll) {
      const Tensor indices = torch::tensor({{1, 3, 1}}), values = torch::randn({3, 4});
      const Tensors weights = {torch::ones({5, 4})}, twins = {torch::ones({5, 4})};
      auto optimizer = make(weights), twin = make(twins);
      weights[0].mutable_grad() = torch::sparse_coo_tensor(indices, values.clone(), {5, 4});
      twins[0].mutable_grad() = weights[0].grad().to_dense();
      const double norm = twin.step({.max_norm = 0.5}).template item<double>();
      EXPECT_NEAR(optimizer.step({.max_norm = 0.5, .zero_grad = zero_grad}).template item<double>(), norm,
                  1e-6);
      expect_close(weights, twins, 1e-6);
      const Tensor grad = weights[0].grad();
      EXPECT_EQ(grad.defined(), zero_grad != ZeroGrad::kSetToNone);
      if (!grad.defined()) continue;
      const Tensor expected = zero_grad == ZeroGrad::kNo ? twins[0].grad() : torch::zeros({5, 4});
      EXPECT_TRUE(torch::allclose(grad.to_dense(), expected, 1e-5, 1e-6));
    }
  };
  check([](const Tensors& weights) { return SGD(weights, 0.1); });
  check([](const Tensors& weights) { return Adagrad(weights, 0.1); });
}

}  // namespace
}  // namespace fusedstep::optim
