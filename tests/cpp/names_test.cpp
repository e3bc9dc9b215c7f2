// Law: a program that is written for torch::optim compiles over fusedstep::optim, and does the same.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/cpp/optim_cases.h"

namespace fusedstep::test {

// With all names of torch::optim that a program may need, and every member of its states that sets something.
#define FUSEDSTEP_PROGRAM                                                                                \
  std::vector<torch::Tensor> trained() {                                                                 \
    torch::manual_seed(5);                                                                               \
    std::vector<torch::Tensor> all;                                                                      \
    const auto weight = [&]() -> torch::Tensor {                                                         \
      return all.emplace_back(torch::randn({4, 3}).requires_grad_());                                    \
    };                                                                                                   \
    const auto take_steps = [&](optim::Optimizer& optimizer) {                                           \
      optim::StepLR scheduler(optimizer, 2, 0.5);                                                        \
      for (int step = 0; step < 4; ++step) {                                                             \
        optimizer.step([&] {                                                                             \
          optimizer.zero_grad();                                                                         \
          torch::Tensor loss = torch::zeros({});                                                         \
          for (const auto& group : optimizer.param_groups()) {                                           \
            for (const auto& each : group.params()) loss = loss + each.square().sum();                   \
          }                                                                                              \
          loss.backward();                                                                               \
          return loss;                                                                                   \
        });                                                                                              \
        scheduler.step();                                                                                \
      }                                                                                                  \
    };                                                                                                   \
    const auto state_of = [](optim::Optimizer& optimizer) -> optim::OptimizerParamState& {               \
      return *optimizer.state().at(optimizer.param_groups()[0].params()[0].unsafeGetTensorImpl());       \
    };                                                                                                   \
                                                                                                         \
    std::vector<optim::OptimizerParamGroup> groups;                                                      \
    groups.emplace_back(std::vector<torch::Tensor>{weight()});                                           \
    groups.emplace_back(                                                                                 \
        std::vector<torch::Tensor>{weight()},                                                            \
        std::make_unique<optim::AdamOptions>(optim::AdamOptions(0.1).betas(std::make_tuple(0.8, 0.9)))); \
    optim::Adam adam(groups, optim::AdamOptions(0.2).amsgrad(true));                                     \
    take_steps(adam);                                                                                    \
    auto& of_adam = static_cast<optim::AdamParamState&>(state_of(adam));                                 \
    const optim::AdamParamState before(of_adam);                                                         \
    EXPECT_TRUE(before == of_adam);                                                                      \
    of_adam.step(7).exp_avg(before.exp_avg() * 2).exp_avg_sq(before.exp_avg_sq() + 1);                   \
    of_adam.max_exp_avg_sq() += 3;                                                                       \
    EXPECT_FALSE(before == of_adam);                                                                     \
    take_steps(adam);                                                                                    \
                                                                                                         \
    const auto decayed = optim::AdamWOptions(0.1).weight_decay(0.5).eps(1e-6);                           \
    static_assert(std::is_same_v<decltype(decayed), const optim::AdamWOptions>);                         \
    optim::AdamW adamw({weight()}, 0.1);                                                                 \
    adamw.add_param_group(                                                                               \
        optim::OptimizerParamGroup({weight()}, std::make_unique<optim::AdamWOptions>(decayed)));         \
    take_steps(adamw);                                                                                   \
    auto& of_adamw = static_cast<optim::AdamWParamState&>(state_of(adamw));                              \
    of_adamw.step(2).exp_avg(of_adamw.exp_avg().clone()).exp_avg_sq() *= 2;                              \
    static_cast<optim::AdamWOptions&>(adamw.param_groups()[1].options()).lr(0.2).amsgrad(false);         \
    take_steps(adamw);                                                                                   \
                                                                                                         \
    optim::SGD sgd({weight()}, optim::SGDOptions(0.1).momentum(0.5).nesterov(true));                     \
    take_steps(sgd);                                                                                     \
    auto& of_sgd = static_cast<optim::SGDParamState&>(state_of(sgd));                                    \
    of_sgd.momentum_buffer(of_sgd.momentum_buffer() * 2);                                                \
    take_steps(sgd);                                                                                     \
                                                                                                         \
    optim::Adagrad adagrad({weight()}, optim::AdagradOptions(0.5).lr_decay(0.1));                        \
    take_steps(adagrad);                                                                                 \
    auto& of_adagrad = static_cast<optim::AdagradParamState&>(state_of(adagrad));                        \
    of_adagrad.step(9).sum(of_adagrad.sum() + 1);                                                        \
    take_steps(adagrad);                                                                                 \
                                                                                                         \
    optim::RMSprop rmsprop({weight()}, optim::RMSpropOptions(0.1).momentum(0.5).centered(true));         \
    take_steps(rmsprop);                                                                                 \
    auto& of_rmsprop = static_cast<optim::RMSpropParamState&>(state_of(rmsprop));                        \
    of_rmsprop.step(1).square_avg(of_rmsprop.square_avg() + 1).grad_avg(of_rmsprop.grad_avg() / 2);      \
    of_rmsprop.momentum_buffer(of_rmsprop.momentum_buffer() * 2);                                        \
    take_steps(rmsprop);                                                                                 \
                                                                                                         \
    optim::LBFGS lbfgs({weight()}, optim::LBFGSOptions(0.5).max_iter(3));                                \
    take_steps(lbfgs);                                                                                   \
    optim::ReduceLROnPlateauScheduler plateau(sgd, optim::ReduceLROnPlateauScheduler::min, 0.1F, 0);     \
    plateau.step(1);                                                                                     \
    plateau.step(2);                                                                                     \
    take_steps(sgd);                                                                                     \
    EXPECT_THROW(optim::Adam({weight()}, optim::AdamOptions(-1)), c10::Error);                           \
    return all;                                                                                          \
  }

namespace of_torch {
namespace optim = torch::optim;
FUSEDSTEP_PROGRAM
}  // namespace of_torch
namespace of_ours {
namespace optim = fusedstep::optim;
FUSEDSTEP_PROGRAM
}  // namespace of_ours
#undef FUSEDSTEP_PROGRAM

TEST(NamesTest, AProgramOfTorchsDoesTheSame) {
  fusedstep::optim::expect_close(of_ours::trained(), of_torch::trained(), 1e-5);
}

}  // namespace fusedstep::test

namespace fusedstep::optim {
namespace {

template <class Row>
class StateNamesTest : public testing::Test {};

TYPED_TEST_SUITE(StateNamesTest, Rows, RowName);

// A copy is equal until one of its tensors has another value, dtype or shape, or is there in one of them
// only.
TYPED_TEST(StateNamesTest, StatesAreCompared) {
  using State = typename TypeParam::State;
  const Tensors weights = {torch::ones({4096}).requires_grad_()};
  for (const char* state_dtype : {"", "fp8"}) {
    typename TypeParam::Optimizer optimizer(weights, TypeParam::options().state_dtype(state_dtype));
    take_steps(optimizer, weights, 0, 1);
    const auto& state = static_cast<const State&>(*optimizer.state().at(weights[0].unsafeGetTensorImpl()));
    State other(state);
    EXPECT_TRUE(other == state);
    EXPECT_FALSE(other.step(5) == state);
    for (const Tensor& slot :
         {torch::full({4096}, 9.0F), torch::zeros({2}), torch::zeros({4096}, torch::kInt64), Tensor()}) {
      other = state;
      other.slot(0, slot);
      EXPECT_FALSE(other == state);
    }
  }
}

}  // namespace
}  // namespace fusedstep::optim
