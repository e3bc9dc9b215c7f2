#include "src/run/session.h"

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fusedstep {
namespace {

// The fewest items that a thread must have left for others to steal from it: it is done sooner with fewer,
// which are in its cache.
constexpr int64_t kLeast = 2;

// Set in the child of a fork() for good.
std::atomic<bool> forked{false};

[[maybe_unused]] const int watch_fork = pthread_atfork(nullptr, nullptr, [] { forked = true; });

// The floating-point environment of a thread: MXCSR on x86. Elsewhere each thread keeps its own.
class FloatEnvironment {
 public:
#if defined(__x86_64__)
  static FloatEnvironment current() { return FloatEnvironment(_mm_getcsr()); }
  void install() const { _mm_setcsr(csr_); }

 private:
  explicit FloatEnvironment(unsigned csr) : csr_(csr) {}
  unsigned csr_;
#else
  static FloatEnvironment current() { return {}; }
  void install() const {}
#endif
};

int64_t items_of(const Stage& stage) {
  return std::max<int64_t>(static_cast<int64_t>(stage.cost.size()), 1) - 1;
}

int64_t cost_of(const Stage& stage) {
  return stage.cost.empty() ? 0 : stage.cost.back() - stage.cost.front();
}

// Returns the first item with at least `part` of the cost before it.
int64_t item_at(const Stage& stage, double part) {
  if (stage.cost.empty() || part <= 0) return 0;
  if (part >= 1) return items_of(stage);
  const int64_t from = stage.cost.front() + static_cast<int64_t>(static_cast<double>(cost_of(stage)) * part);
  return std::lower_bound(stage.cost.begin(), stage.cost.end() - 1, from) - stage.cost.begin();
}

// Returns whether stages that do not wait for one another are enough work for a team.
bool are_worth_a_team(std::span<const Stage> stages) {
  int64_t items = 0, cost = 0;
  for (const Stage& stage : stages) {
    if (stage.waits) items = cost = 0;
    items += items_of(stage);
    cost += cost_of(stage);
    if (items > 1 && cost >= kSerialElements) return true;
  }
  return false;
}

// Returns whether the calling thread has others to help it.
bool has_team(int threads, std::span<const Stage> stages) {
  return threads > 1 && are_worth_a_team(stages) && !forked && omp_in_parallel() == 0;
}

void wait_for_team() {
#pragma omp barrier
}

}  // namespace

Pieces::Pieces(const Stage& stage, std::span<UnclaimedItems> team, int thread, Progress& progress)
    : stage_(stage), team_(team), thread_(thread), progress_(progress), since_(omp_get_wtime()) {}

bool Pieces::next(int64_t& begin, int64_t& end) {
  UnclaimedItems& own = team_[thread_];
  // The last items are halved, so that others can steal some of them.
  const int64_t most = team_.size() == 1 ? kPiece : std::min(kPiece, (own.count() + 1) / 2);
  bool found = own.claim(!stage_.backwards, most, 1, begin, end);
  if (!found) {
    const double now = omp_get_wtime();
    progress_.busy += now - since_;
    found = steal(begin, end);
    since_ = omp_get_wtime();
  }
  if (found) progress_.done += stage_.cost[end] - stage_.cost[begin];
  return found;
}

bool Pieces::steal(int64_t& begin, int64_t& end) {
  for (;;) {
    UnclaimedItems* behind = nullptr;
    int64_t most = kLeast - 1;
    for (size_t i = 1; i < team_.size(); ++i) {
      UnclaimedItems& other = team_[(thread_ + i) % team_.size()];
      const int64_t left = other.count();
      if (left <= most) continue;
      most = left;
      behind = &other;
    }
    if (behind == nullptr) return false;
    const int64_t part = std::clamp<int64_t>(most / 4, 1, kPiece);
    if (behind->claim(stage_.backwards, part, kLeast, begin, end)) return true;
  }
}

void make_room(int threads, std::span<const Stage> stages, LoadBalance& balance) {
  if (has_team(threads, stages)) balance.of_team(threads, stages.size());
}

void run_stages(int threads, std::span<const Stage> stages,
                void (*work)(void* context, size_t stage, Pieces& pieces), void* context, const Aside& aside,
                LoadBalance* balance) {
  const auto run_alone = [&](size_t stage, double from, double to) {
    UnclaimedItems own(item_at(stages[stage], from), item_at(stages[stage], to));
    Progress unused;
    Pieces pieces(stages[stage], {&own, 1}, 0, unused);
    work(context, stage, pieces);
  };
  if (!has_team(threads, stages)) {
    if (aside) aside();
    for (size_t i = 0; i < stages.size(); ++i) run_alone(i, 0, 1);
    return;
  }
  const auto lay_out = [&](size_t first, int thread) {
    for (size_t i = first; i < stages.size() && (i == first || !stages[i].waits); ++i) {
      balance->unclaimed[i * threads + thread].set(item_at(stages[i], balance->before(thread)),
                                                   item_at(stages[i], balance->before(thread + 1)));
    }
  };
  if (balance) {
    balance->of_team(threads, stages.size());
    std::ranges::fill(balance->progress, Progress{});
    // Before the others begin, so that they can steal from a thread that comes late.
    for (int thread = 0; thread < threads; ++thread) lay_out(0, thread);
  }
  const FloatEnvironment callers = FloatEnvironment::current();
  const double start = omp_get_wtime();
#pragma omp parallel num_threads(threads)
  {
    const FloatEnvironment own = FloatEnvironment::current();
    callers.install();
    const int thread = omp_get_thread_num(), team = omp_get_num_threads();
    const bool is_balanced = balance != nullptr && team == threads;
    if (thread == 0 && aside) aside();
    Progress got;
    got.late = omp_get_wtime() - start;
    for (size_t i = 0; i < stages.size(); ++i) {
      if (stages[i].waits) {
        if (is_balanced) lay_out(i, thread);
        wait_for_team();
      }
      if (is_balanced) {
        const std::span of_all = std::span(balance->unclaimed).subspan(i * threads, threads);
        Pieces pieces(stages[i], balance->may_steal ? of_all : of_all.subspan(thread, 1),
                      balance->may_steal ? thread : 0, got);
        work(context, i, pieces);
      } else {
        run_alone(i, static_cast<double>(thread) / team, static_cast<double>(thread + 1) / team);
      }
    }
    if (is_balanced) balance->progress[thread] = got;
    own.install();
  }
  if (!balance) return;
  int64_t all = 0;
  for (const Stage& stage : stages) all += cost_of(stage);
  balance->learn(balance->progress, all);
}

}  // namespace fusedstep
