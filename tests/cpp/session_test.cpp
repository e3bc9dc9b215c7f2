// One OpenMP session: every item once, the same thread for the same items, the caller's floating-point
// environment on every thread.
#include "src/run/session.h"

#include <gtest/gtest.h>
#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "tests/cpp/model.h"

namespace fusedstep::test {
namespace {

// cost[i] is the cost of everything before item i.
std::vector<int64_t> equal_costs(int64_t items, int64_t each) {
  std::vector<int64_t> cost(items + 1);
  for (int64_t i = 0; i <= items; ++i) cost[i] = i * each;
  return cost;
}

std::vector<int64_t> uneven_costs(int64_t items, int64_t start) {
  std::vector<int64_t> cost{start};
  for (int64_t i = 0; i < items; ++i) cost.push_back(cost.back() + (i % 5 == 0 ? 100000 : i % 7));
  return cost;
}

// Work on ranges of items from work on each.
template <class Work>
auto each(Work work) {
  return [work](int64_t begin, int64_t end) {
    ASSERT_LT(begin, end);
    for (int64_t i = begin; i < end; ++i) work(i);
  };
}

// The threads that ran each item.
std::vector<std::thread::id> threads_of_items(int threads, const std::vector<int64_t>& cost) {
  std::vector<std::thread::id> ran(cost.size() - 1);
  auto work = each([&](int64_t i) { ran[i] = std::this_thread::get_id(); });
  run_session(threads, cost, work);
  return ran;
}

TEST(SessionTest, EveryItemRunsOnce) {
  for (const int64_t items : {1, 2, 3, 5, 64, 1000}) {
    for (const auto& cost : {equal_costs(items, 1000), equal_costs(items, kSerialElements),
                             equal_costs(items, 0), uneven_costs(items, 0), uneven_costs(items, 12345)}) {
      for (const int threads : {0, 1, 2, 3, 7, 64}) {
        std::vector<std::atomic<int>> runs(items);
        auto work = each([&](int64_t i) { ++runs.at(i); });
        run_session(threads, cost, work);
        for (int64_t i = 0; i < items; ++i) {
          ASSERT_EQ(runs[i], 1) << "item " << i << " of " << items << ", " << threads << " threads";
        }
      }
    }
  }
}

TEST(SessionTest, EveryItemOfARangeIsInOneRange) {
  for (const int64_t count : {1, 63, 64, 65, 1000}) {
    for (const int64_t each : {int64_t{0}, int64_t{1}, kSerialElements}) {
      for (const int threads : {1, 2, 7}) {
        std::vector<std::atomic<int>> runs(count);
        std::mutex mutex;
        std::set<std::thread::id> ran;
        run_ranges(threads, count, each, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++runs.at(i);
          const std::lock_guard lock(mutex);
          ran.insert(std::this_thread::get_id());
        });
        for (int64_t i = 0; i < count; ++i) ASSERT_EQ(runs[i], 1) << i << " of " << count;
        EXPECT_EQ(ran.size() > 1, threads > 1 && each == kSerialElements && count > 64);
      }
    }
  }
}

TEST(SessionTest, NothingToDo) {
  run_ranges(3, 0, 1, [](int64_t begin, int64_t end) { EXPECT_EQ(begin, end); });
  auto work = [](int64_t, int64_t) { FAIL(); };
  run_session(3, std::vector<int64_t>{}, work);
  run_session(3, std::vector<int64_t>{7}, work);
}

// A stage that waits finds all that was done before it.
TEST(SessionTest, EveryItemOfEveryStageRunsOnceAndAStageWaits) {
  const auto small = equal_costs(7, 1), large = equal_costs(64, kSerialElements), none = equal_costs(5, 0);
  const std::vector<Stage> stages{{large}, {large, true}, {none}, {small, true}, {{}, true}, {large}};
  for (const int threads : {1, 2, 3, 7}) {
    LoadBalance balance;
    for (int repeat = 0; repeat < 40; ++repeat) {
      std::vector<std::vector<std::atomic<int>>> runs;
      for (const Stage& stage : stages) runs.emplace_back(std::max<size_t>(stage.cost.size(), 1) - 1);
      std::vector<std::atomic<size_t>> done(stages.size());
      std::set<std::thread::id> ran;
      std::mutex mutex;
      auto work = [&](size_t stage, Pieces& pieces) {
        for (int64_t begin, end; pieces.next(begin, end);) {
          ASSERT_LT(begin, end);
          for (size_t before = 0; stages[stage].waits && before < stage; ++before) {
            EXPECT_EQ(done[before], runs[before].size()) << "stage " << before << " before " << stage;
          }
          for (int64_t i = begin; i < end; ++i) ++runs[stage].at(i);
          done[stage] += end - begin;
        }
        const std::lock_guard lock(mutex);
        ran.insert(std::this_thread::get_id());
      };
      run_stages(threads, stages, work, {}, repeat % 2 == 0 ? nullptr : &balance);
      EXPECT_EQ(ran.size(), static_cast<size_t>(threads));
      for (size_t stage = 0; stage < stages.size(); ++stage) {
        for (const auto& run : runs[stage]) EXPECT_EQ(run, 1) << "stage " << stage;
      }
    }
  }
}

TEST(SessionTest, StagesWorthATeamMakeOneForAll) {
  const auto little = equal_costs(2, kSerialElements / 2 - 1), enough = equal_costs(2, kSerialElements / 2);
  const auto team_of = [](const std::vector<Stage>& stages) {
    std::set<std::thread::id> ran;
    std::mutex mutex;
    auto work = [&](size_t, Pieces&) {
      const std::lock_guard lock(mutex);
      ran.insert(std::this_thread::get_id());
    };
    run_stages(2, stages, work);
    return ran.size();
  };
  EXPECT_EQ(team_of({{little}, {little, true}}), 1u);
  EXPECT_EQ(team_of({{little}, {enough, true}}), 2u);
  EXPECT_EQ(team_of({{little}, {little}}), 2u);  // one is begun while the other is not done
}

TEST(SessionTest, WhatIsAsideRunsOnceOnTheCallingThread) {
  const auto large = equal_costs(64, kSerialElements), small = equal_costs(3, 1);
  const std::vector<std::vector<Stage>> sessions{
      {}, {{{}}}, {{small}}, {{large}}, {{large, true}, {large, true}}};
  for (const auto& stages : sessions) {
    for (const int threads : {1, 3}) {
      std::vector<std::thread::id> ran;
      std::atomic<int64_t> items = 0;
      auto work = [&](size_t, Pieces& pieces) {
        for (int64_t begin, end; pieces.next(begin, end);) items += end - begin;
      };
      run_stages(threads, stages, work, [&] { ran.push_back(std::this_thread::get_id()); });
      EXPECT_EQ(ran, std::vector{std::this_thread::get_id()});
      int64_t all = 0;
      for (const Stage& stage : stages)
        all += std::max<int64_t>(static_cast<int64_t>(stage.cost.size()), 1) - 1;
      EXPECT_EQ(items, all);
    }
  }
}

// Waits until `done`; false if that takes a minute.
template <class Done>
bool wait_until(Done done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST(SessionTest, WithABalanceIdleThreadsStealFromASlowOne) {
  constexpr int64_t kItems = 120;
  const auto cost = equal_costs(kItems, kSerialElements);
  for (const bool backwards : {false, true}) {
    LoadBalance balance;
    std::vector<std::thread::id> ran(kItems);
    std::atomic<int64_t> done = 0;
    bool were_done = false;
    auto work = [&](size_t, Pieces& pieces) {
      for (int64_t begin, end; pieces.next(begin, end); done += end - begin) {
        for (int64_t i = begin; i < end; ++i) ran[i] = std::this_thread::get_id();
      }
    };
    // The calling thread does not begin before the others have left one item.
    const Stage stage{cost, false, backwards};
    run_stages(
        3, {&stage, 1}, work, [&] { were_done = wait_until([&] { return done >= kItems - 1; }); }, &balance);
    EXPECT_TRUE(were_done);
    EXPECT_EQ(done, kItems);
    const auto caller = std::this_thread::get_id();
    EXPECT_EQ(std::count(ran.begin(), ran.end(), caller), 1);
    EXPECT_EQ(ran[backwards ? kItems / 3 - 1 : 0], caller);  // the others steal from the other end
  }
}

TEST(SessionTest, NobodyStealsWithoutABalanceOrWhereItForbidsThat) {
  const auto cost = equal_costs(120, kSerialElements);
  const auto caller = std::this_thread::get_id();
  LoadBalance forbidding;
  forbidding.may_steal = false;
  for (LoadBalance* balance : {static_cast<LoadBalance*>(nullptr), &forbidding}) {
    std::atomic<int> others = 0;
    std::atomic<int64_t> of_caller = 0;
    auto work = [&](size_t, Pieces& pieces) {
      for (int64_t begin, end; pieces.next(begin, end);) {
        if (std::this_thread::get_id() == caller) of_caller += end - begin;
      }
      if (std::this_thread::get_id() != caller) ++others;
    };
    const Stage stage{cost};
    bool were_done = false;
    run_stages(
        3, {&stage, 1}, work, [&] { were_done = wait_until([&] { return others == 2; }); }, balance);
    EXPECT_TRUE(were_done);
    EXPECT_EQ(of_caller, 40);
  }
}

TEST(SessionTest, AThreadGoesThroughItsRunFromOneEndToTheOther) {
  const auto cost = equal_costs(100, kSerialElements);
  for (const int threads : {1, 2, 3}) {
    for (const bool backwards : {false, true}) {
      std::map<std::thread::id, std::vector<int64_t>> begins;
      std::mutex mutex;
      auto work = [&](size_t, Pieces& pieces) {
        for (int64_t begin, end; pieces.next(begin, end);) {
          EXPECT_LE(end - begin, kPiece);
          const std::lock_guard lock(mutex);
          begins[std::this_thread::get_id()].push_back(begin);
        }
      };
      const Stage stage{cost, false, backwards};
      run_stages(threads, {&stage, 1}, work);
      EXPECT_EQ(begins.size(), static_cast<size_t>(threads));
      for (auto& [thread, of_thread] : begins) {
        EXPECT_GE(of_thread.size(), 100 / threads / kPiece);
        if (backwards) std::reverse(of_thread.begin(), of_thread.end());
        EXPECT_TRUE(std::is_sorted(of_thread.begin(), of_thread.end()));
      }
    }
  }
}

// A slow thread is given less the next time.
TEST(SessionTest, TheBalanceIsLearnt) {
  const auto cost = equal_costs(200, kSerialElements);
  const auto caller = std::this_thread::get_id();
  LoadBalance balance;
  auto work = [&](int64_t begin, int64_t end) {
    // Asleep: what else runs on the machine then does not count.
    const auto each = std::chrono::microseconds(std::this_thread::get_id() == caller ? 800 : 200);
    std::this_thread::sleep_for(each * (end - begin));
  };
  EXPECT_TRUE(wait_until([&] {
    run_session(2, cost, work, {}, &balance);
    return balance.before(1) < 0.4;
  }));
}

TEST(SessionTest, ThreadsTakeRunsOfNeighbours) {
  for (const int threads : {2, 3, 7}) {
    const auto ran = threads_of_items(threads, equal_costs(100, kSerialElements));
    EXPECT_EQ(std::set(ran.begin(), ran.end()).size(), static_cast<size_t>(threads));
    int changes = 0;
    for (size_t i = 1; i < ran.size(); ++i) changes += ran[i] != ran[i - 1];
    EXPECT_EQ(changes, threads - 1);
  }
}

TEST(SessionTest, RangesCostAboutTheSame) {
  constexpr int64_t kLarge = 10;  // the first items cost ten times the others
  std::vector<int64_t> cost{0};
  for (int64_t i = 0; i < 200; ++i) cost.push_back(cost.back() + kSerialElements * (i < 50 ? kLarge : 1));
  const auto ran = threads_of_items(2, cost);
  const auto cost_of = [&](std::thread::id thread) {
    int64_t sum = 0;
    for (size_t i = 0; i < ran.size(); ++i) sum += ran[i] == thread ? cost[i + 1] - cost[i] : 0;
    return sum;
  };
  EXPECT_LE(std::abs(cost_of(ran.front()) - cost_of(ran.back())), 2 * kLarge * kSerialElements);
}

TEST(SessionTest, TheSameThreadGetsTheSameItems) {
  const auto cost = uneven_costs(50, 0);
  for (const int threads : {2, 3, 7}) {
    const auto first = threads_of_items(threads, cost);
    for (int i = 0; i < 10; ++i) EXPECT_EQ(threads_of_items(threads, cost), first);
  }
}

TEST(SessionTest, LittleWorkStartsNoTeam) {
  const auto caller = std::this_thread::get_id();
  for (const auto& cost : {equal_costs(kSerialElements - 1, 1), equal_costs(1, 10 * kSerialElements)}) {
    for (const std::thread::id thread : threads_of_items(4, cost)) ASSERT_EQ(thread, caller);
  }
}

TEST(SessionTest, RunsInsideOfAParallelRegion) {
  const auto cost = equal_costs(40, kSerialElements);
  std::vector<std::atomic<int>> runs(40);
#pragma omp parallel num_threads(3)
  {
    auto work = each([&](int64_t i) { ++runs[i]; });
    run_session(4, cost, work);
  }
  for (const auto& run : runs) EXPECT_EQ(run, 3);
}

// Two threads of the program that step at the same time.
TEST(SessionTest, RunsOnSeveralCallingThreads) {
  const auto cost = equal_costs(40, kSerialElements);
  std::vector<std::atomic<int>> runs(40);
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      auto work = each([&](int64_t i) { ++runs[i]; });
      for (int repeat = 0; repeat < 20; ++repeat) run_session(2, cost, work);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const auto& run : runs) EXPECT_EQ(run, 60);
}

#if defined(__x86_64__)

constexpr int kThreads = 4;
constexpr unsigned kExceptionFlags = 0x3f;  // flags raised by arithmetic; the others set its mode

TEST(SessionTest, WorkersTakeOverTheFloatingPointEnvironmentAndRestoreTheirs) {
  const auto cost = equal_costs(100, kSerialElements);
  const unsigned own = _mm_getcsr() & ~kExceptionFlags;
  const unsigned denormals_are_zero = 0x40;
  std::vector<unsigned> before(kThreads), during(100), after(kThreads);
#pragma omp parallel num_threads(kThreads)
  if (omp_get_thread_num() % 2 != 0) _mm_setcsr(own | _MM_ROUND_DOWN);  // some workers have their own already
  const auto note = [](std::vector<unsigned>& csr) {
#pragma omp parallel num_threads(kThreads)
    csr[omp_get_thread_num()] = _mm_getcsr() & ~kExceptionFlags;
  };
  const unsigned modes[] = {_MM_FLUSH_ZERO_ON | denormals_are_zero, denormals_are_zero, _MM_ROUND_UP,
                            _MM_ROUND_TOWARD_ZERO};
  for (const unsigned mode : modes) {
    note(before);
    before[0] = own | mode;
    _mm_setcsr(own | mode);
    auto work = each([&](int64_t i) { during[i] = _mm_getcsr() & ~kExceptionFlags; });
    run_session(kThreads, cost, work);
    note(after);
    _mm_setcsr(own);
    for (const unsigned csr : during) ASSERT_EQ(csr, own | mode);
    EXPECT_EQ(after, before);
  }
#pragma omp parallel num_threads(kThreads)
  _mm_setcsr(own);
}

#endif

// ---- After fork() ---------------------------------------------------------------------------------------

// The exit status of a child that runs `body`; a signal's number where it does not come to an end.
template <class Body>
int status_of_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

TEST(SessionTest, AChildOfForkStepsOnOneThread) {
  const auto cost = equal_costs(40, kSerialElements);
  const auto in_parent = threads_of_items(2, cost);  // the parent has a team
  EXPECT_EQ(std::set(in_parent.begin(), in_parent.end()).size(), 2u);
  EXPECT_EQ(status_of_child([&] {
              const auto ran = threads_of_items(2, cost);
              return std::set(ran.begin(), ran.end()) == std::set{std::this_thread::get_id()};
            }),
            0);
  // The parent is as before.
  EXPECT_EQ(threads_of_items(2, cost), in_parent);
}

TEST(SessionTest, AChildOfForkGetsTheSameBits) {
  const Case test_case = two_phase_cases()[0];
  std::vector<Tensor> start = dense_tensors(test_case, {3 * kSerialElements});
  start[0].grad.fill(1);
  Model here(test_case, start), there(test_case, start);
  here.step({.threads = 2});
  EXPECT_EQ(status_of_child([&] {
              there.step({.threads = 2});
              return there.tensors()[0].weight.bytes() == here.tensors()[0].weight.bytes();
            }),
            0);
}

// A step inside of the caller's own parallel region: one plan a thread.
TEST(SessionTest, StepsInsideOfAParallelRegion) {
  for (const Case& test_case : {all_cases().front(), two_phase_cases().front()}) {
    std::vector<Tensor> start = dense_tensors(test_case, {3 * kSerialElements, 33});
    for (Tensor& tensor : start) tensor.grad.fill(1);
    Model expected(test_case, start);
    expected.step({.threads = 2});
    std::vector<std::unique_ptr<Model>> models;
    for (int i = 0; i < 3; ++i) models.push_back(std::make_unique<Model>(test_case, start));
#pragma omp parallel num_threads(3)
    models[omp_get_thread_num()]->step({.threads = 4});
    for (const auto& model : models) {
      for (size_t t = 0; t < start.size(); ++t) {
        EXPECT_EQ(model->tensors()[t].weight.bytes(), expected.tensors()[t].weight.bytes());
      }
    }
  }
}

}  // namespace
}  // namespace fusedstep::test
