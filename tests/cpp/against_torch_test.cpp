// The numbers of the C++ optimizers: beside torch's own where it has one, LAMB's beside its formula.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <tuple>
#include <utility>

#include "tests/cpp/optim_cases.h"

namespace fusedstep::optim {
namespace {

// Both over 20 steps from the same weights.
template <class Ours, class Theirs, class OurOptions, class TheirOptions>
void compare_with_torch(const OurOptions& our_options, const TheirOptions& their_options) {
  for (const auto& [dtype, tolerance] :
       {std::pair{torch::kFloat64, 1e-12}, std::pair{torch::kFloat32, 2e-5}}) {
    torch::manual_seed(2);
    const Tensors ours = make_weights(dtype), theirs = clones(ours);
    Ours our_optimizer(ours, our_options);
    Theirs their_optimizer(theirs, their_options);
    for (uint64_t step = 0; step < 20; ++step) {
      set_grads(ours, step);
      set_grads(theirs, step);
      our_optimizer.step();
      their_optimizer.step();
      expect_close(ours, theirs, tolerance);
    }
  }
}

template <class Options>
Options adam_options(double weight_decay, bool amsgrad) {
  return Options(0.02).betas({0.8, 0.95}).eps(1e-6).weight_decay(weight_decay).amsgrad(amsgrad);
}

TEST(AgainstTorchTest, Adam) {
  for (const double weight_decay : {0.0, 0.1}) {
    for (const bool amsgrad : {false, true}) {
      compare_with_torch<Adam, torch::optim::Adam>(
          adam_options<AdamOptions>(weight_decay, amsgrad),
          adam_options<torch::optim::AdamOptions>(weight_decay, amsgrad));
    }
  }
}

TEST(AgainstTorchTest, AdamW) {
  for (const double weight_decay : {0.0, 0.1}) {
    for (const bool amsgrad : {false, true}) {
      compare_with_torch<AdamW, torch::optim::AdamW>(
          adam_options<AdamOptions>(weight_decay, amsgrad),
          adam_options<torch::optim::AdamWOptions>(weight_decay, amsgrad));
    }
  }
}

TEST(AgainstTorchTest, Adagrad) {
  for (const double weight_decay : {0.0, 0.1}) {
    compare_with_torch<Adagrad, torch::optim::Adagrad>(
        AdagradOptions(0.1).lr_decay(0.01).weight_decay(weight_decay).initial_accumulator_value(0.5),
        torch::optim::AdagradOptions(0.1)
            .lr_decay(0.01)
            .weight_decay(weight_decay)
            .initial_accumulator_value(0.5));
  }
}

template <class Options>
Options sgd_options(double momentum, double dampening, bool nesterov) {
  return Options(0.02).momentum(momentum).dampening(dampening).weight_decay(0.1).nesterov(nesterov);
}

TEST(AgainstTorchTest, SGD) {
  for (const auto& [momentum, dampening, nesterov] :
       {std::tuple{0.0, 0.0, false}, std::tuple{0.8, 0.3, false}, std::tuple{0.8, 0.0, true}}) {
    compare_with_torch<SGD, torch::optim::SGD>(
        sgd_options<SGDOptions>(momentum, dampening, nesterov),
        sgd_options<torch::optim::SGDOptions>(momentum, dampening, nesterov));
  }
}

TEST(AgainstTorchTest, SGDWhoseMomentumComesLater) {
  torch::manual_seed(2);
  const Tensors ours = make_weights(), theirs = clones(ours);
  SGD our_optimizer(ours, SGDOptions(0.1));
  torch::optim::SGD their_optimizer(theirs, torch::optim::SGDOptions(0.1));
  take_steps(our_optimizer, ours, 0, 2);
  take_steps(their_optimizer, theirs, 0, 2);
  static_cast<SGDOptions&>(our_optimizer.param_groups()[0].options()).momentum(0.8).dampening(0.5);
  static_cast<torch::optim::SGDOptions&>(their_optimizer.param_groups()[0].options())
      .momentum(0.8)
      .dampening(0.5);
  take_steps(our_optimizer, ours, 2, 5);
  take_steps(their_optimizer, theirs, 2, 5);
  expect_close(ours, theirs, 2e-5);
}

// An embedding whose rows come several times a step, beside a dense weight.
TEST(AgainstTorchTest, AdagradSparse) {
  const Tensor ids = torch::tensor({3, 1, 3, 7, 3, 1});
  const auto gradient = [&](const Tensors& weights, uint64_t step) {
    set_grads(weights, step);
    weights[0].mutable_grad() = torch::sparse_coo_tensor(ids.unsqueeze(0), torch::randn({6, 5}), {9, 5});
  };
  torch::manual_seed(2);
  const Tensors ours = {torch::randn({9, 5}).requires_grad_(), torch::randn({4, 5}).requires_grad_()};
  const Tensors theirs = clones(ours);
  Adagrad our_optimizer(ours, AdagradOptions(0.1).lr_decay(0.01));
  torch::optim::Adagrad their_optimizer(theirs, torch::optim::AdagradOptions(0.1).lr_decay(0.01));
  const Tensor before = ours[0].detach().clone();
  for (uint64_t step = 0; step < 5; ++step) {
    gradient(ours, step);
    gradient(theirs, step);
    const uint32_t version = ours[0]._version();
    our_optimizer.step();
    their_optimizer.step();
    expect_close(ours, theirs, 1e-5);
    EXPECT_GT(ours[0]._version(), version);
  }
  for (const int row : {0, 2, 4, 5, 6, 8}) EXPECT_TRUE(torch::equal(ours[0][row], before[row]));
}

TEST(AgainstTorchTest, Defaults) {
  compare_with_torch<Adam, torch::optim::Adam>(AdamOptions(), torch::optim::AdamOptions());
  compare_with_torch<AdamW, torch::optim::AdamW>(AdamWOptions(), torch::optim::AdamWOptions());
  compare_with_torch<Adagrad, torch::optim::Adagrad>(AdagradOptions(), torch::optim::AdagradOptions());
  compare_with_torch<SGD, torch::optim::SGD>(SGDOptions(1e-3), torch::optim::SGDOptions(1e-3));
}

TEST(AgainstFormulaTest, Lamb) {
  const double lr = 0.02, beta1 = 0.8, beta2 = 0.95, eps = 1e-6;
  for (const double weight_decay : {0.0, 0.1}) {
    for (const auto& [dtype, tolerance] :
         {std::pair{torch::kFloat64, 1e-12}, std::pair{torch::kFloat32, 2e-5}}) {
      const Tensors weights = make_weights(dtype);
      Tensors expected, m, v;
      for (const Tensor& weight : weights) {
        expected.push_back(weight.detach().to(torch::kFloat64, false, /*copy=*/true));
        m.push_back(torch::zeros_like(expected.back()));
        v.push_back(torch::zeros_like(expected.back()));
      }
      Lamb optimizer(weights, LambOptions(lr).betas({beta1, beta2}).eps(eps).weight_decay(weight_decay));
      for (int step = 1; step <= 20; ++step) {
        set_grads(weights, step);
        for (size_t i = 0; i < weights.size(); ++i) {
          const Tensor g = weights[i].grad().to(torch::kFloat64);
          m[i] = beta1 * m[i] + (1 - beta1) * g;
          v[i] = beta2 * v[i] + (1 - beta2) * g * g;
          const Tensor u =
              (m[i] / (1 - std::pow(beta1, step))) / ((v[i] / (1 - std::pow(beta2, step))).sqrt() + eps) +
              weight_decay * expected[i];
          expected[i] = expected[i] - lr * expected[i].norm() / u.norm() * u;
        }
        optimizer.step();
        expect_close(weights, expected, tolerance);
      }
    }
  }
}

}  // namespace
}  // namespace fusedstep::optim
