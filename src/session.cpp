#include "src/session.h"

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fusedstep {
namespace {

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

// First item of thread t of n, where the first thread's items cost about `callers` and the others share the
// rest: the first item whose cost begins there or after it.
int64_t share_begin(const Stage& stage, int64_t callers, int t, int n) {
  if (stage.cost.empty() || t == 0) return 0;
  if (t == n) return items_of(stage);
  const auto rest = static_cast<double>(cost_of(stage) - callers);
  const int64_t from = stage.cost.front() + callers + static_cast<int64_t>(rest * (t - 1) / (n - 1));
  return std::lower_bound(stage.cost.begin(), stage.cost.end() - 1, from) - stage.cost.begin();
}

// Whether stages that do not wait for one another are work for a team.
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

void wait_for_team() {
#pragma omp barrier
}

}  // namespace

void run_stages(int threads, std::span<const Stage> stages,
                void (*work)(void* context, size_t stage, int64_t begin, int64_t end), void* context,
                const Aside& aside) {
  // Until the team waits, the calling thread is behind the others by what it does aside.
  const auto run_shares = [&](int thread, int team, auto wait) {
    int64_t behind = aside.cost;
    for (size_t i = 0; i < stages.size(); ++i) {
      const Stage& stage = stages[i];
      if (stage.waits) {
        wait();
        behind = 0;
      }
      const int64_t share = (cost_of(stage) + behind) / team;
      const int64_t callers = std::max<int64_t>(share - behind, 0);
      behind = std::max<int64_t>(behind - share, 0);
      const int64_t begin = share_begin(stage, callers, thread, team);
      const int64_t end = share_begin(stage, callers, thread + 1, team);
      if (begin < end) work(context, i, begin, end);
    }
  };
  if (threads <= 1 || !are_worth_a_team(stages) || forked || omp_in_parallel()) {
    if (aside.run) aside.run();
    run_shares(0, 1, [] {});
    return;
  }
  const FloatEnvironment callers = FloatEnvironment::current();
#pragma omp parallel num_threads(threads)
  {
    const FloatEnvironment own = FloatEnvironment::current();
    callers.install();
    const int thread = omp_get_thread_num();
    if (thread == 0 && aside.run) aside.run();
    run_shares(thread, omp_get_num_threads(), wait_for_team);
    own.install();
  }
}

}  // namespace fusedstep
