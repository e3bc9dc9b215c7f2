// The variants of LAMB in C++: what they stand for, their formulas, archives, and the norm over all groups.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/optim_cases.h"

namespace fusedstep::optim {
namespace {

using torch::optim::OptimizerParamGroup;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Each option at a value that none has by itself.
LambOptions unlike_the_defaults() {
  return LambOptions(0.02)
      .betas({0.8, 0.95})
      .eps(1e-4)
      .weight_decay(0.1)
      .keep_grad(true)
      .decoupled_decay(true)
      .debias(false)
      .debias_lr(true)
      .always_adapt(false)
      .max_grad_norm(2)
      .max_weight_norm(3)
      .min_ratio(0.1)
      .max_ratio(0.3);
}

TEST(LambVariantsTest, StandForOptions) {
  EXPECT_TRUE(LambOptions::apex(0.5) ==
              LambOptions(0.5).eps(1e-6).weight_decay(0.01).max_grad_norm(1).always_adapt(false));
  EXPECT_TRUE(LambOptions::timm(0.5) == LambOptions::apex(0.5));
  EXPECT_TRUE(LambOptions::nvlamb(0.5) == LambOptions(0.5).eps(1e-6).weight_decay(0.01).max_grad_norm(1));
  EXPECT_TRUE(LambOptions::deepspeed(0.5) ==
              LambOptions(0.5).debias(false).debias_lr(true).min_ratio(0.01).max_ratio(10));
  EXPECT_TRUE(LambOptions::cybertron(0.5) == LambOptions(0.5).eps(1e-6).debias(false).max_weight_norm(10));
}

TEST(LambVariantsTest, EveryOptionIsCompared) {
  const LambOptions options;
  EXPECT_FALSE(options == LambOptions().decoupled_decay(true));
  EXPECT_FALSE(options == LambOptions().debias(false));
  EXPECT_FALSE(options == LambOptions().debias_lr(true));
  EXPECT_FALSE(options == LambOptions().always_adapt(false));
  EXPECT_FALSE(options == LambOptions().max_grad_norm(1));
  EXPECT_FALSE(options == LambOptions().max_weight_norm(1));
  EXPECT_FALSE(options == LambOptions().min_ratio(1));
  EXPECT_FALSE(options == LambOptions().max_ratio(1));
}

TEST(LambVariantsTest, FollowTheirFormulas) {
  std::vector<LambOptions> variants = {LambOptions::apex(), LambOptions::nvlamb(), LambOptions::deepspeed(),
                                       LambOptions::cybertron(), unlike_the_defaults()};
  variants.push_back(LambOptions::apex().weight_decay(0));
  for (const LambOptions& o : variants) {
    const Tensors weights = make_weights(torch::kFloat64);
    Tensors expected, m, v;
    for (const Tensor& weight : weights) {
      expected.push_back(weight.detach().clone());
      m.push_back(torch::zeros_like(weight));
      v.push_back(torch::zeros_like(weight));
    }
    Lamb optimizer(weights, o);
    const auto [beta1, beta2] = o.betas();
    for (int step = 1; step <= 5; ++step) {
      set_grads(weights, step);
      double norm2 = 0;
      for (const Tensor& weight : weights) norm2 += weight.grad().square().sum().item<double>();
      const double clip = std::max(std::sqrt(norm2) / o.max_grad_norm(), 1.0);
      const double bias1 = 1 - std::pow(beta1, step), bias2 = 1 - std::pow(beta2, step);
      for (size_t i = 0; i < weights.size(); ++i) {
        const Tensor g = weights[i].grad() / clip;
        m[i] = beta1 * m[i] + (1 - beta1) * g;
        v[i] = beta2 * v[i] + (1 - beta2) * g * g;
        Tensor u =
            o.debias() ? m[i] / bias1 / ((v[i] / bias2).sqrt() + o.eps()) : m[i] / (v[i].sqrt() + o.eps());
        if (o.decoupled_decay()) {
          expected[i] = expected[i] * (1 - o.lr() * o.weight_decay());
        } else {
          u = u + o.weight_decay() * expected[i];
        }
        double ratio = 1;
        if (o.always_adapt() || o.weight_decay() != 0) {
          const double weight_norm = std::min(expected[i].norm().item<double>(), o.max_weight_norm());
          ratio = std::clamp(weight_norm / u.norm().item<double>(), o.min_ratio(), o.max_ratio());
        }
        const double lr = o.debias_lr() ? o.lr() * std::sqrt(bias2) / bias1 : o.lr();
        expected[i] = expected[i] - lr * ratio * u;
      }
      optimizer.step();
      expect_close(weights, expected, 1e-12);
    }
  }
}

TEST(LambVariantsTest, SavedAndLoadedKeepTheirOptions) {
  const Tensors weights = make_weights();
  Lamb optimizer(weights, unlike_the_defaults()), loaded(weights, LambOptions::apex());
  std::stringstream file;
  torch::save(optimizer, file);
  torch::load(loaded, file);
  const auto& options = static_cast<const LambOptions&>(loaded.param_groups()[0].options());
  EXPECT_TRUE(options == unlike_the_defaults());
}

// As archives were before there were variants.
TEST(LambVariantsTest, AnArchiveWithoutTheOptionsIsThePapers) {
  torch::serialize::OutputArchive old;
  old.write("lr", torch::IValue(0.5));
  old.write("betas", torch::IValue(std::make_tuple(0.8, 0.95)));
  old.write("eps", torch::IValue(1e-4));
  old.write("weight_decay", torch::IValue(0.1));
  old.write("maximize", torch::IValue(false));
  old.write("keep_grad", torch::IValue(true));
  std::stringstream file;
  old.save_to(file);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  LambOptions options;
  options.serialize(archive);
  EXPECT_TRUE(options == LambOptions(0.5).betas({0.8, 0.95}).eps(1e-4).weight_decay(0.1).keep_grad(true));
}

TEST(LambVariantsTest, OutOfRangeIsRefused) {
  const std::pair<LambOptions, std::string> rows[] = {
      {LambOptions().max_grad_norm(0), "Invalid max_grad_norm value: 0"},
      {LambOptions().max_grad_norm(std::nan("")), "Invalid max_grad_norm value: nan"},
      {LambOptions().max_weight_norm(-1), "Invalid max_weight_norm value: -1"},
      {LambOptions().min_ratio(-1), "Invalid min_ratio value: -1"},
      {LambOptions().min_ratio(2).max_ratio(1), "Invalid max_ratio value: 1, below min_ratio, 2"},
      {LambOptions().debias_lr(true), "debias and debias_lr cannot both be true"},
  };
  for (const auto& [options, text] : rows) {
    EXPECT_EQ(error_of([&, &options = options] { Lamb optimizer(Tensors{torch::ones(3)}, options); }), text);
  }
}

TEST(LambVariantsTest, OneMaximalNormForAllGroups) {
  const Tensors first = make_weights(), second = make_weights();
  Lamb optimizer(first, LambOptions::apex());
  optimizer.add_param_group(OptimizerParamGroup(second, std::make_unique<LambOptions>()));
  set_grads(first, 1);
  set_grads(second, 1);
  const Tensors before = clones(first);
  EXPECT_EQ(error_of([&] { optimizer.step(); }),
            "group 1: max_grad_norm must be the same in all groups, not 1 and inf");
  expect_equal(first, before);

  // Both groups together have the norm, and keep the gradients that the step does not use.
  static_cast<LambOptions&>(optimizer.param_groups()[1].options()).max_grad_norm(1).keep_grad(true);
  double norm2 = 0;
  for (const Tensors* weights : {&first, &second}) {
    for (const Tensor& weight : *weights) norm2 += weight.grad().square().sum().item<double>();
  }
  const Tensors alone = clones(second);
  Lamb other(alone, LambOptions());
  Tensors grads;
  for (size_t i = 0; i < alone.size(); ++i) {
    alone[i].mutable_grad() = second[i].grad() / std::sqrt(norm2);
    grads.push_back(second[i].grad().clone());
  }
  optimizer.step();
  other.step();
  expect_close(second, alone, 1e-6);
  for (size_t i = 0; i < grads.size(); ++i) EXPECT_TRUE(torch::equal(second[i].grad(), grads[i]));
}

}  // namespace
}  // namespace fusedstep::optim
