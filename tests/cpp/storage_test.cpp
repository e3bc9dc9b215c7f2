// Law: the options that say how states and weights are stored do what they do in Python, in every class: here
// what a program sees of them. tests/test_cpp.py compares the bits.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/optim_cases.h"

namespace fusedstep::optim {
namespace {

using torch::optim::OptimizerParamGroup;

// Options of storage, and the dtype of the weights that they are for.
struct StorageCase {
  const char* name;
  torch::Dtype dtype;
  const char *state_dtype, *master_weights, *rounding;
  int64_t seed;

  template <class Options>
  Options on(Options options) const {
    return options.state_dtype(state_dtype).master_weights(master_weights).rounding(rounding).seed(seed);
  }
};
const StorageCase kCases[] = {
    {"int8", torch::kFloat32, "int8", "", "", 0},
    {"int4", torch::kFloat32, "int4", "", "", 0},
    {"fp8", torch::kFloat32, "fp8", "", "", 0},
    {"wide", torch::kBFloat16, "float32", "", "", 0},
    {"masters", torch::kBFloat16, "", "float32", "", 0},
    {"split", torch::kBFloat16, "", "split", "", 0},
    {"kahan", torch::kFloat16, "", "", "kahan", 0},
    {"stochastic", torch::kBFloat16, "", "", "stochastic", 5},
    {"split, int8", torch::kBFloat16, "int8", "split", "", 0},
    {"stochastic, fp8", torch::kBFloat16, "fp8", "", "stochastic", 5},
};

// The second is too small for codes.
Tensors large_weights(torch::Dtype dtype = torch::kFloat32) {
  return {torch::randn({66, 65}, dtype).requires_grad_(), torch::randn({9, 7}, dtype).requires_grad_(),
          torch::randn({4096}, dtype).requires_grad_()};
}

template <class Row>
typename Row::State& state_of(typename Row::Optimizer& optimizer, const Tensor& weight) {
  return static_cast<typename Row::State&>(*optimizer.state().at(weight.unsafeGetTensorImpl()));
}

// Copies of all weights and states of an optimizer, with the step counts.
template <class Row>
Tensors contents(typename Row::Optimizer& optimizer, const Tensors& weights) {
  Tensors found = clones(weights);
  const auto add = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    const bool is_float8 = tensor.scalar_type() == torch::kFloat8_e4m3fn;
    found.push_back((is_float8 ? tensor.view(torch::kUInt8) : tensor).clone());
  };
  for (const Tensor& weight : weights) {
    const typename Row::State& state = state_of<Row>(optimizer, weight);
    add(state.step());
    for (size_t k = 0; k < std::size(Row::State::kStates); ++k) {
      add(state.slot(k));
      add(state.absmax(k));
    }
    for (const Tensor& beside : {state.master_param(), state.low_param(), state.compensation()}) add(beside);
  }
  return found;
}

template <class Row>
class StorageTest : public testing::Test {
 protected:
  using Optimizer = typename Row::Optimizer;
  using Options = typename Row::Options;

  void SetUp() override { torch::manual_seed(1); }
};

TYPED_TEST_SUITE(StorageTest, Rows, RowName);

// ---- Options --------------------------------------------------------------------------------------------

TYPED_TEST(StorageTest, OptionsThatAreNoneAreRefused) {
  using Options = typename TypeParam::Options;
  const auto refusal = [](const Options& options) {
    return error_of([&] { typename TypeParam::Optimizer optimizer(Tensors{torch::ones(3)}, options); });
  };
  const auto options = [] { return TypeParam::options(); };
  EXPECT_EQ(refusal(options().state_dtype("int9")),
            "state_dtype must be '', 'float32' or one of 'int8', 'int4', 'fp8', not 'int9'");
  EXPECT_EQ(refusal(options().master_weights("half")),
            "master_weights must be '', 'float32' or 'split', not 'half'");
  EXPECT_EQ(refusal(options().rounding("up")), "rounding must be '', 'stochastic' or 'kahan', not 'up'");
  EXPECT_EQ(refusal(options().master_weights("split").rounding("kahan")),
            "master_weights='split' and rounding='kahan' exclude each other: each keeps what a 16-bit weight "
            "cannot hold");
  EXPECT_EQ(refusal(options().seed(-1)), "seed must be an int from 0 to 2**63 - 1, not -1");
  EXPECT_EQ(refusal(options().state_dtype("fp8").master_weights("split").seed(1)), "no error");
}

TYPED_TEST(StorageTest, WhatIsForBfloat16OnlyIsRefusedForFloat16) {
  using Options = typename TypeParam::Options;
  const std::pair<Options, std::string> rows[] = {
      {TypeParam::options().master_weights("split"), "master_weights='split'"},
      {TypeParam::options().rounding("stochastic"), "rounding='stochastic'"}};
  for (const auto& [options, name] : rows) {
    const std::string text =
        "parameter 0 of group 0: " + name + " takes bfloat16 weights, but one is float16";
    const Tensors weights = large_weights(torch::kFloat16), before = clones(weights);
    EXPECT_EQ(error_of([&] { typename TypeParam::Optimizer optimizer(weights, options); }), text);
    typename TypeParam::Optimizer optimizer(std::vector<OptimizerParamGroup>{}, TypeParam::options());
    OptimizerParamGroup group(weights, std::make_unique<Options>(options));
    EXPECT_EQ(error_of([&] { optimizer.add_param_group(group); }), text);
    EXPECT_TRUE(optimizer.param_groups().empty());
    optimizer.param_groups().push_back(group);
    set_grads(weights, 0);
    EXPECT_EQ(error_of([&] { optimizer.step(); }), text);
    expect_equal(weights, before);
  }
}

// An option of a group that became wrong is found before any group is stepped.
TYPED_TEST(StorageTest, AWrongOptionOfAGroupChangesNothing) {
  const Tensors weights = large_weights();
  typename TypeParam::Optimizer optimizer(
      {OptimizerParamGroup({weights[0]}), OptimizerParamGroup({weights[1]})}, TypeParam::options());
  take_steps(optimizer, {weights[0], weights[1]}, 0, 1);
  const Tensors before = contents<TypeParam>(optimizer, {weights[0], weights[1]});
  static_cast<typename TypeParam::Options&>(optimizer.param_groups()[1].options()).rounding("down");
  const std::string error = error_of([&] { optimizer.step(); });
  EXPECT_NE(error.find("not 'down'"), std::string::npos) << error;
  expect_equal(contents<TypeParam>(optimizer, {weights[0], weights[1]}), before);
}

// ---- States ---------------------------------------------------------------------------------------------

TYPED_TEST(StorageTest, LargeWeightsHaveCodesAndOthersNumbers) {
  using Sizes = std::vector<int64_t>;
  struct Row {
    const char* kind;
    torch::Dtype dtype;
    Sizes codes, absmax;  // of 66 x 65 elements, and of 16 x 256
    Sizes codes_of_rows, absmax_of_rows;
  };
  const Row rows[] = {
      {"int8", torch::kUInt8, {66, 65}, {17}, {16, 256}, {16, 1}},
      {"int4", torch::kUInt8, {2145}, {34}, {16, 128}, {16, 2}},
      {"fp8", torch::kFloat8_e4m3fn, {66, 65}, {17}, {16, 256}, {16, 1}},
  };
  for (const Row& row : rows) {
    const Tensors weights = {torch::randn({66, 65}).requires_grad_(),
                             torch::randn({16, 256}).requires_grad_(), torch::randn({4095}).requires_grad_(),
                             torch::randn({5000}, torch::kFloat64).requires_grad_()};
    typename TypeParam::Optimizer optimizer(weights, TypeParam::options().state_dtype(row.kind));
    take_steps(optimizer, weights, 0, 2);
    const auto expect = [&](size_t i, torch::Dtype dtype, const Sizes& sizes, const Sizes& absmax) {
      const typename TypeParam::State& state = state_of<TypeParam>(optimizer, weights[i]);
      EXPECT_EQ(state.slot(0).dtype(), dtype);
      EXPECT_EQ(state.slot(0).sizes(), at::IntArrayRef(sizes));
      EXPECT_EQ(state.absmax(0).defined(), !absmax.empty());
      if (absmax.empty()) return;
      EXPECT_EQ(state.absmax(0).sizes(), at::IntArrayRef(absmax));
    };
    expect(0, row.dtype, row.codes, row.absmax);
    expect(1, row.dtype, row.codes_of_rows, row.absmax_of_rows);
    expect(2, torch::kFloat32, {4095}, {});
    expect(3, torch::kFloat64, {5000}, {});
  }
}

TYPED_TEST(StorageTest, GroupsHaveAStorageOfTheirOwn) {
  const auto plain = TypeParam::options();
  for (const StorageCase& other : kCases) {
    if (std::string(other.rounding) == "stochastic") continue;  // its random numbers are of a place
    SCOPED_TRACE(other.name);
    const Tensors first = large_weights(), second = large_weights(other.dtype);
    const Tensors first_alone = clones(first), second_alone = clones(second);
    typename TypeParam::Optimizer optimizer(first, plain);
    optimizer.add_param_group(
        OptimizerParamGroup(second, std::make_unique<typename TypeParam::Options>(other.on(plain))));
    typename TypeParam::Optimizer of_first(first_alone, plain), of_second(second_alone, other.on(plain));
    for (uint64_t step = 0; step < 3; ++step) {
      for (const Tensors* weights : {&first, &second, &first_alone, &second_alone}) set_grads(*weights, step);
      optimizer.step();
      of_first.step();
      of_second.step();
    }
    expect_equal(first, first_alone);
    expect_equal(second, second_alone);
  }
}

// Weights of one group that keep their values and others that have no need to.
TYPED_TEST(StorageTest, AGroupMayHaveWeightsOfSeveralDtypes) {
  const auto options = TypeParam::options().master_weights("split");
  const Tensors narrow = large_weights(torch::kBFloat16), wide = large_weights();
  const Tensors narrow_alone = clones(narrow), wide_alone = clones(wide);
  typename TypeParam::Optimizer optimizer({wide[0], narrow[0], wide[1], narrow[1]}, options);
  typename TypeParam::Optimizer of_narrow({narrow_alone[0], narrow_alone[1]}, options);
  typename TypeParam::Optimizer of_wide({wide_alone[0], wide_alone[1]}, options);
  for (uint64_t step = 0; step < 3; ++step) {
    for (const Tensors* weights : {&narrow, &wide, &narrow_alone, &wide_alone}) set_grads(*weights, step);
    optimizer.step();
    of_narrow.step();
    of_wide.step();
  }
  expect_equal(narrow, narrow_alone);
  expect_equal(wide, wide_alone);
  EXPECT_TRUE(state_of<TypeParam>(optimizer, narrow[0]).low_param().defined());
  EXPECT_FALSE(state_of<TypeParam>(optimizer, wide[0]).low_param().defined());
}

TEST(AdagradTest, ASparseGradientAndStatesInCodesExcludeEachOther) {
  const Tensors weights = {torch::ones({100, 64}).requires_grad_()}, before = clones(weights);
  Adagrad optimizer(weights, AdagradOptions(0.1).state_dtype("int8"));
  weights[0].mutable_grad() =
      torch::sparse_coo_tensor(torch::tensor({{3, 1}}), torch::ones({2, 64}), weights[0].sizes());
  const std::string error = error_of([&] { optimizer.step(); });
  EXPECT_NE(error.find("a state is quantised; leave state_dtype out for its group"), std::string::npos)
      << error;
  expect_equal(weights, before);
}

// ---- Values ---------------------------------------------------------------------------------------------

// 200 steps of 1e-3 take 1 to 0.8; a bfloat16 weight alone stays where it is.
TEST(ValueTest, SmallStepsOfA16BitWeightAddUp) {
  struct Row {
    const char *master_weights, *rounding;
    double expected;
  };
  for (const Row& row : {Row{"", "", 1}, Row{"float32", "", 0.8}, Row{"split", "", 0.8},
                         Row{"", "kahan", 0.8}, Row{"", "stochastic", 0.8}}) {
    const Tensor weight = torch::ones({10000}, torch::kBFloat16).requires_grad_();
    AdamW optimizer(
        {weight},
        AdamWOptions(1e-3).weight_decay(0).master_weights(row.master_weights).rounding(row.rounding));
    for (int step = 0; step < 200; ++step) {
      weight.mutable_grad() = torch::ones_like(weight);
      optimizer.step();
    }
    EXPECT_NEAR(weight.to(torch::kFloat64).mean().item<double>(), row.expected, row.expected == 1 ? 0 : 0.004)
        << row.master_weights << row.rounding;
  }
}

// float32 has the integers up to 2^24. With the same random numbers at each step few weights would move.
TEST(ValueTest, RandomNumbersGoOnPastTheIntegersOfFloat32) {
  const Tensor weight = torch::ones({1000}, torch::kBFloat16).requires_grad_();
  AdamW optimizer({weight}, AdamWOptions(1e-3).weight_decay(0).rounding("stochastic"));
  const auto take = [&](int steps) {
    for (int step = 0; step < steps; ++step) {
      weight.mutable_grad() = torch::ones_like(weight);
      optimizer.step();
    }
  };
  take(1);
  const auto state = [&]() -> AdamWParamState& { return state_of<AdamWRow>(optimizer, weight); };
  for (const bool is_replaced : {false, true}) {
    if (is_replaced) {
      state().step(int64_t{1} << 24);
    } else {
      state().step().fill_(1 << 24);
    }
    {
      const torch::NoGradGuard guard;
      weight.fill_(1);
    }
    take(30);
    EXPECT_GT(weight.lt(1).sum().item<int64_t>(), 990);
  }
}

TEST(ValueTest, AMomentumThatComesLaterBeginsWithItsFirstStep) {
  for (const char* rounding : {"", "stochastic"}) {
    const Tensor weight = torch::ones({4}, torch::kBFloat16).requires_grad_();
    SGD optimizer({weight}, SGDOptions(0.5).dampening(0.5).rounding(rounding));
    for (const double momentum : {0.0, 0.0, 0.5}) {
      static_cast<SGDOptions&>(optimizer.param_groups()[0].options()).momentum(momentum);
      weight.mutable_grad() = torch::ones_like(weight);
      optimizer.step();
    }
    const Tensor& buffer = state_of<SGDRow>(optimizer, weight).momentum_buffer();
    EXPECT_TRUE(torch::equal(buffer, torch::ones_like(weight))) << rounding;
  }
}

TYPED_TEST(StorageTest, RandomNumbersFollowFromTheSeed) {
  const Tensors weights = large_weights(torch::kBFloat16), same = clones(weights), other = clones(weights);
  const auto options = TypeParam::options().rounding("stochastic");
  const auto step = [&](const Tensors& of, int64_t seed) {
    auto seeded = options;
    typename TypeParam::Optimizer optimizer(of, seeded.seed(seed));
    take_steps(optimizer, of, 0, 3);
  };
  step(weights, 1);
  step(same, 1);
  step(other, 2);
  expect_equal(weights, same);
  EXPECT_FALSE(torch::equal(weights[0], other[0]));
}

// The next step after a change of the seed has the random numbers of the new one.
TYPED_TEST(StorageTest, AnotherSeedCountsFromTheNextStepOn) {
  const Tensors weights = large_weights(torch::kBFloat16), same = clones(weights);
  auto options = TypeParam::options().rounding("stochastic").seed(1);
  typename TypeParam::Optimizer optimizer(weights, options), twin(same, options);
  take_steps(optimizer, weights, 0, 2);
  take_steps(twin, same, 0, 2);
  static_cast<typename TypeParam::Options&>(optimizer.param_groups()[0].options()).seed(2);
  take_steps(optimizer, weights, 2, 3);
  take_steps(twin, same, 2, 3);
  EXPECT_FALSE(torch::equal(weights[0], same[0]));
}

TEST(AdanTest, ARestartOfStatesInCodesIsAFirstStep) {
  for (const char* kind : {"int8", "int4", "fp8"}) {
    const Tensors weights = large_weights();
    const auto options = AdanRow::options().state_dtype(kind);
    Adan adan(weights, options);
    take_steps(adan, weights, 0, 3);
    adan.restart_opt();
    const Tensors twins = clones(weights);
    Adan fresh(twins, options);
    take_steps(adan, weights, 3, 5);
    take_steps(fresh, twins, 3, 5);
    expect_equal(contents<AdanRow>(adan, weights), contents<AdanRow>(fresh, twins));
  }
}

// ---- Archives -------------------------------------------------------------------------------------------

template <class Optimizer>
std::string archive_of(const Optimizer& optimizer) {
  std::ostringstream file;
  torch::save(optimizer, file);
  return file.str();
}

template <class Optimizer>
void load_archive(Optimizer& optimizer, const std::string& archive) {
  std::istringstream file(archive);
  torch::load(optimizer, file);
}

TYPED_TEST(StorageTest, SavedAndLoadedGivesTheSameBits) {
  for (const StorageCase& storage : kCases) {
    SCOPED_TRACE(storage.name);
    const Tensors weights = large_weights(storage.dtype);
    const auto options = storage.on(TypeParam::options());
    typename TypeParam::Optimizer optimizer(weights, options);
    take_steps(optimizer, weights, 0, 3);
    const Tensors resumed = clones(weights);
    typename TypeParam::Optimizer loaded(resumed, typename TypeParam::Options(0.5));
    load_archive(loaded, archive_of(optimizer));
    EXPECT_TRUE(static_cast<const typename TypeParam::Options&>(loaded.param_groups()[0].options()) ==
                options);
    expect_equal(contents<TypeParam>(loaded, resumed), contents<TypeParam>(optimizer, weights));
    take_steps(optimizer, weights, 3, 6);
    take_steps(loaded, resumed, 3, 6);
    expect_equal(contents<TypeParam>(loaded, resumed), contents<TypeParam>(optimizer, weights));
  }
}

// An archive without the options is of the storage that the optimizer was made with, and its states become
// so.
TYPED_TEST(StorageTest, AnArchiveOfNumbersIsConverted) {
  const Tensors weights = large_weights();
  typename TypeParam::Optimizer optimizer(weights, TypeParam::options());
  take_steps(optimizer, weights, 0, 3);
  const Tensors resumed = clones(weights);
  typename TypeParam::Optimizer loaded(resumed, TypeParam::options().state_dtype("int8"));
  load_archive(loaded, archive_of(optimizer));
  const auto& options = static_cast<const typename TypeParam::Options&>(loaded.param_groups()[0].options());
  EXPECT_EQ(options.state_dtype(), "int8");
  const typename TypeParam::State& state = state_of<TypeParam>(loaded, resumed[0]);
  ASSERT_EQ(state.slot(0).dtype(), torch::kUInt8);
  const Tensor before = state_of<TypeParam>(optimizer, weights[0]).slot(0);
  const Tensor after =
      detail::decode(state.slot(0), state.absmax(0), resumed[0], TypeParam::State::is_signed(0));
  // The levels of the map are at most a 64th of the absmax apart.
  EXPECT_LE((before - after).abs().max().template item<double>(),
            before.abs().max().template item<double>() / 64);
  EXPECT_EQ(state_of<TypeParam>(loaded, resumed[1]).slot(0).dtype(), torch::kFloat32);
  EXPECT_EQ(state.step().template item<float>(), 3);
}

// Whatever is wrong with one state, an optimizer that refuses its archive is as it was.
TYPED_TEST(StorageTest, AnArchiveThatDoesNotFitChangesNothing) {
  using State = typename TypeParam::State;
  struct Row {
    const char* what;
    void (*spoil)(State& state);
    const char* text;
  };
  const Row rows[] = {
      {"no absmax", [](State& s) { s.absmax(0, Tensor()); }, "must be a dense tensor, since it has codes"},
      {"absmax", [](State& s) { s.absmax(0, torch::zeros({16})); }, "has 16 numbers, of the shape [16]"},
      {"codes",
       [](State& s) {
         s.slot(0, torch::zeros({65, 66}, torch::kUInt8));
       },
       "has codes of the shape"},
      {"numbers",
       [](State& s) {
         s.slot(0, torch::zeros({65, 66}));
       },
       "has the shape [65, 66]"},
      {"low",
       [](State& s) {
         s.beside(detail::Way::kSplit, torch::zeros({66, 65}));
       },
       "must be int16, not"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.what);
    const auto options = TypeParam::options().state_dtype("int8").master_weights("split");
    const Tensors weights = large_weights(torch::kBFloat16), others = clones(weights),
                  twins = clones(weights);
    typename TypeParam::Optimizer saved(weights, TypeParam::options().state_dtype("int8").maximize(true)),
        optimizer(others, options), twin(twins, options);
    take_steps(saved, weights, 0, 1);
    take_steps(optimizer, others, 0, 2);
    take_steps(twin, twins, 0, 2);
    row.spoil(state_of<TypeParam>(saved, weights[0]));
    const std::string archive = archive_of(saved);
    const std::string error = error_of([&] { load_archive(optimizer, archive); });
    EXPECT_NE(error.find(row.text), std::string::npos) << error;
    EXPECT_NE(error.find(" of parameter 0 of group 0"), std::string::npos) << error;
    EXPECT_TRUE(static_cast<const typename TypeParam::Options&>(optimizer.param_groups()[0].options()) ==
                options);
    take_steps(optimizer, others, 2, 3);
    take_steps(twin, twins, 2, 3);
    expect_equal(contents<TypeParam>(optimizer, others), contents<TypeParam>(twin, twins));
  }
}

}  // namespace
}  // namespace fusedstep::optim
