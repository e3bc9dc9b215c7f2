// One OpenMP session over lists of chunks, in stages.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "src/run/load_balance.h"

namespace fusedstep {

// The calling thread does less work than this, in elements, alone: waking a team costs more.
constexpr int64_t kSerialElements = 32768;

// The items that a thread claims at a time: enough to outweigh the call of a kernel, and few enough for a
// stage that goes backwards to do so.
constexpr int64_t kPiece = 4;

// A part of a session. cost[i] is the cost of all items before item i. With `waits` it begins when all
// threads are done with the stages before it. With `backwards` threads go from their last item to their
// first.
struct Stage {
  std::span<const int64_t> cost;
  bool waits = false;
  bool backwards = false;
};

// A callback that the calling thread runs before its part of the work, while the other threads start. It may
// be empty, and must not throw.
using Aside = std::function<void()>;

// A thread's work in a stage: pieces of its own range, and then pieces that it steals from slower threads.
class Pieces {
 public:
  Pieces(const Stage& stage, std::span<UnclaimedItems> team, int thread, Progress& progress);
  // Claims the next items [begin, end). Returns false if there are none left.
  bool next(int64_t& begin, int64_t& end);

 private:
  bool steal(int64_t& begin, int64_t& end);

  const Stage& stage_;
  std::span<UnclaimedItems> team_;
  int thread_;
  Progress& progress_;
  double since_;
};

// Goes through the stages on up to `threads` threads, the calling one included, and returns when all are
// done. Calls work(context, stage, pieces) on each thread; the pieces of all make up [0, cost.size() - 1).
// A thread has one contiguous range, so that it finds in its cache what it touched in the last stage or
// session. Without `balance` all ranges cost the same, and are the same for the same number of threads. With
// it a thread's range costs what the balance says, the balance learns from how long each took, and where it
// lets threads steal, an idle one gets pieces of the others' ranges. A team that is smaller than asked for
// does not use it. `work` must not throw.
//
// It allocates nothing but what make_room() has not made yet.
//
// Every thread runs under the calling thread's floating-point environment (flush-to-zero, rounding) and gets
// its own back. A child of fork() runs everything on the calling thread: OpenMP's team does not exist there.
void run_stages(int threads, std::span<const Stage> stages,
                void (*work)(void* context, size_t stage, Pieces& pieces), void* context, const Aside& aside,
                LoadBalance* balance);

// Makes room in `balance` for a session over these stages, so that run_stages() need not.
void make_room(int threads, std::span<const Stage> stages, LoadBalance& balance);

template <class Work>
void run_stages(int threads, std::span<const Stage> stages, Work& work, const Aside& aside = {},
                LoadBalance* balance = nullptr) {
  const auto call = [](void* context, size_t stage, Pieces& pieces) {
    (*static_cast<Work*>(context))(stage, pieces);
  };
  run_stages(threads, stages, call, &work, aside, balance);
}

// The same for one stage: work(begin, end) for each piece.
template <class Work>
void run_session(int threads, std::span<const int64_t> cost, Work& work, const Aside& aside = {},
                 LoadBalance* balance = nullptr) {
  const Stage stage{cost};
  auto of_stage = [&](size_t, Pieces& pieces) {
    for (int64_t begin, end; pieces.next(begin, end);) work(begin, end);
  };
  run_stages(threads, {&stage, 1}, of_stage, aside, balance);
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
