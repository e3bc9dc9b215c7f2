// One OpenMP session over lists of chunks, in stages.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "src/shares.h"

namespace fusedstep {

// Work below this many elements is done by the calling thread: waking a team costs more.
constexpr int64_t kSerialElements = 32768;

// Items that a thread takes of its run at a time: enough for what a kernel's call costs, and few enough for a
// stage that goes backwards to do so.
constexpr int64_t kPiece = 4;

// A part of a session: items of which cost[i] is the cost of everything before item i. `waits` for all
// threads to be done with the stages before it. `backwards`: from the last item to the first.
struct Stage {
  std::span<const int64_t> cost;
  bool waits = false;
  bool backwards = false;
};

// What the calling thread does first, while others begin; empty for nothing. Must not throw.
using Aside = std::function<void()>;

// A thread's part of a stage: pieces of a run of its own, then of what others are behind with.
class Pieces {
 public:
  Pieces(const Stage& stage, std::span<Rest> team, int thread, Progress& progress);
  // The next neighbours [begin, end); false if there are no more.
  bool next(int64_t& begin, int64_t& end);

 private:
  bool take_from_others(int64_t& begin, int64_t& end);

  const Stage& stage_;
  std::span<Rest> team_;
  int thread_;
  Progress& progress_;
  double since_;
};

// Goes through the stages on up to `threads` threads, the calling one included, and returns when all are
// done. Calls work(context, stage, pieces) on each thread; the pieces of all make up [0, cost.size() - 1).
// A thread has one run of neighbours, so that it finds in its cache what it touched in the last stage or
// session. Without `shares` all runs cost the same, and are the same for the same number of threads. With
// them runs cost what these tell, which learn from how long each took; and where a thread may take, one that
// is done gets pieces of what others have left. A team that is smaller than asked for goes without. `work`
// must not throw.
//
// Allocates nothing, but for what make_room() makes.
//
// Every thread runs under the calling thread's floating-point environment (flush-to-zero, rounding) and gets
// its own back. A child of fork() runs everything on the calling thread: OpenMP's team does not exist there.
void run_stages(int threads, std::span<const Stage> stages,
                void (*work)(void* context, size_t stage, Pieces& pieces), void* context, const Aside& aside,
                Shares* shares);

// Makes room in `shares` for a session over these stages. Without it run_stages() does so.
void make_room(int threads, std::span<const Stage> stages, Shares& shares);

template <class Work>
void run_stages(int threads, std::span<const Stage> stages, Work& work, const Aside& aside = {},
                Shares* shares = nullptr) {
  const auto call = [](void* context, size_t stage, Pieces& pieces) {
    (*static_cast<Work*>(context))(stage, pieces);
  };
  run_stages(threads, stages, call, &work, aside, shares);
}

// The same for one stage: work(begin, end) for each piece.
template <class Work>
void run_session(int threads, std::span<const int64_t> cost, Work& work, const Aside& aside = {},
                 Shares* shares = nullptr) {
  const Stage stage{cost};
  auto of_stage = [&](size_t, Pieces& pieces) {
    for (int64_t begin, end; pieces.next(begin, end);) work(begin, end);
  };
  run_stages(threads, {&stage, 1}, of_stage, aside, shares);
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
