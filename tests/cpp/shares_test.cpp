// What threads are given, by what they got done.
#include "src/shares.h"

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

// A team whose threads do what they are given, and nothing of each other's.
class Team {
 public:
  explicit Team(std::vector<Worker> of) : workers(std::move(of)) {
    shares.of_team(static_cast<int>(workers.size()));
  }

  void run(int sessions) {
    for (int i = 0; i < sessions; ++i) {
      std::vector<Progress> progress;
      for (size_t t = 0; t < workers.size(); ++t) {
        const auto done = static_cast<int64_t>(share(t) * kWork);
        progress.push_back({workers[t].late, static_cast<double>(done) / workers[t].speed, done});
      }
      shares.learn(progress, kWork);
    }
  }

  double share(size_t thread) const {
    return shares.before(static_cast<int>(thread) + 1) - shares.before(static_cast<int>(thread));
  }
  std::vector<double> all_shares() const {
    std::vector<double> all;
    for (size_t t = 0; t < workers.size(); ++t) all.push_back(share(t));
    return all;
  }

  std::vector<Worker> workers;
  Shares shares;
};

void expect_near(const std::vector<double>& found, const std::vector<double>& expected, double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t t = 0; t < found.size(); ++t) EXPECT_NEAR(found[t], expected[t], tolerance) << "thread " << t;
}

TEST(SharesTest, AreEqualBeforeAnythingIsLearnt) {
  Team team({{1e6}, {2e6}, {3e6}, {4e6}});
  team.run(1);
  EXPECT_EQ(team.all_shares(), (std::vector<double>{0.25, 0.25, 0.25, 0.25}));
}

TEST(SharesTest, GoByTheSpeed) {
  Team team({{4e6}, {2e6}, {1e6}, {1e6}});
  team.run(20);
  expect_near(team.all_shares(), {0.5, 0.25, 0.125, 0.125}, 1e-3);
  EXPECT_EQ(team.shares.before(0), 0);
  EXPECT_EQ(team.shares.before(4), 1);
}

// Both are done after F: 1e6 (F - 0.2) + 1e6 F = kWork.
TEST(SharesTest, AreLessForAThreadThatBeginsLate) {
  Team team({{1e6, 0.2}, {1e6}});
  team.run(20);
  expect_near(team.all_shares(), {0.4, 0.6}, 1e-3);
}

TEST(SharesTest, AreNothingForAThreadThatBeginsTooLateUntilItNoLongerDoes) {
  Team team({{1e6, 2}, {1e6}, {1e6}});
  team.run(20);
  expect_near(team.all_shares(), {0, 0.5, 0.5}, 1e-3);
  team.workers[0].late = 0;
  team.run(300);
  EXPECT_GT(team.share(0), 0.25);
}

// One of many: that it has nothing to do hardly delays the others.
TEST(SharesTest, OfOneOfManyThreadsAreGivenBack) {
  for (const Worker slow : {Worker{1e6, 2}, Worker{0.05e6}}) {
    Team team(std::vector<Worker>(16, {1e6}));
    team.workers[3] = slow;
    team.run(100);
    EXPECT_LT(team.share(3), 0.01);
    team.workers[3] = {1e6};
    team.run(1000);
    EXPECT_GT(team.share(3), 0.7 / 16);
  }
}

// In the first session of which something is learnt nothing is known yet.
TEST(SharesTest, OfAThreadThatWasHeldUpAtFirstComeBack) {
  Team team(std::vector<Worker>(4, {1e6}));
  team.run(2);
  team.workers[1] = {0.01e6};
  team.run(1);
  team.workers[1] = {1e6};
  team.run(40);
  EXPECT_GT(team.share(1), 0.2);
}

TEST(SharesTest, FollowASpeedThatChanges) {
  Team team({{1e6}, {0.01e6}});
  team.run(100);
  EXPECT_LT(team.share(1), 0.02);
  team.workers[1].speed = 1e6;
  team.run(300);
  EXPECT_NEAR(team.share(1), 0.5, 0.05);
}

// Nobody is a tenth behind when all are done.
TEST(SharesTest, StayAsTheyAreForLittle) {
  Team team({{1e6}, {0.93e6}, {1.02e6}, {1e6, 0.01}});
  team.run(100);
  EXPECT_EQ(team.all_shares(), (std::vector<double>{0.25, 0.25, 0.25, 0.25}));
}

// A thread that is held up once, and one that always is.
TEST(SharesTest, StayAsTheyAreForAnInterruption) {
  Team team({{1e6}, {1e6}, {1e6}});
  team.run(50);
  team.workers[1] = {0.1e6, 0.5};
  team.run(1);
  team.workers[1] = {1e6};
  team.run(50);
  expect_near(team.all_shares(), {1. / 3, 1. / 3, 1. / 3}, 1e-12);
  team.workers[1] = {0.5e6, 0.1};
  team.run(100);
  EXPECT_LT(team.share(1), 0.2);
}

TEST(SharesTest, DoNotChangeAtEverySession) {
  Team team({{1e6}, {0.1e6}});
  int changes = 0;
  for (int i = 0; i < 80; ++i) {
    const double share = team.share(0);
    team.run(1);
    changes += team.share(0) != share;
  }
  EXPECT_GE(changes, 1);
  EXPECT_LE(changes, 10);
}

TEST(SharesTest, OfATeamOfAnotherSizeAreForgotten) {
  Team team({{1e6}, {3e6}});
  team.run(20);
  EXPECT_LT(team.share(0), 0.3);
  team.shares.of_team(3);
  expect_near({team.shares.before(1), team.shares.before(2), team.shares.before(3)}, {1. / 3, 2. / 3, 1},
              1e-12);
  team.shares.of_team(2);
  EXPECT_EQ(team.share(0), 0.5);
}

TEST(SharesTest, OfWorkThatNobodyDidAreEqual) {
  Shares shares;
  for (int i = 0; i < 20; ++i) {
    shares.of_team(2);
    shares.learn(std::vector<Progress>(2), 0);
  }
  EXPECT_EQ(shares.before(1), 0.5);
}

}  // namespace
}  // namespace fusedstep::test
