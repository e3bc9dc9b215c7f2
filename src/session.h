// One OpenMP session over a list of chunks.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace fusedstep {

// Work below this many elements is done by the calling thread: waking a team costs more.
constexpr int64_t kSerialElements = 32768;

// Calls work(context, i) for every i in [0, cost.size() - 1) on up to `threads` threads, the calling one
// included, and returns when all are done. cost[i] is the cost of everything before i: each thread gets one
// run of neighbours of about equal cost, always the same for the same number of threads, so that what it
// touched in one session is in its cache in the next. `work` must not throw.
//
// A thread takes its items in order, or backwards: a session that reads what the one before it wrote finds
// the last of that in the cache first.
//
// Every thread runs under the calling thread's floating-point environment (flush-to-zero, rounding) and gets
// its own back. A child of fork() runs everything on the calling thread: OpenMP's team does not exist there.
enum class Order { kForwards, kBackwards };
void run_session(int threads, std::span<const int64_t> cost, void (*work)(void* context, int64_t i),
                 void* context, Order order = Order::kForwards);

template <class Work>
void run_session(int threads, std::span<const int64_t> cost, Work& work, Order order = Order::kForwards) {
  const auto call = [](void* context, int64_t i) { (*static_cast<Work*>(context))(i); };
  run_session(threads, cost, call, &work, order);
}

// Calls work(begin, end) for ranges that make up [0, count), of items that cost `each`.
template <class Work>
void run_ranges(int threads, int64_t count, int64_t each, Work work) {
  constexpr int64_t kRange = 64;
  if (count * each < kSerialElements) return work(int64_t{0}, count);
  std::vector<int64_t> cost;
  for (int64_t begin = 0; begin < count; begin += kRange) cost.push_back(begin * each);
  cost.push_back(count * each);
  auto range = [&](int64_t i) { work(i * kRange, std::min((i + 1) * kRange, count)); };
  run_session(threads, cost, range);
}

}  // namespace fusedstep
