// Law: a step or a load whose memory runs out throws and has changed nothing; taken again, it is right.
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/failing_new.h"
#include "tests/cpp/optim_cases.h"

namespace fusedstep::optim {
namespace {

using test::Allocations;
using torch::optim::OptimizerParamGroup;

template <class Row>
struct Subject {
  using Optimizer = typename Row::Optimizer;
  using State = typename Row::State;

  Subject(int steps, bool two_groups, const typename Row::Options& options, Tensors of = {}) {
    torch::manual_seed(1);
    weights = of.empty() ? make_weights() : std::move(of);
    const auto middle = two_groups ? weights.begin() + 2 : weights.end();
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(Tensors(weights.begin(), middle));
    if (two_groups) groups.emplace_back(Tensors(middle, weights.end()));
    optimizer = std::make_unique<Optimizer>(groups, options);
    take_steps(*optimizer, weights, 0, steps);
    set_grads(weights, steps);
  }

  // Learning rates, weights, gradients, and states that have been stepped: others are as if made anew.
  Tensors contents() const {
    Tensors found;
    for (auto& group : optimizer->param_groups()) found.push_back(torch::tensor(group.options().get_lr()));
    for (const Tensor& weight : weights) {
      found.push_back(weight.detach().clone());
      found.push_back(weight.grad().is_sparse() ? weight.grad().to_dense() : weight.grad().clone());
      const auto& states = optimizer->state();
      const auto at = states.find(weight.unsafeGetTensorImpl());
      if (at == states.end()) continue;
      const auto& state = static_cast<const State&>(*at->second);
      if (state.step().template item<float>() == 0) continue;
      found.push_back(state.step().clone());
      for (size_t k = 0; k < std::size(State::kStates); ++k) {
        if (state.slot(k).defined()) found.push_back(state.slot(k).clone());
        if (state.absmax(k).defined()) found.push_back(state.absmax(k).clone());
      }
      if (state.low_param().defined()) found.push_back(state.low_param().clone());
    }
    return found;
  }

  Tensors weights;
  std::unique_ptr<Optimizer> optimizer;
};

template <class Row>
class OutOfMemoryTest : public testing::Test {
 protected:
  // On one thread: what a team needs is a matter of the library, which test_out_of_memory.py is about.
  void SetUp() override { torch::set_num_threads(1); }
  void TearDown() override { torch::set_num_threads(threads_); }

  using Make = std::function<Subject<Row>()>;
  using Act = std::function<void(Subject<Row>&)>;
  static void step(Subject<Row>& subject) { subject.optimizer->step(); }

  static void expect_all_or_nothing(Allocations of, const Make& make, const Act& act = step) {
    Subject<Row> subject = make();
    const Tensors before = subject.contents();
    act(subject);
    const Tensors after = subject.contents();
    constexpr int kMost = 1000;
    int n = 1;
    for (; n < kMost; ++n) {
      Subject<Row> tried = make();
      bool has_thrown = false;
      std::string error;
      test::fail_allocation(of, n);
      try {
        act(tried);
      } catch (const std::exception& thrown) {
        test::allocations_left();
        has_thrown = true;
        error = thrown.what();
      }
      if (test::allocations_left() > 0) break;
      SCOPED_TRACE("allocation " + std::to_string(n) + ": " + error);
      if (has_thrown) {
        EXPECT_TRUE(error.find("memory") != error.npos || error.find("bad_alloc") != error.npos);
        expect_equal(tried.contents(), before);
        act(tried);
      }
      expect_equal(tried.contents(), after);
      if (testing::Test::HasFailure()) return;
    }
    EXPECT_GT(n, 1) << "nothing was made to fail";
    EXPECT_LT(n, kMost) << "there is no end of it";
  }

 private:
  int threads_ = torch::get_num_threads();
};

TYPED_TEST_SUITE(OutOfMemoryTest, Rows);

TYPED_TEST(OutOfMemoryTest, InTheFirstStep) {
  const auto make = [] { return Subject<TypeParam>(0, false, TypeParam::options()); };
  this->expect_all_or_nothing(Allocations::kNew, make);
  this->expect_all_or_nothing(Allocations::kTensors, make);
}

TYPED_TEST(OutOfMemoryTest, InTheFirstStepOfTwoGroups) {
  const auto make = [] { return Subject<TypeParam>(0, true, TypeParam::options()); };
  this->expect_all_or_nothing(Allocations::kNew, make);
  this->expect_all_or_nothing(Allocations::kTensors, make);
}

TYPED_TEST(OutOfMemoryTest, InALaterStep) {
  for (const bool two_groups : {false, true}) {
    this->expect_all_or_nothing(Allocations::kNew,
                                [&] { return Subject<TypeParam>(2, two_groups, TypeParam::options()); });
  }
}

// A plan is replaced, and the old one freed, in the step that it is replaced for.
TYPED_TEST(OutOfMemoryTest, InAStepOfOtherWeightsThanTheLast) {
  this->expect_all_or_nothing(Allocations::kNew, [] {
    Subject<TypeParam> subject(2, false, TypeParam::options());
    subject.weights[1].mutable_grad() = Tensor();
    subject.optimizer->step();
    subject.weights[1].mutable_grad() = torch::ones_like(subject.weights[1]);
    return subject;
  });
}

// Loads an archive with other learning rates, for states kept as in the archive, and in the other way.
TYPED_TEST(OutOfMemoryTest, InALoad) {
  const auto make = [](int steps, double lr, const std::string& state_dtype) {
    const Tensors weights = {torch::ones({64, 64}).requires_grad_(), torch::ones({7}).requires_grad_(),
                             torch::ones({4096}).requires_grad_()};
    return Subject<TypeParam>(steps, true, TypeParam::options().lr(lr).state_dtype(state_dtype), weights);
  };
  for (const std::string saved : {"", "int8"}) {
    std::stringstream file;
    torch::save(*make(3, 0.5, saved).optimizer, file);
    torch::serialize::InputArchive archive;
    archive.load_from(file);
    const auto load = [&](Subject<TypeParam>& subject) { subject.optimizer->load(archive); };
    for (const int steps : {0, 2}) {
      for (const std::string asked : {"", "int8"}) {
        this->expect_all_or_nothing(
            Allocations::kNew, [&] { return make(steps, 0.25, asked); }, load);
      }
    }
  }
}

TYPED_TEST(OutOfMemoryTest, WhereStatesAreInCodesBesideTheValue) {
  for (const int steps : {0, 2}) {
    const auto make = [&] {
      const Tensors weights = {torch::ones({4096}, torch::kBFloat16).requires_grad_(),
                               torch::ones({7}).requires_grad_()};
      const auto options = TypeParam::options().state_dtype("int8").master_weights("split");
      return Subject<TypeParam>(steps, false, options, weights);
    };
    this->expect_all_or_nothing(Allocations::kNew, make);
  }
}

// A destructor that runs while there is no memory must not ask for any.
template <class Row>
class GrowthTest : public testing::Test {};
TYPED_TEST_SUITE(GrowthTest, Rows);

TYPED_TEST(GrowthTest, OfManyStepsIsNone) {
  Subject<TypeParam> subject(3, /*two_groups=*/false, TypeParam::options());
  const size_t before = mallinfo2().uordblks;
  for (int step = 0; step < 300; ++step) subject.optimizer->step();
  EXPECT_LT(mallinfo2().uordblks, before + 4096);
}

TEST(DestructorTest, OfAnOptimizerAllocatesNothing) {
  auto subject = std::make_unique<Subject<AdamRow>>(2, true, AdamRow::options());
  test::fail_allocation(Allocations::kNew, 1);
  subject.reset();
  EXPECT_EQ(test::allocations_left(), 1);
}

using OutOfMemoryOfLambTest = OutOfMemoryTest<LambRow>;

TEST_F(OutOfMemoryOfLambTest, InAStepThatClips) {
  expect_all_or_nothing(Allocations::kNew,
                        [] { return Subject<LambRow>(2, true, LambRow::options().max_grad_norm(0.5)); });
}

using OutOfMemoryOfAdagradTest = OutOfMemoryTest<AdagradRow>;

TEST_F(OutOfMemoryOfAdagradTest, InAStepWithSparseGradients) {
  expect_all_or_nothing(Allocations::kNew, [] {
    Subject<AdagradRow> subject(2, false, AdagradOptions(0.1));
    const Tensor index = torch::tensor({{3, 1, 3, 0}});
    subject.weights[0].mutable_grad() =
        torch::sparse_coo_tensor(index, torch::ones({4, 5}), subject.weights[0].sizes());
    return subject;
  });
}

}  // namespace
}  // namespace fusedstep::optim
