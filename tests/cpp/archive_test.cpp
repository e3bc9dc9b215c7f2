// Archives of the C++ optimizers: those of torch's classes, and those that do not fit.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <iterator>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/cpp/optim_cases.h"

namespace fusedstep::optim {
namespace {

template <class From, class To>
void hand_over(const From& from, To& to) {
  std::stringstream file;
  torch::save(from, file);
  torch::load(to, file);
}

// ---- torch's archives -----------------------------------------------------------------------------------

// Three steps of one class, then three of both, one of which has loaded the archive of the other.
template <class First, class Second, class FirstOptions, class SecondOptions>
void expect_goes_on(const FirstOptions& first_options, const SecondOptions& second_options, int steps) {
  torch::manual_seed(3);
  const Tensors weights = make_weights();
  First first(weights, first_options);
  take_steps(first, weights, 0, steps);
  const Tensors others = clones(weights);
  Second second(others, second_options);
  hand_over(first, second);
  take_steps(first, weights, 3, 6);
  take_steps(second, others, 3, 6);
  expect_close(weights, others, 2e-5);
}

// Both ways. The class that loads has other options.
template <class Ours, class Torchs, class OurOptions, class TorchsOptions>
void expect_goes_on_both_ways(const OurOptions& ours, const TorchsOptions& torchs) {
  for (const int steps : {0, 3}) {
    expect_goes_on<Torchs, Ours>(torchs, OurOptions(0.5), steps);
    expect_goes_on<Ours, Torchs>(ours, TorchsOptions(0.5), steps);
  }
}

template <class Options>
Options adam_options(bool amsgrad) {
  return Options(0.02).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1).amsgrad(amsgrad);
}

TEST(TorchsArchiveTest, Adam) {
  for (const bool amsgrad : {false, true}) {
    expect_goes_on_both_ways<Adam, torch::optim::Adam>(adam_options<AdamOptions>(amsgrad),
                                                       adam_options<torch::optim::AdamOptions>(amsgrad));
  }
}

TEST(TorchsArchiveTest, AdamW) {
  for (const bool amsgrad : {false, true}) {
    expect_goes_on_both_ways<AdamW, torch::optim::AdamW>(adam_options<AdamWOptions>(amsgrad),
                                                         adam_options<torch::optim::AdamWOptions>(amsgrad));
  }
}

template <class Options>
Options sgd_options(double momentum, double dampening) {
  return Options(0.02).momentum(momentum).dampening(dampening).weight_decay(0.1);
}

TEST(TorchsArchiveTest, SGD) {
  for (const double momentum : {0.0, 0.8}) {
    for (const double dampening : {0.0, 0.5}) {
      expect_goes_on_both_ways<SGD, torch::optim::SGD>(
          sgd_options<SGDOptions>(momentum, dampening),
          sgd_options<torch::optim::SGDOptions>(momentum, dampening));
    }
  }
}

template <class Options>
Options adagrad_options() {
  return Options(0.1).lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(0.5);
}

TEST(TorchsArchiveTest, Adagrad) {
  const auto ours = adagrad_options<AdagradOptions>();
  const auto torchs = adagrad_options<torch::optim::AdagradOptions>();
  for (const int steps : {0, 3}) {
    expect_goes_on<torch::optim::Adagrad, Adagrad>(torchs, AdagradOptions(0.5), steps);
  }
  // Before the first step torch's class has states already, which an archive without any leaves alone.
  expect_goes_on<Adagrad, torch::optim::Adagrad>(ours, torch::optim::AdagradOptions(0.5), 3);
}

template <class Options>
Options rmsprop_options(double momentum, bool centered) {
  return Options(0.02).alpha(0.9).eps(1e-6).weight_decay(0.1).momentum(momentum).centered(centered);
}

TEST(TorchsArchiveTest, RMSprop) {
  for (const double momentum : {0.0, 0.5}) {
    for (const bool centered : {false, true}) {
      expect_goes_on_both_ways<RMSprop, torch::optim::RMSprop>(
          rmsprop_options<RMSpropOptions>(momentum, centered),
          rmsprop_options<torch::optim::RMSpropOptions>(momentum, centered));
    }
  }
}

TEST(TorchsArchiveTest, OptionsThatItLacksStay) {
  const Tensors weights = make_weights();
  SGD optimizer(weights, SGDOptions(0.5).momentum(0.25).maximize(true).max_grad_norm(3).state_dtype("int8"));
  hand_over(torch::optim::SGD(weights, torch::optim::SGDOptions(0.125).dampening(0.5)), optimizer);
  EXPECT_TRUE(static_cast<const SGDOptions&>(optimizer.param_groups()[0].options()) ==
              SGDOptions(0.125).dampening(0.5).maximize(true).max_grad_norm(3).state_dtype("int8"));
}

// ---- Archives of others ---------------------------------------------------------------------------------

template <class Row>
class ArchiveTest : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(1); }

  using Optimizer = typename Row::Optimizer;
  using Options = typename Row::Options;
  using State = typename Row::State;

  static const Options& options_of(const Optimizer& optimizer) {
    return static_cast<const Options&>(optimizer.param_groups()[0].options());
  }
  static State& state_of(Optimizer& optimizer, const Tensor& weight) {
    return static_cast<State&>(*optimizer.state().at(weight.unsafeGetTensorImpl()));
  }
};

TYPED_TEST_SUITE(ArchiveTest, Rows, RowName);

TYPED_TEST(ArchiveTest, OfAnotherClassOfTorchIsRefused) {
  using Optimizer = typename TypeParam::Optimizer;
  const Tensors weights = make_weights();
  Optimizer optimizer(weights, TypeParam::options());
  const auto expect_refusal = [&](const auto& from, const char* unknown) {
    const std::string text = std::string("group 0 of the archive has ") + unknown +
                             ": it is not one of fusedstep::optim::" + name_of<TypeParam>();
    EXPECT_EQ(error_of([&] { hand_over(from, optimizer); }), text);
    EXPECT_TRUE(this->options_of(optimizer) == TypeParam::options());
  };
  using Options = typename TypeParam::Options;
  std::string unknown;
  for (const char* name : {"momentum", "dampening", "weight_decay", "nesterov"}) {
    if (!Options::has_option(name)) unknown += (unknown.empty() ? "" : ", ") + std::string(name);
  }
  if (!unknown.empty()) expect_refusal(torch::optim::SGD(weights, 0.125), unknown.c_str());
  unknown.clear();
  for (const char* name : {"betas", "eps", "weight_decay", "amsgrad"}) {
    if (!Options::has_option(name)) unknown += (unknown.empty() ? "" : ", ") + std::string(name);
  }
  if (!unknown.empty()) expect_refusal(torch::optim::Adam(weights, 0.125), unknown.c_str());
  constexpr bool is_adam = std::is_same_v<Optimizer, Adam> || std::is_same_v<Optimizer, AdamW>;
  EXPECT_EQ(unknown.empty(), is_adam);
}

// An archive of one group without states, that has a rate or no option at all.
std::string archive_with_rate(bool has_rate, size_t params) {
  torch::serialize::OutputArchive archive;
  torch::serialize::OutputArchive groups(archive.compilation_unit()), group(archive.compilation_unit()),
      options(archive.compilation_unit()), states(archive.compilation_unit());
  if (has_rate) options.write("lr", torch::IValue(0.125));
  group.write("params/size", torch::tensor(static_cast<int64_t>(params)));
  for (size_t i = 0; i < params; ++i) {
    group.write("params/" + std::to_string(i), torch::IValue(std::to_string(i)));
  }
  group.write("options", options);
  groups.write("param_groups/size", torch::tensor(int64_t{1}));
  groups.write("param_groups/0", group);
  archive.write("state", states);
  archive.write("param_groups", groups);
  std::ostringstream file;
  archive.save_to(file);
  return file.str();
}

TYPED_TEST(ArchiveTest, OptionsThatItLacksStayButForTheRate) {
  const Tensors weights = make_weights();
  typename TypeParam::Optimizer optimizer(weights, TypeParam::options());
  const auto load = [&](bool has_rate, size_t params) {
    std::istringstream file(archive_with_rate(has_rate, params));
    torch::load(optimizer, file);
  };
  load(true, weights.size());
  auto expected = TypeParam::options();
  EXPECT_TRUE(this->options_of(optimizer) == expected.lr(0.125));
  EXPECT_EQ(error_of([&] { load(false, weights.size()); }),
            "group 0 of the archive has no lr: it is not one of fusedstep::optim::" + name_of<TypeParam>());
  EXPECT_EQ(error_of([&] { load(true, 1); }),
            "group 0 of the archive has 1 parameters, but that of the optimizer has 5");
  EXPECT_TRUE(this->options_of(optimizer) == expected);
}

// ---- States ---------------------------------------------------------------------------------------------

TYPED_TEST(ArchiveTest, StatesAreCastToTheirWeights) {
  using State = typename TypeParam::State;
  struct Row {
    const char* what;
    torch::Dtype weight;
    void (*change)(State& state);
    torch::Dtype expected;
  };
  const Row rows[] = {
      {"double for float", torch::kFloat32, [](State& s) { s.slot(0, s.slot(0).to(torch::kFloat64)); },
       torch::kFloat32},
      {"float for double", torch::kFloat64, [](State& s) { s.slot(0, s.slot(0).to(torch::kFloat32)); },
       torch::kFloat64},
      {"bfloat16 for float", torch::kFloat32, [](State& s) { s.slot(0, s.slot(0).to(torch::kBFloat16)); },
       torch::kFloat32},
      {"half for bfloat16", torch::kBFloat16, [](State& s) { s.slot(0, s.slot(0).to(torch::kFloat16)); },
       torch::kBFloat16},
      {"float for bfloat16", torch::kBFloat16, [](State& s) { s.slot(0, s.slot(0).to(torch::kFloat32)); },
       torch::kFloat32},
      {"expanded", torch::kFloat32, [](State& s) { s.slot(0, torch::ones({}).expand(s.slot(0).sizes())); },
       torch::kFloat32},
      {"a step of int64", torch::kFloat32, [](State& s) { s.step(torch::tensor(int64_t{3})); },
       torch::kFloat32},
      {"a step of float64", torch::kFloat32, [](State& s) { s.step(torch::tensor({2.5}, torch::kFloat64)); },
       torch::kFloat32},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.what);
    const Tensors weights = make_weights(row.weight), others = clones(weights);
    typename TypeParam::Optimizer saved(weights, TypeParam::options()), loaded(others, TypeParam::options());
    take_steps(saved, weights, 0, 3);
    for (size_t i = 0; i < weights.size(); ++i) others[i].set_data(weights[i].detach().clone());
    for (const Tensor& weight : weights) row.change(this->state_of(saved, weight));
    hand_over(saved, loaded);
    // What the step before would have to be.
    for (const Tensor& weight : weights) {
      State& state = this->state_of(saved, weight);
      for (size_t k = 0; k < std::size(State::kStates); ++k) {
        if (state.slot(k).defined()) state.slot(k, state.slot(k).to(row.expected).contiguous().clone());
      }
      state.step(state.step().to(torch::kFloat32).squeeze());
    }
    for (const Tensor& weight : others) {
      EXPECT_EQ(this->state_of(loaded, weight).slot(0).dtype(), row.expected);
    }
    take_steps(saved, weights, 3, 5);
    take_steps(loaded, others, 3, 5);
    expect_equal(weights, others);
  }
}

TYPED_TEST(ArchiveTest, GoesOnAfterAChangeOfTheModelsDtype) {
  const Tensors weights = make_weights();
  typename TypeParam::Optimizer optimizer(weights, TypeParam::options());
  take_steps(optimizer, weights, 0, 2);
  for (const Tensor& weight : weights) {
    weight.mutable_grad() = Tensor();
    weight.set_data(weight.detach().to(torch::kFloat64));
  }
  hand_over(optimizer, optimizer);
  take_steps(optimizer, weights, 2, 3);
  EXPECT_EQ(this->state_of(optimizer, weights[0]).slot(0).dtype(), torch::kFloat64);
  EXPECT_EQ(this->state_of(optimizer, weights[0]).step().template item<float>(), 3);
}

// Elements beyond its memory, by no operator of torch.
Tensor beyond(const Tensor& tensor, int64_t offset, int64_t stride) {
  const Tensor found = tensor.clone();
  found.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride != 1) {
    found.unsafeGetTensorImpl()->set_sizes_and_strides({17, 5}, at::IntArrayRef({5 * stride, stride}));
  }
  return found;
}

// Whatever is wrong with one state, an optimizer that refuses its archive goes on as it was.
TYPED_TEST(ArchiveTest, AStateThatNoStepTakesIsRefused) {
  using State = typename TypeParam::State;
  struct Row {
    const char* what;
    void (*spoil)(State& state);
    const char* text;
  };
  const Row rows[] = {
      {"steps", [](State& s) { s.step(torch::ones({2})); },
       "step of parameter 0 of group 0 must be one number, not a tensor of float32 of the shape [2]"},
      {"no step", [](State& s) { s.step(torch::ones({0})); }, "must be one number"},
      {"no count", [](State& s) { s.step(Tensor()); }, "step of parameter 0 of group 0 is missing"},
      {"negative", [](State& s) { s.step(torch::tensor(-5.0)); }, "must be finite and at least 0, not -5"},
      {"NaN", [](State& s) { s.step(torch::tensor(std::nan(""))); },
       "must be finite and at least 0, not nan"},
      {"int64", [](State& s) { s.slot(0, s.slot(0).to(torch::kInt64)); },
       " of parameter 0 of group 0 must be floating-point numbers or codes, not int64"},
      {"bool", [](State& s) { s.slot(0, s.slot(0).to(torch::kBool)); }, "must be floating-point numbers"},
      {"complex", [](State& s) { s.slot(0, s.slot(0).to(torch::kComplexFloat)); },
       "must be floating-point numbers"},
      {"sparse", [](State& s) { s.slot(0, s.slot(0).to_sparse()); }, "must be a dense tensor with values"},
      {"shape",
       [](State& s) {
         s.slot(0, torch::zeros({5, 17}));
       },
       "has the shape [5, 17], but the weight has [17, 5]"},
      {"offset", [](State& s) { s.slot(0, beyond(s.slot(0), 1, 1)); }, "ends outside of its memory"},
      {"far offset", [](State& s) { s.slot(0, beyond(s.slot(0), 1 << 20, 1)); },
       "ends outside of its memory"},
      {"strides", [](State& s) { s.slot(0, beyond(s.slot(0), 0, int64_t{1} << 58)); },
       "ends outside of its memory"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.what);
    // An archive of torch's SGD has no count.
    if (std::is_same_v<State, SGDParamState> && row.what == std::string("no count")) continue;
    const Tensors weights = make_weights(), others = clones(weights), twins = clones(weights);
    auto other = TypeParam::options();
    typename TypeParam::Optimizer saved(weights, other.lr(0.5)), optimizer(others, TypeParam::options()),
        twin(twins, TypeParam::options());
    take_steps(saved, weights, 0, 1);
    take_steps(optimizer, others, 0, 2);
    take_steps(twin, twins, 0, 2);
    row.spoil(this->state_of(saved, weights[0]));
    const std::string error = error_of([&] { hand_over(saved, optimizer); });
    EXPECT_NE(error.find(row.text), std::string::npos) << error;
    EXPECT_TRUE(this->options_of(optimizer) == TypeParam::options());
    take_steps(optimizer, others, 2, 3);
    take_steps(twin, twins, 2, 3);
    expect_equal(others, twins);
  }
}

// Steps of one would be another's.
TYPED_TEST(ArchiveTest, TwoOptimizersThatLoadOneArchiveShareNothing) {
  for (const char* const storage : {"", "float32", "split", "int8"}) {
    const bool is_numbers = storage != std::string("int8");
    auto options = TypeParam::options();
    options.state_dtype(is_numbers ? "" : storage).master_weights(is_numbers ? storage : "");
    const Tensors weights = {torch::randn({64, 64}, torch::kBFloat16)};
    typename TypeParam::Optimizer saved(weights, options), first(weights, options), second(weights, options);
    take_steps(saved, weights, 0, 1);
    torch::serialize::OutputArchive written;
    saved.save(written);
    std::stringstream file;
    written.save_to(file);
    torch::serialize::InputArchive archive;
    archive.load_from(file);
    first.load(archive);
    second.load(archive);
    const auto &one = this->state_of(first, weights[0]), &other = this->state_of(second, weights[0]);
    const auto expect_apart = [&](const Tensor& a, const Tensor& b) {
      EXPECT_EQ(a.defined(), b.defined());
      EXPECT_TRUE(!a.defined() || !a.is_alias_of(b)) << storage;
    };
    for (size_t k = 0; k < std::size(TypeParam::State::kNumbers); ++k) {
      expect_apart(one.number(k), other.number(k));
    }
    for (size_t k = 0; k < std::size(TypeParam::State::kStates); ++k) {
      expect_apart(one.slot(k), other.slot(k));
      expect_apart(one.absmax(k), other.absmax(k));
    }
    expect_apart(one.master_param(), other.master_param());
    expect_apart(one.low_param(), other.low_param());
  }
}

}  // namespace
}  // namespace fusedstep::optim
