// Errors of the C++ optimizers: each is a c10::Error that begins with the parameter or the group.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/optim_cases.h"

namespace fusedstep::optim {
namespace {

using torch::optim::OptimizerParamGroup;

template <class Row>
class ErrorsTest : public testing::Test {
 public:
  using Optimizer = typename Row::Optimizer;
  using Options = typename Row::Options;
  using State = typename Row::State;

  // Two groups. Of the second the first parameter has no gradient, and something is wrong with the second.
  void SetUp() override {
    torch::manual_seed(1);
    weights.clear();
    for (int i = 0; i < 5; ++i) weights.push_back(torch::randn({4, 5}).requires_grad_());
    const Tensors first(weights.begin(), weights.begin() + 2), second(weights.begin() + 2, weights.end());
    optimizer = std::make_unique<Optimizer>(
        std::vector<OptimizerParamGroup>{OptimizerParamGroup(first), OptimizerParamGroup(second)},
        Row::options());
    take_steps(*optimizer, weights, 0, 2);
    set_grads(weights, 2);
    weights[2].mutable_grad() = Tensor();
  }

  State& state_of(const Tensor& weight) {
    return static_cast<State&>(*optimizer->state().at(weight.unsafeGetTensorImpl()));
  }

  // Throws what is no c10::Error.
  std::string refusal() {
    const Tensors before = clones(weights);
    std::string text = "no error";
    try {
      optimizer->step();
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
    expect_equal(weights, before);
    return text;
  }

  Tensors weights;
  std::unique_ptr<Optimizer> optimizer;
};

TYPED_TEST_SUITE(ErrorsTest, Rows, RowName);

TYPED_TEST(ErrorsTest, OfAStepNameTheParameter) {
  struct Row {
    const char* what;
    void (*spoil)(ErrorsTest<TypeParam>& test, const Tensor& weight);
    const char* text;
  };
  const Row rows[] = {
      {"sparse gradient",
       [](auto&, const Tensor& w) {
         w.mutable_grad() = torch::ones({4, 5}).to_sparse();
       },
       "sparse"},
      {"CSR gradient",
       [](auto&, const Tensor& w) {
         w.mutable_grad() = torch::ones({4, 5}).to_sparse_csr();
       },
       "the gradient has the layout SparseCsr on cpu; it must be a dense tensor"},
      {"negated weight", [](auto&, const Tensor& w) { w.set_data(at::_neg_view(w.detach().clone())); },
       "weight is a negated view"},
      {"negated state",
       [](auto& test, const Tensor& w) {
         test.state_of(w).slot(0, at::_neg_view(torch::zeros({4, 5})));
       },
       "state is a negated view"},
      {"float64 state",
       [](auto& test, const Tensor& w) {
         test.state_of(w).slot(0, torch::zeros({4, 5}, torch::kFloat64));
       },
       "a state is float64 but the weight is float32. If the dtype of the model has changed, save the "
       "optimizer and load it"},
      {"two counts", [](auto& test, const Tensor& w) { test.state_of(w).step(torch::ones({2})); },
       "the step count must be one float32 number"},
      {"null state",
       [](auto& test, const Tensor& w) { test.optimizer->state()[w.unsafeGetTensorImpl()] = nullptr; },
       "its state is null; erase it, and a step makes a new one"},
      {"another state",
       [](auto& test, const Tensor& w) {
         test.optimizer->state()[w.unsafeGetTensorImpl()] = std::make_unique<torch::optim::LBFGSParamState>();
       },
       "its state is a torch::optim::LBFGSParamState, not a fusedstep::optim::"},
      {"gradient in a weight",
       [](auto& test, const Tensor& w) { w.mutable_grad() = test.weights[4].detach(); },
       "the gradient shares memory with the weight of parameter 2 of group 1; clone() it first"},
      {"weight twice",
       [](auto& test, const Tensor& w) {
         test.optimizer->param_groups()[1].params().insert(
             test.optimizer->param_groups()[1].params().begin() + 1, w);
       },
       "the weight shares memory with another weight of the list. Give each tensor once"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.what);
    this->SetUp();
    row.spoil(*this, this->weights[3]);
    const std::string text = this->refusal();
    const bool is_twice = row.what == std::string("weight twice");
    EXPECT_TRUE(text.starts_with("parameter 1 of group 1: ") ||
                (is_twice && text.starts_with("parameter 2 of group 1: ")))
        << text;
    EXPECT_NE(text.find(row.text), std::string::npos) << text;
  }
}

TYPED_TEST(ErrorsTest, OfASaveAreThoseOfItsClass) {
  torch::serialize::OutputArchive archive;
  const auto refusal = [&] { return error_of([&] { this->optimizer->save(archive); }); };
  void* const key = this->weights[3].unsafeGetTensorImpl();
  this->optimizer->state()[key] = nullptr;
  EXPECT_EQ(refusal(), "parameter 1 of group 1: its state is null; erase it, and a step makes a new one");
  this->optimizer->param_groups()[1].params().clear();
  EXPECT_EQ(refusal(), "a state of no parameter is null or of another class; erase it");
  this->optimizer->state().erase(key);
  EXPECT_EQ(refusal(), "no error");
  this->optimizer->param_groups()[1].set_options(std::make_unique<torch::optim::LBFGSOptions>());
  EXPECT_TRUE(refusal().starts_with("group 1: the options must be fusedstep::optim::")) << refusal();
}

// Of tensors that no weight of a step could have become.
TYPED_TEST(ErrorsTest, OfAFirstStepNameTheParameter) {
  struct Row {
    Tensor weight;
    const char* text;
  };
  const Row rows[] = {
      {torch::ones({3}, torch::kInt64),
       "the weight is int64; it must be float32, float64, bfloat16 or float16"},
      {torch::ones({3}, torch::kComplexFloat), "the weight is complex64; it must be"},
      {torch::ones({3}, torch::kMeta),
       "the weight has the layout Strided on meta; it must be a dense tensor"},
      {torch::ones({3, 3}).to_mkldnn(), "the weight has the layout Mkldnn on cpu; it must be a dense tensor"},
  };
  for (const Row& row : rows) {
    const Tensor other = torch::ones({3}, torch::requires_grad());
    other.mutable_grad() = torch::ones({3});
    row.weight.mutable_grad() = row.weight.clone();
    typename TypeParam::Optimizer optimizer(Tensors{other, row.weight}, TypeParam::options());
    const std::string text = error_of([&] { optimizer.step(); });
    EXPECT_TRUE(text.starts_with("parameter 1 of group 0: ")) << text;
    EXPECT_NE(text.find(row.text), std::string::npos) << text;
    EXPECT_TRUE(torch::equal(other, torch::ones({3})));
  }
}

// Made, added, set and loaded.
TYPED_TEST(ErrorsTest, OfOptionsNameTheGroup) {
  using Optimizer = typename TypeParam::Optimizer;
  using Options = typename TypeParam::Options;
  const std::vector<std::pair<Options, std::string>> rows = {
      {Options(-1), "Invalid learning rate: -1"},
      {Options().state_dtype("int2"),
       "state_dtype must be '', 'float32' or one of 'int8', 'int4', 'fp8', not 'int2'"},
      {Options().rounding("kahan").master_weights("split"),
       "master_weights='split' and rounding='kahan' exclude each other: each keeps what a 16-bit weight "
       "cannot hold"},
  };
  for (const auto& [bad, text] : rows) {
    const OptimizerParamGroup group({torch::ones({2})}, std::make_unique<Options>(bad));
    const std::vector<OptimizerParamGroup> groups{OptimizerParamGroup({torch::ones({1})}), group};
    const std::string error = "group 1: " + text;
    EXPECT_EQ(error_of([&, &groups = groups] { Optimizer made(groups, TypeParam::options()); }), error);
    this->SetUp();
    EXPECT_EQ(error_of([&, &group = group] { this->optimizer->add_param_group(group); }), "group 2: " + text);
    EXPECT_EQ(this->optimizer->param_groups().size(), 2);
    static_cast<Options&>(this->optimizer->param_groups()[1].options()) = bad;
    EXPECT_EQ(this->refusal(), error);
  }
  const Tensors half = {torch::ones({1}), torch::ones({2}, torch::kFloat16)};
  EXPECT_EQ(error_of([&] { Optimizer made(half, TypeParam::options().master_weights("split")); }),
            "parameter 1 of group 0: master_weights='split' takes bfloat16 weights, but one is float16");
}

}  // namespace
}  // namespace fusedstep::optim
