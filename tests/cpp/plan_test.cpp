// Plans: what they refuse, what they notice, how they cut the work.
#include "src/plan/plan.h"

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>

#include "src/core/reduction.h"
#include "tests/cpp/model.h"

namespace fusedstep::test {
namespace {

Case lamb(DType dtype = DType::kFloat) {
  for (const Case& each : two_phase_cases()) {
    if (each.rule.states == 2) return {each.rule, dtype};
  }
  throw std::logic_error("no two-phase rule with two states");
}

Tensor matrix(const Case& test_case, int64_t rows = 6, int64_t columns = 5) {
  return Tensor(test_case, {rows, columns}, Forms::all(dense({rows, columns})), /*seed=*/1);
}

// ---- Refusals -------------------------------------------------------------------------------------------

struct Refusal {
  const char* what;
  void (*spoil)(TensorOperands&);
  const char* text;
};

constexpr int64_t kOther[] = {5, 6}, kFlat[] = {30}, kZero[] = {0, 1}, kWindows[] = {1, 1};

const Refusal kRefusals[] = {
    {"a gradient of another shape", [](TensorOperands& o) { o.grad.sizes = kOther; },
     "tensor 1 of the list: the gradient's shape [5, 6] is not the weight's, [6, 5]"},
    {"a gradient of another rank",
     [](TensorOperands& o) {
       o.grad.sizes = kFlat;
       o.grad.strides = Dims(kWindows).first(1);
     },
     "tensor 1 of the list: the gradient's shape [30] is not the weight's, [6, 5]"},
    {"a gradient of another dtype", [](TensorOperands& o) { o.grad.dtype = DType::kDouble; },
     "tensor 1 of the list: the gradient is float64 but the weight is float32"},
    {"an expanded weight", [](TensorOperands& o) { o.weight.strides = kZero; },
     "tensor 1 of the list: the weight overlaps itself in memory (an expanded tensor?); clone() it first"},
    {"a weight of sliding windows", [](TensorOperands& o) { o.weight.strides = kWindows; },
     "tensor 1 of the list: the weight overlaps itself in memory (an expanded tensor?); clone() it first"},
    {"a state of another shape", [](TensorOperands& o) { o.states[0].sizes = kOther; },
     "tensor 1 of the list: a state's shape [5, 6] is not the weight's, [6, 5]"},
    {"the last state of another dtype", [](TensorOperands& o) { o.states[1].dtype = DType::kBFloat16; },
     "tensor 1 of the list: a state is bfloat16 but the weight is float32"},
    {"a state of half precision", [](TensorOperands& o) { o.states[0].dtype = DType::kHalf; },
     "tensor 1 of the list: a state is float16 but the weight is float32"},
    {"an expanded state", [](TensorOperands& o) { o.states[1].strides = kZero; },
     "tensor 1 of the list: a state overlaps itself in memory (an expanded tensor?); clone() it first"},
};

std::string refusal_of(Plan& plan, size_t i, const TensorOperands& operands) {
  try {
    plan.bind(i, operands);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(PlanTest, RefusalsNameTensorAndOperandAndChangeNothing) {
  for (const Refusal& refusal : kRefusals) {
    SCOPED_TRACE(refusal.what);
    Model model(lamb(), {matrix(lamb()), matrix(lamb())});
    model.fill_grads(1);
    model.step({});
    std::vector<Tensor> before = model.tensors();

    TensorOperands spoilt = model.tensors()[1].operands();
    refusal.spoil(spoilt);
    EXPECT_EQ(refusal_of(model.plan(), 1, spoilt), refusal.text);
    for (size_t t = 0; t < before.size(); ++t) {
      EXPECT_EQ(model.tensors()[t].weight.bytes(), before[t].weight.bytes());
      EXPECT_EQ(model.tensors()[t].grad.bytes(), before[t].grad.bytes());
      for (size_t k = 0; k < before[t].states.size(); ++k) {
        EXPECT_EQ(model.tensors()[t].states[k].bytes(), before[t].states[k].bytes());
      }
    }
    // The plan still describes what it did before.
    Model other(lamb(), before);
    other.step(2, {});
    run_step(model.plan(), lamb().rule.bound, std::vector<double>{2, 2}, {});
    for (size_t t = 0; t < before.size(); ++t) {
      EXPECT_EQ(model.tensors()[t].weight.first_difference(other.tensors()[t].weight), -1);
    }
  }
}

TEST(PlanTest, RefusesAFreshBadTensorToo) {
  for (const Refusal& refusal : kRefusals) {
    Tensor tensor = matrix(lamb());
    Plan plan(2, 2);
    TensorOperands spoilt = tensor.operands();
    refusal.spoil(spoilt);
    EXPECT_EQ(refusal_of(plan, 1, spoilt), refusal.text) << refusal.what;
  }
}

// ---- What changes between steps -------------------------------------------------------------------------

// A step of `now` by a plan that was made for `before` and has stepped it.
void expect_noticed(const Case& case_before, Tensor before, const Case& case_now, Tensor now) {
  Plan plan = case_now.plan(1);
  const double first = 1, second = 2;
  before.grad.fill(5);
  plan.bind(0, before.operands());
  run_step(plan, case_before.rule.bound, {&first, 1}, {});
  const Tensor stepped = before;

  now.grad.fill(6);
  Model fresh(case_now, {now});
  fresh.step(second, {.grads = GradUse::kScratch});
  plan.bind(0, now.operands());
  run_step(plan, case_now.rule.bound, {&second, 1}, {.grads = GradUse::kScratch});
  EXPECT_EQ(now.weight.first_difference(fresh.tensors()[0].weight), -1);
  EXPECT_EQ(now.grad.first_difference(fresh.tensors()[0].grad), -1);
  for (size_t k = 0; k < now.states.size(); ++k) {
    EXPECT_EQ(now.states[k].first_difference(fresh.tensors()[0].states[k]), -1);
  }
  EXPECT_TRUE(now.fill_untouched());
  EXPECT_EQ(before.weight.bytes(), stepped.weight.bytes());  // the old memory is left alone
  EXPECT_EQ(before.states[0].bytes(), stepped.states[0].bytes());
}

TEST(PlanTest, FollowsAGradient) {
  for (const GradUse use : {GradUse::kLeave, GradUse::kScratch}) {
    Tensor tensor = matrix(lamb());
    tensor.grad.fill(5);
    Tensor moved = tensor, bound_anew = tensor;
    for (Tensor* now : {&moved, &bound_anew}) {
      Plan plan(1, 2);
      Operand elsewhere = now->grad;
      plan.bind(0, now->operands());
      const double first = 1, second = 2;
      run_step(plan, lamb().rule.bound, {&first, 1}, {.grads = use});
      std::swap(now->grad, elsewhere);
      now->grad.fill(6);
      if (now == &moved) {
        plan.move_grad(0, now->operands().grad.data);
      } else {
        plan.bind(0, now->operands());
      }
      run_step(plan, lamb().rule.bound, {&second, 1}, {.grads = use});
    }
    EXPECT_EQ(moved.weight.first_difference(bound_anew.weight), -1);
    EXPECT_EQ(moved.grad.first_difference(bound_anew.grad), -1);
  }
}

TEST(PlanTest, NoticesNewAddresses) { expect_noticed(lamb(), matrix(lamb()), lamb(), matrix(lamb())); }

TEST(PlanTest, NoticesANewShape) {
  expect_noticed(lamb(), matrix(lamb(), 6, 5), lamb(), matrix(lamb(), 300, 7));
}

TEST(PlanTest, NoticesNewStrides) {
  const Sizes sizes = {6, 5};
  const Form slices = slice({9, 8}, {2, 1}, {1, 1});
  const Tensor sliced(lamb(), sizes, Forms::all(slices), /*seed=*/1, /*margin=*/8);
  const Tensor other_grad(lamb(), sizes, {dense(sizes), dense(sizes, {1, 0}), {dense(sizes)}}, /*seed=*/1);
  const Tensor other_states(lamb(), sizes, {dense(sizes), dense(sizes), {dense(sizes), slices}}, /*seed=*/1);
  const Tensor expanded_grad(lamb(), sizes, {dense(sizes), expanded(sizes, {0}), {dense(sizes)}}, /*seed=*/1);
  for (const Tensor& tensor : {sliced, other_grad, other_states, expanded_grad}) {
    expect_noticed(lamb(), matrix(lamb()), lamb(), tensor);
    expect_noticed(lamb(), tensor, lamb(), matrix(lamb()));
  }
}

TEST(PlanTest, NoticesANewDtype) {
  for (const DType before : kDTypes) {
    for (const DType now : kDTypes) {
      expect_noticed(lamb(before), matrix(lamb(before)), lamb(now), matrix(lamb(now)));
    }
  }
}

TEST(PlanTest, RefusesStatesOfTwoDtypes) {
  Tensor tensor = matrix({lamb().rule, DType::kBFloat16, DType::kFloat});
  Tensor other = matrix({lamb().rule, DType::kBFloat16});
  TensorOperands operands = tensor.operands();
  operands.states[1] = other.states[1].view();
  Plan plan(1, 2);
  EXPECT_THROW(plan.bind(0, operands), std::runtime_error);
}

// ---- Gradients that cannot hold an update ---------------------------------------------------------------

void find_aliasing_grads(Plan& plan) {
  Plan* const alone[] = {&plan};
  Plan::find_aliasing_grads(alone);
}

// Tensors of 8 floats; weights and gradients at these places of one buffer.
std::vector<bool> storable(const std::vector<std::array<int64_t, 2>>& places,
                           const int64_t (&grad_stride)[1]) {
  std::vector<float> memory(200), state(8);
  const int64_t sizes[1] = {8}, stride[1] = {1};
  Plan plan(places.size(), 1);
  for (size_t i = 0; i < places.size(); ++i) {
    const auto [weight, grad] = places[i];
    const TensorView state_view{state.data(), DType::kFloat, sizes, stride};
    plan.bind(i, {{&memory[weight], DType::kFloat, sizes, stride},
                  {&memory[grad], DType::kFloat, sizes, grad_stride},
                  {state_view}});
  }
  find_aliasing_grads(plan);
  std::vector<bool> result;
  for (size_t i = 0; i < places.size(); ++i) result.push_back(plan.grad_can_store(i));
  return result;
}

using Bools = std::vector<bool>;

TEST(AliasTest, GradientsInMemoryOfTheirOwnCanStore) {
  EXPECT_EQ(storable({{0, 8}, {16, 24}, {100, 50}}, {1}), Bools({true, true, true}));
}

TEST(AliasTest, SharedGradientsCannot) {
  EXPECT_EQ(storable({{0, 100}, {16, 100}, {32, 50}}, {1}), Bools({false, false, true}));    // the same
  EXPECT_EQ(storable({{0, 100}, {16, 107}, {32, 50}}, {1}), Bools({false, false, true}));    // by one element
  EXPECT_EQ(storable({{0, 100}, {16, 104}, {32, 108}}, {1}), Bools({false, false, false}));  // in a chain
}

TEST(AliasTest, GradientsOverWeightsCannot) {
  EXPECT_EQ(storable({{0, 16}, {16, 50}}, {1}), Bools({false, true}));  // another tensor's weight
  EXPECT_EQ(storable({{0, 0}, {16, 50}}, {1}), Bools({false, true}));   // its own
  EXPECT_EQ(storable({{0, 7}, {16, 50}}, {1}), Bools({false, true}));   // the end of its own
}

TEST(AliasTest, ExpandedGradientsCannot) { EXPECT_EQ(storable({{0, 100}}, {0}), Bools({false})); }

TEST(AliasTest, FoundAgainWhenAddressesChange) {
  const Case c = lamb();
  Tensor first = matrix(c), second = matrix(c);
  Plan plan(2, 2);
  TensorOperands shared = second.operands();
  shared.grad = first.grad.view();
  plan.bind(0, first.operands());
  for (const bool alias : {false, true, false}) {
    plan.bind(1, alias ? shared : second.operands());
    find_aliasing_grads(plan);
    EXPECT_EQ(plan.grad_can_store(0), !alias);
    EXPECT_EQ(plan.grad_can_store(1), !alias);
  }
}

TEST(AliasTest, SixteenBitGradientsCannot) {
  for (const DType dtype : kDTypes) {
    Tensor tensor = matrix(lamb(dtype));
    Plan plan(1, 2);
    plan.bind(0, tensor.operands());
    find_aliasing_grads(plan);
    EXPECT_EQ(plan.grad_can_store(0), dtype == DType::kFloat || dtype == DType::kDouble) << name(dtype);
  }
}

class TwoPhaseTest : public testing::TestWithParam<Case> {};

// Two weights with one gradient, which both updates are computed from.
TEST_P(TwoPhaseTest, SharedGradientsAreReadByBoth) {
  std::vector<Tensor> tensors = dense_tensors(GetParam(), {1000, 1000});
  tensors[0].grad.fill(3);
  tensors[1].grad.fill(3);
  Model separate(GetParam(), tensors);
  separate.step({.grads = GradUse::kLeave});

  Plan plan = GetParam().plan(2);
  TensorOperands second = tensors[1].operands();
  second.grad = tensors[0].grad.view();
  plan.bind(0, tensors[0].operands());
  plan.bind(1, second);
  run_step(plan, GetParam().rule.bound, std::vector<double>{1, 1}, {.grads = GradUse::kScratch});
  for (size_t t = 0; t < 2; ++t) {
    EXPECT_EQ(tensors[t].weight.first_difference(separate.tensors()[t].weight), -1);
  }
  EXPECT_EQ(tensors[0].grad.first_difference(separate.tensors()[0].grad), -1);
}

// ---- Weights that share memory --------------------------------------------------------------------------

struct Elements {
  int64_t offset, size, stride;
};

// Returns the error for floats at these places of one buffer as the weights of one list.
std::string refused(const std::vector<Elements>& places) {
  std::vector<float> memory(1000), grad(100), state(100);
  const int64_t one = 1;
  Plan plan(places.size(), 1);
  for (size_t i = 0; i < places.size(); ++i) {
    const auto& [offset, size, stride] = places[i];
    plan.bind(i, {{&memory[offset], DType::kFloat, {&size, 1}, {&stride, 1}},
                  {grad.data(), DType::kFloat, {&size, 1}, {&one, 1}},
                  {TensorView{state.data(), DType::kFloat, {&size, 1}, {&one, 1}}}});
  }
  try {
    plan.check_weights_apart();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(WeightsApartTest, NeighboursAndInterleavedViewsAreFine) {
  EXPECT_EQ(refused({{0, 10, 1}, {10, 10, 1}, {30, 10, 1}}), "");
  EXPECT_EQ(refused({{0, 10, 2}, {1, 10, 2}}), "");
  EXPECT_EQ(refused({{0, 10, 3}, {2, 10, 3}, {1, 10, 3}, {40, 0, 1}, {0, 0, 1}}), "");
}

TEST(WeightsApartTest, SharedElementsAreRefusedByName) {
  const std::string text = "of the list: the weight shares memory with another weight of the list";
  EXPECT_EQ(refused({{0, 10, 1}, {9, 10, 1}}), "tensor 1 " + text);
  EXPECT_EQ(refused({{50, 10, 1}, {0, 100, 1}}), "tensor 0 " + text);
  EXPECT_EQ(refused({{0, 10, 2}, {1, 10, 2}, {4, 3, 3}}), "tensor 2 " + text);
  EXPECT_EQ(refused({{7, 10, 1}, {7, 10, 1}}), "tensor 1 " + text);
}

// Returns the error for gradients at these places, of weights at [0, 100), [100, 200) and [200, 300).
std::string refused_grads(const std::vector<Elements>& grads) {
  std::vector<float> memory(1000), state(100);
  const int64_t size = 10, stride = 10;
  Plan plan(grads.size(), 1);
  for (size_t i = 0; i < grads.size(); ++i) {
    plan.bind(i, {{&memory[100 * i], DType::kFloat, {&size, 1}, {&stride, 1}},
                  {&memory[grads[i].offset], DType::kFloat, {&size, 1}, {&grads[i].stride, 1}},
                  {TensorView{state.data(), DType::kFloat, {&size, 1}, {&stride, 1}}}});
  }
  try {
    plan.check_weights_apart();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(GradsApartTest, BesideAndBetweenWeightsOrTheirOwnIsFine) {
  EXPECT_EQ(refused_grads({{300, 10, 1}, {400, 10, 1}, {500, 10, 1}}), "");
  EXPECT_EQ(refused_grads({{5, 10, 10}, {1, 10, 10}, {401, 10, 0}}), "");
  EXPECT_EQ(refused_grads({{0, 10, 10}, {100, 10, 10}, {200, 10, 10}}), "");
  EXPECT_EQ(refused_grads({{91, 10, 1}}), "");
}
TEST(GradsApartTest, InAWeightIsRefusedByTheNamesOfBoth) {
  const std::string other = "of the list: the gradient shares memory with the weight of tensor ";
  const std::string own = "of the list: the gradient is the memory of its own weight in another layout";
  const std::string clone = "; clone() it first", list = " of the list" + clone;
  EXPECT_EQ(refused_grads({{0, 10, 1}}), "tensor 0 " + own + clone);
  EXPECT_EQ(refused_grads({{0, 10, 0}}), "tensor 0 " + own + clone);
  EXPECT_EQ(refused_grads({{0, 10, 20}}), "tensor 0 " + own + clone);
  EXPECT_EQ(refused_grads({{300, 10, 1}, {0, 10, 10}}), "tensor 1 " + other + "0" + list);
  EXPECT_EQ(refused_grads({{300, 10, 1}, {400, 10, 1}, {95, 10, 1}}), "tensor 2 " + other + "1" + list);
  EXPECT_EQ(refused_grads({{190, 10, 1}, {400, 10, 1}, {500, 10, 1}}), "tensor 0 " + other + "1" + list);
}

TEST(WeightsApartTest, LookedAtAgainWhenAWeightMoves) {
  std::vector<float> memory(100), state(20);
  const int64_t size = 10, one = 1;
  Plan plan(2, 1);
  const auto bind = [&](size_t i, int64_t offset) {
    plan.bind(i, {{&memory[offset], DType::kFloat, {&size, 1}, {&one, 1}},
                  {&memory[80], DType::kFloat, {&size, 1}, {&one, 1}},
                  {TensorView{state.data(), DType::kFloat, {&size, 1}, {&one, 1}}}});
  };
  bind(0, 0);
  bind(1, 10);
  plan.check_weights_apart();
  bind(1, 5);
  EXPECT_THROW(plan.check_weights_apart(), std::runtime_error);
  EXPECT_THROW(plan.check_weights_apart(), std::runtime_error);  // not only the first time
  bind(1, 20);
  plan.check_weights_apart();
}

// ---- Waves ----------------------------------------------------------------------------------------------

TEST_P(TwoPhaseTest, ResultsDoNotDependOnWaves) {
  const Sizes sizes = {150000, 3, 0, 120000, 40000, 160000, 7, 200000};
  std::vector<Tensor> start = dense_tensors(GetParam(), sizes);
  for (Tensor& tensor : start) tensor.grad.fill(1);
  Model one_wave(GetParam(), start), many_waves(GetParam(), start);
  one_wave.step({.threads = 64, .grads = GradUse::kScratch});
  many_waves.step({.threads = 1, .grads = GradUse::kScratch});
  EXPECT_EQ(one_wave.plan().waves().size(), 1u);
  EXPECT_GT(many_waves.plan().waves().size(), 1u);
  for (size_t t = 0; t < sizes.size(); ++t) {
    EXPECT_EQ(one_wave.tensors()[t].weight.bytes(), many_waves.tensors()[t].weight.bytes());
    EXPECT_EQ(one_wave.tensors()[t].grad.bytes(), many_waves.tensors()[t].grad.bytes());
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, TwoPhaseTest, testing::ValuesIn(two_phase_cases()),
                         [](const auto& info) { return name(info.param); });

TEST(WaveTest, WavesPartitionTheTensorsOfSeveralChunks) {
  const Case c = lamb();
  const Sizes sizes = {0, 100, 20000, kChunkElements, 0, 50000, 1, kChunkElements + 1, 0};
  Model model(c, dense_tensors(c, sizes));
  Plan& plan = model.plan();
  for (size_t t = 0; t < sizes.size(); ++t) plan.bind(t, model.tensors()[t].operands());
  const int64_t element = 4 * sizeof(float), all = (70000 + kChunkElements + 1) * element;
  for (const auto& [wave_bytes, waves] :
       std::vector<std::pair<int64_t, size_t>>{{0, 3},
                                               {1, 3},
                                               {70000 * element - 1, 2},
                                               {70000 * element, 2},
                                               {all - 1, 2},
                                               {all, 1},
                                               {std::numeric_limits<int64_t>::max(), 1}}) {
    SCOPED_TRACE(testing::Message() << "waves of " << wave_bytes << " bytes");
    plan.refresh(wave_bytes);
    EXPECT_EQ(plan.waves().size(), waves);
    std::vector<int64_t> in_waves(plan.tensors());
    int64_t next_chunk = 0;
    for (const Wave& wave : plan.waves()) {
      ASSERT_LE(next_chunk, wave.first);
      ASSERT_LT(wave.first, wave.last);
      next_chunk = wave.last;
      for (int64_t chunk = wave.first; chunk < wave.last; ++chunk) ++in_waves[plan.chunks()[chunk].tensor];
    }
    for (size_t t = 0; t < sizes.size(); ++t) {
      const int64_t chunks = plan.first_chunk(t + 1) - plan.first_chunk(t);
      EXPECT_EQ(plan.has_one_chunk(t), chunks == 1);
      if (chunks > 1) {
        EXPECT_EQ(in_waves[t], chunks) << "tensor " << t;
      }
    }
  }
}

TEST(WaveTest, CostsAreThoseOfTheChunksThatAStageWorksOn) {
  const Case c = lamb();
  Model model(c, dense_tensors(c, {kChunkElements, 10, 2 * kChunkElements + 5, 0, 7, kChunkElements + 1}));
  Plan& plan = model.plan();
  for (size_t t = 0; t < plan.tensors(); ++t) plan.bind(t, model.tensors()[t].operands());
  plan.refresh(0);
  std::vector<int64_t> all{0}, in_waves{0}, single{0};
  for (const Chunk& chunk : plan.chunks()) {
    const int64_t elements = chunk.end - chunk.begin;
    const bool is_single = chunk.tensor != 2 && chunk.tensor != 5;
    all.push_back(all.back() + elements);
    in_waves.push_back(in_waves.back() + (is_single ? 0 : elements));
    single.push_back(single.back() + (is_single ? elements : 0));
  }
  EXPECT_EQ(plan.cost(), all);
  EXPECT_EQ(plan.wave_cost(), in_waves);
  EXPECT_EQ(plan.single_cost(), single);
  EXPECT_EQ(all.back(), 4 * kChunkElements + 23);
}

TEST(PlanTest, PrefetchesFartherAheadWhatTheSecondLevelDoesNotHold) {
  const Case c = lamb();
  Model model(c, dense_tensors(c, {20000, 100}));
  Plan& plan = model.plan();
  for (size_t t = 0; t < plan.tensors(); ++t) plan.bind(t, model.tensors()[t].operands());
  constexpr int64_t kAll = 20100 * 4 * sizeof(float);
  plan.refresh(kAll);
  const PrefetchDistance in_cache = plan.task(0).ahead;
  EXPECT_EQ(plan.task(1).ahead.first, in_cache.first);
  EXPECT_EQ(in_cache.second, 0);
  for (const int64_t bytes : {kAll - 1, int64_t{0}}) {
    plan.refresh(bytes);
    for (size_t t = 0; t < plan.tensors(); ++t) {
      EXPECT_GT(plan.task(t).ahead.first, in_cache.first) << bytes << " bytes, tensor " << t;
    }
  }
}

TEST(WaveTest, ChunksCoverEveryTensorInOrder) {
  const Case c = lamb();
  const Sizes sizes = {0, 100, 2 * kChunkElements + 1, 1};
  Model model(c, dense_tensors(c, sizes));
  model.step({});
  const Plan& plan = model.plan();
  ASSERT_EQ(plan.chunks().size(), 5u);
  ASSERT_EQ(plan.cost().size(), 6u);
  Sizes covered(sizes.size(), 0);
  for (size_t i = 0; i < plan.chunks().size(); ++i) {
    const Chunk& chunk = plan.chunks()[i];
    EXPECT_EQ(chunk.begin, covered[chunk.tensor]);
    EXPECT_LE(chunk.end - chunk.begin, kChunkElements);
    EXPECT_EQ(plan.cost()[i + 1] - plan.cost()[i], chunk.end - chunk.begin);
    covered[chunk.tensor] = chunk.end;
  }
  EXPECT_EQ(covered, sizes);
}

TEST(ZeroStatesTest, EveryStateIsZeroAndNothingElseChanges) {
  for (const Case& c : two_phase_cases()) {
    Model model(c, dense_tensors(c, {0, 1, 33, 50000}));
    std::vector<Tensor>& tensors = model.tensors();
    for (size_t t = 0; t < tensors.size(); ++t) {
      tensors[t].grad.fill(t);
      for (Operand& state : tensors[t].states) state.fill(t);
      model.plan().bind(t, tensors[t].operands());
    }
    const std::vector<Tensor> before = tensors;
    zero_states(model.plan(), 3);
    for (size_t t = 0; t < tensors.size(); ++t) {
      EXPECT_EQ(tensors[t].weight.bytes(), before[t].weight.bytes());
      EXPECT_EQ(tensors[t].grad.bytes(), before[t].grad.bytes());
      for (const Operand& state : tensors[t].states) {
        EXPECT_EQ(state.bytes(), std::vector<unsigned char>(state.bytes().size(), 0));
      }
    }
  }
}

}  // namespace
}  // namespace fusedstep::test
