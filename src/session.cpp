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

// First item of thread t of n, the first of which has `aside` to do besides: the first item whose cost begins
// at or after t/n of the whole.
int64_t share_begin(std::span<const int64_t> cost, int64_t aside, int t, int n) {
  if (cost.empty() || t == 0) return 0;
  if (t == n) return static_cast<int64_t>(cost.size()) - 1;
  const int64_t total = cost.back() - cost.front() + aside;
  const int64_t before = static_cast<int64_t>(static_cast<double>(total) * t / n) - aside;
  const int64_t from = cost.front() + std::max<int64_t>(before, 0);
  return std::lower_bound(cost.begin(), cost.end() - 1, from) - cost.begin();
}

bool is_worth_a_team(const Stage& stage) {
  return stage.cost.size() > 2 && stage.cost.back() - stage.cost.front() >= kSerialElements;
}

}  // namespace

void run_stages(int threads, std::span<const Stage> stages,
                void (*work)(void* context, size_t stage, int64_t begin, int64_t end), void* context,
                const Aside& aside) {
  const auto run_share = [&](size_t stage, int thread, int team) {
    const std::span<const int64_t> cost = stages[stage].cost;
    const int64_t before = stage == 0 ? aside.cost : 0;
    const int64_t begin = share_begin(cost, before, thread, team);
    const int64_t end = share_begin(cost, before, thread + 1, team);
    if (begin < end) work(context, stage, begin, end);
  };
  if (threads <= 1 || std::ranges::none_of(stages, is_worth_a_team) || forked || omp_in_parallel()) {
    if (aside.run) aside.run();
    for (size_t stage = 0; stage < stages.size(); ++stage) run_share(stage, 0, 1);
    return;
  }
  const FloatEnvironment callers = FloatEnvironment::current();
#pragma omp parallel num_threads(threads)
  {
    const FloatEnvironment own = FloatEnvironment::current();
    callers.install();
    const int thread = omp_get_thread_num(), team = omp_get_num_threads();
    if (thread == 0 && aside.run) aside.run();
    for (size_t stage = 0; stage < stages.size(); ++stage) {
      if (stages[stage].waits) {
#pragma omp barrier
      }
      run_share(stage, thread, team);
    }
    own.install();
  }
}

}  // namespace fusedstep
