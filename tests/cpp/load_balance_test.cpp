// Law: threads are given work in proportion to what they got done.
#include "src/run/load_balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace fusedstep::test {
namespace {

constexpr int64_t kWork = 1'000'000;

struct Worker {
  double speed;  // per second
  double late = 0;
};

// A team whose threads do what they are given and steal nothing.
class Team {
 public:
  explicit Team(std::vector<Worker> of) : workers(std::move(of)) {
    balance.of_team(static_cast<int>(workers.size()));
  }

  void run(int sessions) {
    for (int i = 0; i < sessions; ++i) {
      std::vector<Progress> progress;
      for (size_t t = 0; t < workers.size(); ++t) {
        const auto done = static_cast<int64_t>(part(t) * kWork);
        progress.push_back({workers[t].late, static_cast<double>(done) / workers[t].speed, done});
      }
      balance.learn(progress, kWork);
    }
  }

  double part(size_t thread) const {
    return balance.before(static_cast<int>(thread) + 1) - balance.before(static_cast<int>(thread));
  }
  std::vector<double> parts() const {
    std::vector<double> all;
    for (size_t t = 0; t < workers.size(); ++t) all.push_back(part(t));
    return all;
  }

  std::vector<Worker> workers;
  LoadBalance balance;
};

void expect_near(const std::vector<double>& found, const std::vector<double>& expected, double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t t = 0; t < found.size(); ++t) EXPECT_NEAR(found[t], expected[t], tolerance) << "thread " << t;
}

TEST(LoadBalanceTest, PartsAreEqualBeforeAnythingIsLearnt) {
  Team team({{1e6}, {2e6}, {3e6}, {4e6}});
  team.run(1);
  EXPECT_EQ(team.parts(), (std::vector<double>{0.25, 0.25, 0.25, 0.25}));
}

TEST(LoadBalanceTest, PartsGoByTheSpeed) {
  Team team({{4e6}, {2e6}, {1e6}, {1e6}});
  team.run(20);
  expect_near(team.parts(), {0.5, 0.25, 0.125, 0.125}, 1e-3);
  EXPECT_EQ(team.balance.before(0), 0);
  EXPECT_EQ(team.balance.before(4), 1);
}

// Both are done after F: 1e6 (F - 0.2) + 1e6 F = kWork.
TEST(LoadBalanceTest, AThreadThatBeginsLateHasLess) {
  Team team({{1e6, 0.2}, {1e6}});
  team.run(20);
  expect_near(team.parts(), {0.4, 0.6}, 1e-3);
}

TEST(LoadBalanceTest, AThreadThatBeginsTooLateHasNothingUntilItNoLongerDoes) {
  Team team({{1e6, 2}, {1e6}, {1e6}});
  team.run(20);
  expect_near(team.parts(), {0, 0.5, 0.5}, 1e-3);
  team.workers[0].late = 0;
  team.run(300);
  EXPECT_GT(team.part(0), 0.25);
}

// An idle thread hardly delays many others.
TEST(LoadBalanceTest, OneOfManyThreadsIsGivenWorkAgain) {
  for (const Worker slow : {Worker{1e6, 2}, Worker{0.05e6}}) {
    Team team(std::vector<Worker>(16, {1e6}));
    team.workers[3] = slow;
    team.run(100);
    EXPECT_LT(team.part(3), 0.01);
    team.workers[3] = {1e6};
    team.run(1000);
    EXPECT_GT(team.part(3), 0.7 / 16);
  }
}

// The first session that teaches something has nothing to be compared with.
TEST(LoadBalanceTest, AThreadThatWasHeldUpAtFirstIsGivenWorkAgain) {
  Team team(std::vector<Worker>(4, {1e6}));
  team.run(2);
  team.workers[1] = {0.01e6};
  team.run(1);
  team.workers[1] = {1e6};
  team.run(40);
  EXPECT_GT(team.part(1), 0.2);
}

TEST(LoadBalanceTest, PartsFollowASpeedThatChanges) {
  Team team({{1e6}, {0.01e6}});
  team.run(100);
  EXPECT_LT(team.part(1), 0.02);
  team.workers[1].speed = 1e6;
  team.run(300);
  EXPECT_NEAR(team.part(1), 0.5, 0.05);
}

// No thread is a tenth behind.
TEST(LoadBalanceTest, PartsStayAsTheyAreForLittle) {
  Team team({{1e6}, {0.93e6}, {1.02e6}, {1e6, 0.01}});
  team.run(100);
  EXPECT_EQ(team.parts(), (std::vector<double>{0.25, 0.25, 0.25, 0.25}));
}

// One session teaches little, many teach all.
TEST(LoadBalanceTest, PartsStayAsTheyAreForAnInterruption) {
  Team team({{1e6}, {1e6}, {1e6}});
  team.run(50);
  team.workers[1] = {0.1e6, 0.5};
  team.run(1);
  team.workers[1] = {1e6};
  team.run(50);
  expect_near(team.parts(), {1. / 3, 1. / 3, 1. / 3}, 1e-12);
  team.workers[1] = {0.5e6, 0.1};
  team.run(100);
  EXPECT_LT(team.part(1), 0.2);
}

TEST(LoadBalanceTest, PartsDoNotChangeAtEverySession) {
  Team team({{1e6}, {0.1e6}});
  int changes = 0;
  for (int i = 0; i < 80; ++i) {
    const double part = team.part(0);
    team.run(1);
    changes += team.part(0) != part;
  }
  EXPECT_GE(changes, 1);
  EXPECT_LE(changes, 10);
}

TEST(LoadBalanceTest, ATeamOfAnotherSizeIsForgotten) {
  Team team({{1e6}, {3e6}});
  team.run(20);
  EXPECT_LT(team.part(0), 0.3);
  team.balance.of_team(3);
  expect_near({team.balance.before(1), team.balance.before(2), team.balance.before(3)}, {1. / 3, 2. / 3, 1},
              1e-12);
  team.balance.of_team(2);
  EXPECT_EQ(team.part(0), 0.5);
}

TEST(LoadBalanceTest, PartsAreEqualAfterWorkThatNobodyDid) {
  LoadBalance balance;
  for (int i = 0; i < 20; ++i) {
    balance.of_team(2);
    balance.learn(std::vector<Progress>(2), 0);
  }
  EXPECT_EQ(balance.before(1), 0.5);
}

}  // namespace
}  // namespace fusedstep::test
