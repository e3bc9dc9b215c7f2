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

// First item of thread t of n: the first whose cost begins at or after t/n of the whole.
int64_t share_begin(std::span<const int64_t> cost, int t, int n) {
  if (t == n) return static_cast<int64_t>(cost.size()) - 1;
  const int64_t total = cost.back() - cost.front();
  const int64_t from = cost.front() + static_cast<int64_t>(static_cast<double>(total) * t / n);
  return std::lower_bound(cost.begin(), cost.end() - 1, from) - cost.begin();
}

}  // namespace

void run_session(int threads, std::span<const int64_t> cost,
                 void (*work)(void* context, int64_t begin, int64_t end), void* context) {
  const auto items = static_cast<int64_t>(cost.size()) - 1;
  if (items <= 0) return;
  const bool alone = threads <= 1 || items == 1 || cost.back() - cost.front() < kSerialElements || forked ||
                     omp_in_parallel();
  if (alone) return work(context, 0, items);
  const FloatEnvironment callers = FloatEnvironment::current();
#pragma omp parallel num_threads(threads)
  {
    const FloatEnvironment own = FloatEnvironment::current();
    callers.install();
    const int t = omp_get_thread_num(), n = omp_get_num_threads();
    const int64_t begin = share_begin(cost, t, n), end = share_begin(cost, t + 1, n);
    if (begin < end) work(context, begin, end);
    own.install();
  }
}

}  // namespace fusedstep
