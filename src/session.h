// One OpenMP session over lists of chunks, in stages.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace fusedstep {

// Work below this many elements is done by the calling thread: waking a team costs more.
constexpr int64_t kSerialElements = 32768;

// A part of a session: items of which cost[i] is the cost of everything before item i. `waits` for all
// threads to be done with the stages before it.
struct Stage {
  std::span<const int64_t> cost;
  bool waits = false;
};

// What the calling thread does first, while others begin: as much as the work of `cost` elements, which that
// thread has less of before the team first waits. Must not throw.
struct Aside {
  std::function<void()> run;
  int64_t cost = 0;
};

// Goes through the stages on up to `threads` threads, the calling one included, and returns when all are
// done. Calls work(context, stage, begin, end) for ranges that make up [0, cost.size() - 1) of each stage: a
// thread gets one run of neighbours of about equal cost, always the same for the same number of threads, so
// that what it touched in one stage or session is in its cache in the next. `work` must not throw.
//
// Every thread runs under the calling thread's floating-point environment (flush-to-zero, rounding) and gets
// its own back. A child of fork() runs everything on the calling thread: OpenMP's team does not exist there.
void run_stages(int threads, std::span<const Stage> stages,
                void (*work)(void* context, size_t stage, int64_t begin, int64_t end), void* context,
                const Aside& aside);

template <class Work>
void run_stages(int threads, std::span<const Stage> stages, Work& work, const Aside& aside = {}) {
  const auto call = [](void* context, size_t stage, int64_t begin, int64_t end) {
    (*static_cast<Work*>(context))(stage, begin, end);
  };
  run_stages(threads, stages, call, &work, aside);
}

// The same for one stage: work(begin, end).
template <class Work>
void run_session(int threads, std::span<const int64_t> cost, Work& work, const Aside& aside = {}) {
  const Stage stage{cost};
  auto of_stage = [&](size_t, int64_t begin, int64_t end) { work(begin, end); };
  run_stages(threads, {&stage, 1}, of_stage, aside);
}

// The same for `count` items that cost `each`.
template <class Work>
void run_ranges(int threads, int64_t count, int64_t each, Work work) {
  constexpr int64_t kRange = 64;
  if (count * each < kSerialElements) return work(int64_t{0}, count);
  std::vector<int64_t> cost;
  for (int64_t begin = 0; begin < count; begin += kRange) cost.push_back(begin * each);
  cost.push_back(count * each);
  auto ranges = [&](int64_t begin, int64_t end) { work(begin * kRange, std::min(end * kRange, count)); };
  run_session(threads, cost, ranges);
}

}  // namespace fusedstep
