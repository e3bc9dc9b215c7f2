// The C++ optimizers as torch::optim::Optimizer: what a program does with an optimizer besides stepping it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "tests/cpp/optim_cases.h"

namespace fusedstep::optim {
namespace {

using torch::optim::OptimizerParamGroup;

template <class Row>
class OptimTest : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(1); }
};

TYPED_TEST_SUITE(OptimTest, Rows, RowName);

TYPED_TEST(OptimTest, MaximizingIsMinimizingTheNegative) {
  const Tensors up = make_weights(), down = clones(up);
  auto options = TypeParam::options();
  typename TypeParam::Optimizer minimizer(down, options);
  typename TypeParam::Optimizer maximizer(up, options.maximize(true));
  for (uint64_t step = 0; step < 3; ++step) {
    set_grads(up, step);
    set_grads(down, step);
    for (const Tensor& weight : down) weight.mutable_grad().neg_();
    minimizer.step();
    maximizer.step();
    expect_equal(up, down);
  }
}

// The network and the bound of torch's own optimizer tests.
TYPED_TEST(OptimTest, LearnsXor) {
  torch::nn::Sequential model(torch::nn::Linear(2, 8), torch::nn::Functional(torch::sigmoid),
                              torch::nn::Linear(8, 1), torch::nn::Functional(torch::sigmoid));
  typename TypeParam::Optimizer optimizer(model->parameters(), TypeParam::kLrForXor);
  double running_loss = 1;
  for (int epoch = 0; epoch < 3000 && running_loss > 0.1; ++epoch) {
    const Tensor inputs = torch::randint(2, {200, 2}, torch::kFloat32);
    const Tensor labels = inputs.sum(1).remainder(2).unsqueeze(1);
    const Tensor loss = optimizer.step([&] {
      optimizer.zero_grad();
      Tensor loss = torch::binary_cross_entropy(model->forward(inputs), labels);
      loss.backward();
      return loss;
    });
    running_loss = 0.99 * running_loss + 0.01 * loss.item<double>();
  }
  EXPECT_LE(running_loss, 0.1);
}

// ---- Groups, schedulers, closures, gradients ------------------------------------------------------------

TYPED_TEST(OptimTest, GroupsHaveOptionsOfTheirOwn) {
  const Tensors first = make_weights(), second = make_weights();
  const Tensors first_alone = clones(first), second_alone = clones(second);
  const auto options = TypeParam::options();
  auto other = TypeParam::options();
  other.lr(0.003).maximize(true);

  typename TypeParam::Optimizer optimizer(std::vector<OptimizerParamGroup>{}, options);
  optimizer.add_param_group(OptimizerParamGroup(first));
  optimizer.add_param_group(
      OptimizerParamGroup(second, std::make_unique<typename TypeParam::Options>(other)));
  typename TypeParam::Optimizer of_first(first_alone, options), of_second(second_alone, other);
  for (uint64_t step = 0; step < 3; ++step) {
    for (const Tensors* weights : {&first, &second, &first_alone, &second_alone}) set_grads(*weights, step);
    optimizer.step();
    of_first.step();
    of_second.step();
  }
  expect_equal(first, first_alone);
  expect_equal(second, second_alone);
}

TYPED_TEST(OptimTest, FollowsALearningRateScheduler) {
  const Tensors scheduled = make_weights(), by_hand = clones(scheduled);
  typename TypeParam::Optimizer optimizer(scheduled, TypeParam::options());
  typename TypeParam::Optimizer other(by_hand, TypeParam::options());
  torch::optim::SGD sgd(by_hand, TypeParam::options().lr());  // the reference: a class of torch
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/2, /*gamma=*/0.5), sgd_scheduler(sgd, 2, 0.5);
  for (uint64_t step = 0; step < 6; ++step) {
    const double lr = sgd.param_groups()[0].options().get_lr();
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), lr);
    other.param_groups()[0].options().set_lr(lr);
    take_steps(optimizer, scheduled, step, step + 1);
    take_steps(other, by_hand, step, step + 1);
    scheduler.step();
    sgd_scheduler.step();
  }
  EXPECT_LT(sgd.param_groups()[0].options().get_lr(), TypeParam::options().lr());
  expect_equal(scheduled, by_hand);
}

TYPED_TEST(OptimTest, ClosureIsEvaluatedWithGradientsAndItsLossReturned) {
  const Tensor weight = torch::tensor({1.0, -2.0}, torch::requires_grad());
  typename TypeParam::Optimizer optimizer({weight}, TypeParam::options());
  int calls = 0;
  const torch::NoGradGuard no_grad;
  const Tensor loss = optimizer.step([&] {
    ++calls;
    Tensor loss = weight.square().sum();
    loss.backward();
    return loss;
  });
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(loss.item<double>(), 5);
  EXPECT_FALSE(optimizer.step().defined());  // the first step of some moves no weight
  EXPECT_LT(weight[0].item<double>(), 1);
  EXPECT_GT(weight[1].item<double>(), -2);
}

TYPED_TEST(OptimTest, ZeroGrad) {
  const Tensors weights = make_weights();
  typename TypeParam::Optimizer optimizer(weights, TypeParam::options());
  set_grads(weights, 1);
  optimizer.zero_grad(/*set_to_none=*/false);
  for (const Tensor& weight : weights) EXPECT_EQ(weight.grad().count_nonzero().item<int64_t>(), 0);
  optimizer.zero_grad();
  for (const Tensor& weight : weights) EXPECT_FALSE(weight.grad().defined());
}

TYPED_TEST(OptimTest, WeightsWithoutGradientAreLeftAlone) {
  const Tensors weights = make_weights(), with_all = clones(weights), before = clones(weights);
  typename TypeParam::Optimizer optimizer(weights, TypeParam::options()),
      other(with_all, TypeParam::options());
  optimizer.step();  // none has a gradient
  expect_equal(weights, before);
  for (uint64_t step = 0; step < 3; ++step) {
    set_grads(weights, step);
    set_grads(with_all, step);
    weights[1].mutable_grad() = Tensor();
    optimizer.step();
    other.step();
  }
  EXPECT_TRUE(torch::equal(weights[1], before[1]));
  EXPECT_EQ(optimizer.state().count(weights[1].unsafeGetTensorImpl()), 0u);
  for (const size_t i : {0, 2, 3, 4}) EXPECT_TRUE(torch::equal(weights[i], with_all[i])) << "tensor " << i;
  // From now on with all of them: each counts its own steps.
  take_steps(optimizer, weights, 3, 4);
  const auto step_of = [&](size_t i) {
    const auto& state = *optimizer.state().at(weights[i].unsafeGetTensorImpl());
    return static_cast<const typename TypeParam::State&>(state).step().template item<float>();
  };
  EXPECT_EQ(step_of(0), 4);
  EXPECT_EQ(step_of(1), 1);
}

// ---- States ---------------------------------------------------------------------------------------------

TYPED_TEST(OptimTest, StatesHaveTheWeightsDtypeAndOrder) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kFloat16}) {
    const Tensor weight = torch::randn({30, 20}, dtype).t().requires_grad_();
    const Tensor before = weight.detach().clone();
    typename TypeParam::Optimizer optimizer({weight}, TypeParam::options());
    take_steps(optimizer, {weight}, 0, 2);
    EXPECT_FALSE(torch::equal(weight, before));
    EXPECT_TRUE(weight.isfinite().all().template item<bool>());
    const auto& state =
        static_cast<const typename TypeParam::State&>(*optimizer.state().at(weight.unsafeGetTensorImpl()));
    EXPECT_EQ(state.step().template item<float>(), 2);
    EXPECT_EQ(state.slot(0).dtype(), dtype);
    EXPECT_EQ(state.slot(0).sizes(), weight.sizes());
    EXPECT_EQ(state.slot(0).strides(), weight.strides());
  }
}

TEST(StateTest, ByTorchsNames) {
  const Tensors weights = {torch::ones({3}, torch::requires_grad())};
  weights[0].mutable_grad() = torch::full({3}, 2.0f);
  void* const key = weights[0].unsafeGetTensorImpl();
  Lamb lamb(weights, LambOptions().betas({0.5, 0.75}).keep_grad(true));
  lamb.step();
  const auto& lamb_state = static_cast<const LambParamState&>(*lamb.state().at(key));
  EXPECT_TRUE(torch::equal(lamb_state.exp_avg(), torch::full({3}, 1.0f)));
  EXPECT_TRUE(torch::equal(lamb_state.exp_avg_sq(), torch::full({3}, 1.0f)));
  Adam adam(weights, AdamOptions().betas({0.5, 0.75}).amsgrad(true));
  adam.step();
  const auto& adam_state = static_cast<const AdamParamState&>(*adam.state().at(key));
  EXPECT_TRUE(torch::equal(adam_state.exp_avg(), torch::full({3}, 1.0f)));
  EXPECT_TRUE(torch::equal(adam_state.exp_avg_sq(), torch::full({3}, 1.0f)));
  EXPECT_TRUE(torch::equal(adam_state.max_exp_avg_sq(), torch::full({3}, 1.0f)));
  Adagrad adagrad(weights, AdagradOptions().initial_accumulator_value(0.5));
  adagrad.step();
  const auto& adagrad_state = static_cast<const AdagradParamState&>(*adagrad.state().at(key));
  EXPECT_TRUE(torch::equal(adagrad_state.sum(), torch::full({3}, 4.5f)));
}

TEST(AdanTest, ItsStatesByTheirNamesAndARestart) {
  const Tensor weight = torch::ones({3}, torch::requires_grad());
  Adan adan(Tensors{weight}, AdanOptions().betas({0.5, 0.5, 0.75}));
  const auto step = [&](double gradient) {
    weight.mutable_grad() = torch::full({3}, gradient);
    adan.step();
  };
  const auto expect_states = [&](double m, double n, double v, double h) {
    const auto& state = static_cast<const AdanParamState&>(*adan.state().at(weight.unsafeGetTensorImpl()));
    EXPECT_EQ(state.exp_avg()[0].item<double>(), m);
    EXPECT_EQ(state.exp_avg_sq()[0].item<double>(), n);
    EXPECT_EQ(state.exp_avg_diff()[0].item<double>(), v);
    EXPECT_EQ(state.neg_pre_grad()[0].item<double>(), h);
  };
  step(2);
  expect_states(1, 1, 0, -2);
  step(6);
  expect_states(3.5, 16.75, 2, -6);  // the difference is 4, the square that of 6 + 4 / 2
  adan.restart_opt();
  expect_states(0, 0, 0, 0);
  step(2);
  expect_states(1, 1, 0, -2);
}

// Over all groups, and with eps beside the norm: a norm of 3 is clipped to 4 / (3 + 2).
TEST(AdanTest, ClipsTheNormOfAllGroups) {
  const Tensors weights = {torch::zeros({4}, torch::requires_grad()),
                           torch::zeros({5}, torch::requires_grad())};
  Adan adan({OptimizerParamGroup({weights[0]}), OptimizerParamGroup({weights[1]})},
            AdanOptions().max_grad_norm(4).eps(2));
  for (const Tensor& weight : weights) weight.mutable_grad() = torch::ones_like(weight);
  adan.step();
  for (const Tensor& weight : weights) {
    const auto& state = static_cast<const AdanParamState&>(*adan.state().at(weight.unsafeGetTensorImpl()));
    EXPECT_TRUE(torch::equal(state.neg_pre_grad(), torch::full_like(weight, -0.8f)));
    EXPECT_TRUE(torch::equal(weight.grad(), torch::ones_like(weight)));
  }
}

// An optimizer saved and loaded goes on as if nothing had happened; its options come along.
TYPED_TEST(OptimTest, SavedAndLoadedGivesTheSameBits) {
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16}) {
    const Tensors weights = make_weights(dtype);
    typename TypeParam::Optimizer optimizer(weights, TypeParam::options());
    take_steps(optimizer, weights, 0, 5);

    std::stringstream file;
    torch::save(optimizer, file);
    const Tensors resumed = clones(weights);
    typename TypeParam::Optimizer loaded(resumed, typename TypeParam::Options(0.5));
    take_steps(loaded, resumed, 100, 102);  // it has had a plan and states of its own
    for (size_t i = 0; i < weights.size(); ++i) resumed[i].detach().copy_(weights[i]);
    torch::load(loaded, file);
    EXPECT_TRUE(static_cast<const typename TypeParam::Options&>(loaded.param_groups()[0].options()) ==
                TypeParam::options());

    take_steps(optimizer, weights, 5, 10);
    take_steps(loaded, resumed, 5, 10);
    expect_equal(weights, resumed);
  }
}

// SGD's for the others, Adam's for SGD.
TYPED_TEST(OptimTest, AnArchiveOfAnotherOptimizerIsRefused) {
  using Optimizer = typename TypeParam::Optimizer;
  using Other = std::conditional_t<std::is_same_v<Optimizer, SGD>, Adam, SGD>;
  const Tensors weights = make_weights();
  std::stringstream file;
  torch::save(Other(weights, 0.25), file);
  Optimizer optimizer(weights, TypeParam::options());
  const std::string names = "the archive is of " + c10::demangle(typeid(Other).name()) + ", not of " +
                            c10::demangle(typeid(Optimizer).name());
  EXPECT_EQ(error_of([&] { torch::load(optimizer, file); }), names);
  EXPECT_TRUE(static_cast<const typename TypeParam::Options&>(optimizer.param_groups()[0].options()) ==
              TypeParam::options());
}

TYPED_TEST(OptimTest, OptionsOfAnotherClassAreRefused) {
  using Optimizer = typename TypeParam::Optimizer;
  const Tensors weights = make_weights(), before = clones(weights);
  const OptimizerParamGroup group(weights, std::make_unique<torch::optim::LBFGSOptions>(0.1));
  const std::string names = "group 0: the options must be " +
                            c10::demangle(typeid(typename TypeParam::Options).name()) +
                            ", not torch::optim::LBFGSOptions";
  const std::vector<OptimizerParamGroup> groups{group};
  EXPECT_EQ(error_of([&] { Optimizer optimizer(groups, TypeParam::options()); }), names);
  Optimizer optimizer(std::vector<OptimizerParamGroup>{}, TypeParam::options());
  EXPECT_EQ(error_of([&] { optimizer.add_param_group(group); }), names);
  EXPECT_TRUE(optimizer.param_groups().empty());
  optimizer.param_groups().push_back(group);
  set_grads(weights, 0);
  EXPECT_EQ(error_of([&] { optimizer.step(); }), names);
  expect_equal(weights, before);
}

TEST(AdamWTest, ANumberIsItsRate) {
  const auto stepped = [](const auto& make) {
    const Tensor weight = torch::ones(4, torch::requires_grad());
    weight.mutable_grad() = torch::zeros(4);
    AdamW optimizer = make(Tensors{weight});
    optimizer.step();
    EXPECT_NE(dynamic_cast<AdamWOptions*>(&optimizer.param_groups()[0].options()), nullptr);
    return weight[0].item<float>();
  };
  using Groups = std::vector<OptimizerParamGroup>;
  EXPECT_FLOAT_EQ(stepped([](const Tensors& weights) { return AdamW(weights, 0.1); }), 0.999);
  EXPECT_FLOAT_EQ(stepped([](const Tensors& weights) { return AdamW(weights, {0.1}); }), 0.999);
  EXPECT_FLOAT_EQ(
      stepped([](const Tensors& weights) { return AdamW(Groups{OptimizerParamGroup(weights)}, 0.1); }),
      0.999);
  const auto of_adam = AdamOptions(0.1).weight_decay(0.5).amsgrad(true).seed(3).rounding("kahan");
  EXPECT_FLOAT_EQ(stepped([&](const Tensors& weights) { return AdamW(weights, of_adam); }), 0.95);
  EXPECT_TRUE(AdamWOptions(of_adam) ==
              AdamWOptions(0.1).weight_decay(0.5).amsgrad(true).seed(3).rounding("kahan"));
}

// In the constructor, added, and pushed past the optimizer: a decay of 0.5 is decoupled.
TEST(AdamWTest, AGroupWithOptionsOfAdamDecaysDecoupled) {
  using Groups = std::vector<OptimizerParamGroup>;
  const auto group = [](const Tensor& weight) {
    return OptimizerParamGroup({weight}, std::make_unique<AdamOptions>(AdamOptions(0.1).weight_decay(0.5)));
  };
  const Tensors weights = {torch::ones(4), torch::ones(4), torch::ones(4)};
  AdamW optimizer(Groups{group(weights[0])});
  optimizer.add_param_group(group(weights[1]));
  optimizer.param_groups().push_back(group(weights[2]));
  for (const Tensor& weight : weights) weight.mutable_grad() = torch::zeros(4);
  optimizer.step();
  for (const Tensor& weight : weights) EXPECT_FLOAT_EQ(weight[0].item<float>(), 0.95);
  for (const auto& each : optimizer.param_groups()) {
    EXPECT_NE(dynamic_cast<const AdamWOptions*>(&each.options()), nullptr);
  }
}

TEST(AdamWTest, StaysDecoupledAfterALoadOfTorchs) {
  const Tensors ours = make_weights(), theirs = clones(ours);
  torch::optim::AdamW expected(theirs, torch::optim::AdamWOptions(0.01).weight_decay(0.5));
  std::stringstream file;
  torch::save(expected, file);
  AdamW optimizer(ours);
  torch::load(optimizer, file);
  take_steps(optimizer, ours, 0, 3);
  take_steps(expected, theirs, 0, 3);
  expect_close(ours, theirs, 1e-5);
}

TYPED_TEST(OptimTest, GoesOnAfterAMove) {
  const Tensors weights = make_weights(), twin = clones(weights);
  typename TypeParam::Optimizer optimizer(weights, TypeParam::options());
  typename TypeParam::Optimizer other(twin, TypeParam::options());
  take_steps(optimizer, weights, 0, 2);
  take_steps(other, twin, 0, 2);
  typename TypeParam::Optimizer moved(std::move(optimizer));
  take_steps(moved, weights, 2, 4);
  take_steps(other, twin, 2, 4);
  expect_equal(weights, twin);
}

// ---- Memory and autograd --------------------------------------------------------------------------------

TYPED_TEST(OptimTest, LayoutsGiveTheSameResult) {
  const Tensor values = torch::randn({40, 30});
  const Tensor contiguous = values.clone().requires_grad_();
  const Tensor transposed = values.t().contiguous().t().requires_grad_();
  const Tensor big = torch::full({50, 90}, 7.0f);
  const Tensor sliced = big.slice(0, 5, 45).slice(1, 2, 62, 2).copy_(values).detach().requires_grad_();
  const Tensors weights = {contiguous, transposed, sliced};
  std::vector<std::unique_ptr<typename TypeParam::Optimizer>> optimizers;
  for (const Tensor& weight : weights) {
    optimizers.push_back(
        std::make_unique<typename TypeParam::Optimizer>(Tensors{weight}, TypeParam::options()));
  }
  for (uint64_t step = 0; step < 5; ++step) {
    torch::manual_seed(step);
    const Tensor grad = torch::randn({40, 30});
    for (size_t i = 0; i < weights.size(); ++i) {
      // One gradient in the weight's order, one in another, one expanded copy.
      weights[i].mutable_grad() = i == 1 ? grad.clone() : grad.t().contiguous().t();
      optimizers[i]->step();
    }
    expect_close({transposed, sliced}, {contiguous, contiguous}, 1e-6);
  }
  Tensor outside = torch::ones_like(big, torch::kBool);
  outside.slice(0, 5, 45).slice(1, 2, 62, 2).fill_(false);
  EXPECT_TRUE(big.masked_select(outside).eq(7).all().item<bool>());
}

TYPED_TEST(OptimTest, ABackwardThroughAChangedWeightOrStateThrows) {
  const Tensor weight = torch::randn({10}, torch::requires_grad()),
               factor = torch::ones_like(weight, torch::requires_grad());
  typename TypeParam::Optimizer optimizer({weight}, TypeParam::options());
  weight.mutable_grad() = torch::ones({10});
  optimizer.step();
  const auto& state =
      static_cast<typename TypeParam::State&>(*optimizer.state().at(weight.unsafeGetTensorImpl()));
  for (const Tensor& kept : {weight, state.slot(0)}) {
    const Tensor loss = (factor * kept).sum();  // keeps it for the factor's gradient
    const uint32_t version = kept._version();
    optimizer.step();
    EXPECT_GT(kept._version(), version);
    EXPECT_NE(error_of([&] { loss.backward(); }).find("modified by an inplace operation"), std::string::npos);
  }
}

TEST(LambTest, LeavesItsUpdateInTheGradientOrLeavesTheGradientAlone) {
  const Tensors stored = make_weights(), kept = clones(stored);
  Lamb storing(stored, LambRow::options()), keeping(kept, LambRow::options().keep_grad(true));
  for (uint64_t step = 0; step < 3; ++step) {
    set_grads(stored, step);
    set_grads(kept, step);
    Tensors grads;
    for (const Tensor& weight : kept) grads.push_back(weight.grad().clone());
    const uint32_t stored_version = stored[0].grad()._version(), kept_version = kept[0].grad()._version();
    storing.step();
    keeping.step();
    expect_equal(stored, kept);
    for (size_t i = 0; i < grads.size(); ++i) {
      EXPECT_TRUE(torch::equal(kept[i].grad(), grads[i]));
      EXPECT_FALSE(torch::equal(stored[i].grad(), grads[i]));
    }
    EXPECT_GT(stored[0].grad()._version(), stored_version);
    EXPECT_EQ(kept[0].grad()._version(), kept_version);
  }
}

// ---- Bad tensors ----------------------------------------------------------------------------------------

// As no torch operator would.
void set_layout(const Tensor& tensor, const std::vector<int64_t>& sizes,
                const std::vector<int64_t>& strides) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(sizes), at::IntArrayRef(strides));
}

// Whatever is wrong with one tensor, no tensor, state or step count changes.
TYPED_TEST(OptimTest, BadTensorsAreRefusedBeforeAnythingIsChanged) {
  struct Row {
    const char* what;
    void (*spoil)(const Tensor& weight);
    const char* text;
  };
  const Row rows[] = {
      {"sparse gradient",
       [](const Tensor& w) {
         w.mutable_grad() = torch::ones({4, 5}).to_sparse();
       },
       "sparse"},
      {"shape",
       [](const Tensor& w) {
         set_layout(w, {5, 4}, {4, 1});
       },
       "the gradient's shape [4, 5] is not the weight's, [5, 4]"},
      {"overlap",
       [](const Tensor& w) {
         set_layout(w, {4, 5}, {0, 1});
       },
       "the weight overlaps itself in memory"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.what);
    Tensors weights = {torch::randn({7}, torch::requires_grad()),
                       torch::randn({4, 5}, torch::requires_grad())};
    typename TypeParam::Optimizer optimizer(weights, TypeParam::options());
    take_steps(optimizer, weights, 0, 1);
    set_grads(weights, 1);
    const Tensors before = clones(weights);
    const auto& state = static_cast<const typename TypeParam::State&>(
        *optimizer.state().at(weights[0].unsafeGetTensorImpl()));
    const Tensor state_before = state.slot(0).clone();
    row.spoil(weights[1]);
    const std::string error = error_of([&] { optimizer.step(); });
    EXPECT_NE(error.find(row.text), std::string::npos) << error;
    set_layout(weights[1], {4, 5}, {5, 1});
    expect_equal(weights, before);
    EXPECT_TRUE(torch::equal(state.slot(0), state_before));
    EXPECT_EQ(state.step().template item<float>(), 1);
  }
}

Tensor negated(const Tensor& values) {
  return torch::imag(torch::conj(torch::complex(torch::zeros_like(values), -values)));
}

// The memory of a negated or zero-tensor gradient does not hold the values of the gradient. The step copies
// the gradient, and nothing may share the copy.
TYPED_TEST(OptimTest, GradientsAreTakenByTheirValues) {
  Tensor (*const kinds[])(const Tensor&) = {
      negated, [](const Tensor& values) { return at::_neg_view(-values); },
      [](const Tensor& values) { return at::_efficientzerotensor(values.sizes(), values.options()); }};
  for (const int64_t size : {1, 4096}) {
    for (const auto& kind : kinds) {
      const Tensors weights = {torch::randn({size}, torch::requires_grad())}, others = clones(weights);
      typename TypeParam::Optimizer optimizer(weights, TypeParam::options()),
          expected(others, TypeParam::options());
      for (uint64_t step = 0; step < 5; ++step) {
        set_grads(weights, step);
        if (step != 1) weights[0].mutable_grad() = kind(weights[0].grad());
        others[0].mutable_grad() = (weights[0].grad() + 0).clone();
        optimizer.step();
        expected.step();
        const Tensor in_the_way = torch::full({size}, 100.0);  // of what has been freed
      }
      expect_equal(weights, others);
    }
  }
}

TYPED_TEST(OptimTest, AutogradsNegatedGradientsAreTakenByTheirValues) {
  const Tensors weights = {torch::ones({1}, torch::requires_grad())}, others = clones(weights);
  typename TypeParam::Optimizer optimizer(weights, TypeParam::options()),
      expected(others, TypeParam::options());
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const Tensor z = torch::complex(torch::zeros_like(weights[0]), weights[0]);
    torch::imag(torch::conj(z) * c10::complex<float>(1, 2)).sum().backward();
    ASSERT_TRUE(weights[0].grad().is_neg());
    others[0].mutable_grad() = -torch::ones({1});
    optimizer.step();
    expected.step();
  }
  expect_equal(weights, others);
}

TYPED_TEST(OptimTest, NegatedWeightsAndStatesAreRefused) {
  const Tensors weights = {torch::randn({8}, torch::requires_grad())};
  typename TypeParam::Optimizer optimizer(weights, TypeParam::options());
  take_steps(optimizer, weights, 0, 2);
  set_grads(weights, 2);
  const Tensor before = weights[0].detach().clone();
  auto& state =
      static_cast<typename TypeParam::State&>(*optimizer.state().at(weights[0].unsafeGetTensorImpl()));
  const auto expect_refusal = [&](const char* text) {
    const std::string error = error_of([&] { optimizer.step(); });
    EXPECT_NE(error.find(text), std::string::npos) << error;
    EXPECT_TRUE(torch::equal(weights[0], before));
    EXPECT_EQ(state.step().template item<float>(), 2);
  };
  const Tensor slot = state.slot(0);
  state.slot(0, negated(slot));
  expect_refusal("state is a negated view");
  state.slot(0, slot);
  slot.set_data(at::_neg_view(-slot));
  expect_refusal("state is a negated view");
  slot.set_data(torch::zeros({8}));
  weights[0].set_data(negated(before));
  expect_refusal("weight is a negated view");
}

TYPED_TEST(OptimTest, WithoutGroupsNothingIsDone) {
  typename TypeParam::Optimizer optimizer(std::vector<OptimizerParamGroup>{}, TypeParam::options());
  EXPECT_FALSE(optimizer.step().defined());
  EXPECT_EQ(optimizer.step([] { return torch::ones({}); }).template item<float>(), 1);
}

// A missing part starts anew, the rest goes on.
TYPED_TEST(OptimTest, AStateWithoutAPartGetsIt) {
  using State = typename TypeParam::State;
  const Tensors weights = {torch::randn({8}, torch::requires_grad())}, others = clones(weights);
  typename TypeParam::Optimizer optimizer(weights, TypeParam::options()),
      expected(others, TypeParam::options());
  take_steps(optimizer, weights, 0, 2);
  take_steps(expected, others, 0, 2);
  const auto state_of = [](auto& owner, const Tensor& weight) -> State& {
    return static_cast<State&>(*owner.state().at(weight.unsafeGetTensorImpl()));
  };
  State &state = state_of(optimizer, weights[0]), &other = state_of(expected, others[0]);
  const double value = TypeParam::Optimizer::initial_value(TypeParam::options(), State::kStates[0].name, 0);
  const Tensor initial = torch::full({8}, value);
  state.slot(0, Tensor());
  state.step(Tensor());
  other.slot(0, initial);
  for (size_t k = 0; k < State::kNumbers.size(); ++k) {  // all, where no other state is left
    const auto [name, first] = State::kNumbers[k];
    if (k > 0 && std::size(State::kStates) > 1) continue;
    other.number(k, torch::full({}, TypeParam::Optimizer::initial_value(TypeParam::options(), name, first)));
  }
  take_steps(optimizer, weights, 2, 4);
  take_steps(expected, others, 2, 4);
  expect_equal(weights, others);
}

TYPED_TEST(OptimTest, IntegerWeightsAreRefused) {
  const Tensor weight = torch::ones({3}, torch::kInt64);
  weight.mutable_grad() = torch::ones({3}, torch::kInt64);
  typename TypeParam::Optimizer optimizer({weight}, TypeParam::options());
  const std::string error = error_of([&] { optimizer.step(); });
  EXPECT_NE(error.find("must be float32, float64, bfloat16 or float16"), std::string::npos) << error;
  EXPECT_TRUE(torch::equal(weight, torch::ones({3}, torch::kInt64)));
}

}  // namespace
}  // namespace fusedstep::optim
