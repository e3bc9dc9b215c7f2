// The options of the C++ optimizers: their ranges, defaults and equality.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <cmath>
#include <string>
#include <type_traits>

#include "tests/cpp/optim_cases.h"

namespace fusedstep::optim {
namespace {

template <class Row>
class EachOptionsTest : public testing::Test {};

TYPED_TEST_SUITE(EachOptionsTest, Rows, RowName);

template <class Optimizer, class Options>
std::string refusal_of(const Options& options) {
  return error_of([&] { Optimizer optimizer(Tensors{torch::ones(3)}, options); });
}

TEST(OptionsTest, OutOfRangeIsRefusedInTorchsWords) {
  using TorchAdam = torch::optim::AdamOptions;
  using TorchAdagrad = torch::optim::AdagradOptions;
  const auto adam = [](const auto& options) { return refusal_of<Adam>(options); };
  const auto adamw = [](const auto& options) { return refusal_of<AdamW>(options); };
  const auto adagrad = [](const auto& options) { return refusal_of<Adagrad>(options); };
  const auto lamb = [](const auto& options) { return refusal_of<Lamb>(options); };
  const auto torch_adam = [](const auto& options) { return refusal_of<torch::optim::Adam>(options); };
  const auto torch_adagrad = [](const auto& options) { return refusal_of<torch::optim::Adagrad>(options); };
  const auto adan = [](const auto& options) { return refusal_of<Adan>(options); };
  const double nan = std::nan("");
  // Our error, that of torch or another of our optimizers, and the text that both must be.
  const std::array<std::string, 3> rows[] = {
      {adam(AdamOptions(-1)), torch_adam(TorchAdam(-1)), "Invalid learning rate: -1"},
      {adam(AdamOptions(nan)), torch_adam(TorchAdam(nan)), "Invalid learning rate: nan"},
      {adam(AdamOptions().eps(-1)), torch_adam(TorchAdam().eps(-1)), "Invalid epsilon value: -1"},
      {adam(AdamOptions().betas({1, 0.9})), torch_adam(TorchAdam().betas({1, 0.9})),
       "Invalid beta parameter at index 0: 1"},
      {adam(AdamOptions().betas({0.9, -0.5})), torch_adam(TorchAdam().betas({0.9, -0.5})),
       "Invalid beta parameter at index 1: -0.5"},
      {adam(AdamOptions().weight_decay(-1)), torch_adam(TorchAdam().weight_decay(-1)),
       "Invalid weight_decay value: -1"},
      {adagrad(AdagradOptions(-1)), torch_adagrad(TorchAdagrad(-1)), "Invalid learning rate: -1"},
      {adagrad(AdagradOptions().lr_decay(-1)), torch_adagrad(TorchAdagrad().lr_decay(-1)),
       "Invalid lr_decay value: -1"},
      {adagrad(AdagradOptions().weight_decay(-1)), torch_adagrad(TorchAdagrad().weight_decay(-1)),
       "Invalid weight_decay value: -1"},
      {adagrad(AdagradOptions().initial_accumulator_value(-1)),
       torch_adagrad(TorchAdagrad().initial_accumulator_value(-1)),
       "Invalid initial_accumulator_value value: -1"},
      {adagrad(AdagradOptions().eps(-1)), torch_adagrad(TorchAdagrad().eps(-1)), "Invalid epsilon value: -1"},
      {adamw(AdamWOptions(-1)), lamb(LambOptions(-1)), "Invalid learning rate: -1"},
      {adamw(AdamWOptions().eps(-1)), lamb(LambOptions().eps(-1)), "Invalid epsilon value: -1"},
      {adamw(AdamWOptions().betas({-0.5, 0.9})), lamb(LambOptions().betas({-0.5, 0.9})),
       "Invalid beta parameter at index 0: -0.5"},
      {adamw(AdamWOptions().betas({0.9, 1})), lamb(LambOptions().betas({0.9, 1})),
       "Invalid beta parameter at index 1: 1"},
      {adamw(AdamWOptions().weight_decay(-1)), lamb(LambOptions().weight_decay(-1)),
       "Invalid weight_decay value: -1"},
      {adan(AdanOptions(-1)), lamb(LambOptions(-1)), "Invalid learning rate: -1"},
      {adan(AdanOptions().eps(-1)), lamb(LambOptions().eps(-1)), "Invalid epsilon value: -1"},
      {adan(AdanOptions().betas({1, 0.9, 0.9})), lamb(LambOptions().betas({1, 0.9})),
       "Invalid beta parameter at index 0: 1"},
      {adan(AdanOptions().betas({0.9, -0.5, 0.9})), lamb(LambOptions().betas({0.9, -0.5})),
       "Invalid beta parameter at index 1: -0.5"},
      {adan(AdanOptions().weight_decay(-1)), lamb(LambOptions().weight_decay(-1)),
       "Invalid weight_decay value: -1"},
  };
  EXPECT_EQ(adan(AdanOptions().betas({0.9, 0.9, 1})), "Invalid beta parameter at index 2: 1");
  EXPECT_EQ(adan(AdanOptions().max_grad_norm(-1)), "Invalid Max grad norm: -1");
  EXPECT_EQ(adam(AdamOptions().max_grad_norm(0)), "Invalid max_grad_norm value: 0");
  EXPECT_EQ(adagrad(AdagradOptions().max_grad_norm(-1)), "Invalid max_grad_norm value: -1");
  EXPECT_EQ(refusal_of<Adadelta>(AdadeltaOptions().rho(2)), "Invalid rho value: 2");
  EXPECT_EQ(refusal_of<Adamax>(AdamaxOptions().betas({0.9, 1})), "Invalid beta parameter at index 1: 1");
  EXPECT_EQ(refusal_of<NAdam>(NAdamOptions().momentum_decay(-1)), "Invalid momentum_decay value: -1");
  EXPECT_EQ(refusal_of<RMSprop>(RMSpropOptions().alpha(nan)), "Invalid alpha value: nan");
  EXPECT_EQ(refusal_of<SGD>(SGDOptions().momentum(-1)), "Invalid momentum value: -1");
  EXPECT_EQ(refusal_of<SGD>(SGDOptions().dampening(-1)), "no error");
  EXPECT_EQ(refusal_of<ASGD>(ASGDOptions().lambd(-1).t0(-1)), "no error");
  for (const auto& [ours, other, text] : rows) {
    EXPECT_EQ(ours, text);
    EXPECT_EQ(other, text);
  }
}

TYPED_TEST(EachOptionsTest, ClipsByAnOptionAsByTheSeparateCall) {
  for (const double max_norm : {0.5, 1e6}) {
    const Tensors weights = make_weights(), twins = clones(weights);
    auto options = TypeParam::options();
    options.max_grad_norm(max_norm);
    typename TypeParam::Optimizer optimizer(weights, options), twin(twins, TypeParam::options());
    for (uint64_t step = 0; step < 3; ++step) {
      set_grads(weights, step);
      set_grads(twins, step);
      torch::nn::utils::clip_grad_norm_(twins, max_norm);
      optimizer.step();
      twin.step();
    }
    expect_close(weights, twins, 1e-5);
  }
}

TYPED_TEST(EachOptionsTest, DefaultsAreTheRules) {
  using Optimizer = typename TypeParam::Optimizer;
  const auto hyper = Optimizer::hyper(typename TypeParam::Options());
  std::remove_const_t<decltype(hyper)> expected{};
  if constexpr (std::is_same_v<Optimizer, AdamW>) {
    expected.weight_decay = 0.01;
    expected.decoupled_weight_decay = 1;
  }
  EXPECT_EQ(detail::numbers(hyper, false), detail::numbers(expected, false));
}

TYPED_TEST(EachOptionsTest, OptionsAreCompared) {
  const auto options = TypeParam::options();
  auto other = TypeParam::options();
  EXPECT_TRUE(options == other);
  other.set_lr(7);
  EXPECT_EQ(other.get_lr(), 7);
  EXPECT_FALSE(options == other);
}

}  // namespace
}  // namespace fusedstep::optim
