#include "src/run/load_balance.h"

#include <algorithm>
#include <cstddef>

namespace fusedstep {
namespace {

// The number of sessions that count: the last one has an eighth of the weight.
constexpr int kMemory = 8;

// The number of sessions that teach nothing, at first and after a change: their operands are in memory or in
// another thread's cache.
constexpr int kUnsettled = 2;

// The least number of sessions between changes.
constexpr int kBetween = 8;

// Work is moved once the slowest thread is a tenth late, or the fastest thread a quarter early. The second
// limit is wider, since one idle thread costs little.
constexpr double kMostBehind = 0.1, kMostAhead = 0.25;

// The limit of what one session can teach: a thread may have been interrupted in it.
constexpr double kMostNews = 0.25;

// The bits of the word that hold the end of a range; the others hold its beginning.
constexpr uint64_t kEnd = 0xffffffff;

}  // namespace

void UnclaimedItems::set(int64_t begin, int64_t end) {
  range_.store(static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end), std::memory_order_relaxed);
}

int64_t UnclaimedItems::count() const {
  const uint64_t range = range_.load(std::memory_order_relaxed);
  return static_cast<int64_t>(range & kEnd) - static_cast<int64_t>(range >> 32);
}

bool UnclaimedItems::claim(bool front, int64_t most, int64_t least, int64_t& begin, int64_t& end) {
  uint64_t range = range_.load(std::memory_order_relaxed);
  for (;;) {
    const auto first = static_cast<int64_t>(range >> 32), last = static_cast<int64_t>(range & kEnd);
    if (last - first < least) return false;
    const int64_t count = std::min(most, last - first);
    begin = front ? first : last - count;
    end = begin + count;
    const uint64_t rest = front ? range + (static_cast<uint64_t>(count) << 32) : range - count;
    // Relaxed, since only the owner of an item is decided here: what it reads was written before the stage.
    if (range_.compare_exchange_weak(range, rest, std::memory_order_relaxed)) return true;
  }
}

void LoadBalance::of_team(int threads, size_t stages) {
  const auto size = static_cast<size_t>(threads);
  if (unclaimed.size() < stages * size) unclaimed = std::vector<UnclaimedItems>(stages * size);
  if (threads_.size() == size) return;
  progress.resize(size);
  before_.resize(size + 1);
  threads_.assign(size, {});  // last: the size says that all is there
  since_change_ = learnt_ = 0;
  for (size_t t = 0; t <= size; ++t) before_[t] = static_cast<double>(t) / static_cast<double>(size);
}

double LoadBalance::finish(int64_t work) const {
  // Threads that would begin after it do not count.
  double finish = 0;
  for (size_t left = threads_.size() + 1, before = left + 1; left < before;) {
    double speed = 0, by_late = 0;
    before = left;
    left = 0;
    for (const Thread& thread : threads_) {
      if (finish > 0 && thread.late >= finish) continue;
      speed += thread.speed;
      by_late += thread.speed * thread.late;
      ++left;
    }
    if (speed <= 0) return 0;
    finish = (static_cast<double>(work) + by_late) / speed;
  }
  return finish;
}

void LoadBalance::learn(std::span<const Progress> progress, int64_t work) {
  since_change_ = std::min(since_change_ + 1, kBetween);
  if (since_change_ <= kUnsettled) return;
  double speeds = 0;
  int worked = 0;
  for (const Progress& of : progress) {
    if (of.done <= 0 || of.busy <= 0) continue;
    speeds += static_cast<double>(of.done) / of.busy;
    ++worked;
  }
  if (worked == 0) return;
  // The mean of all sessions at first. Later new ones have more weight, but none that differs much.
  const bool knows = learnt_ == kMemory;
  learnt_ = std::min(learnt_ + 1, kMemory);
  const double weight = 1.0 / learnt_, before = finish(work);
  for (size_t t = 0; t < threads_.size(); ++t) {
    const Progress& of = progress[t];
    // A thread that was idle is taken to be as fast as the others, so that it will be given work again.
    const bool has_worked = of.done > 0 && of.busy > 0;
    double speed = has_worked ? static_cast<double>(of.done) / of.busy : speeds / worked, late = of.late;
    if (knows) {
      const Thread& known = threads_[t];
      speed = std::clamp(speed, known.speed * (1 - kMostNews), known.speed * (1 + kMostNews));
      late = std::clamp(late, known.late - kMostNews * before, known.late + kMostNews * before);
    }
    threads_[t].speed += weight * (speed - threads_[t].speed);
    threads_[t].late += weight * (late - threads_[t].late);
  }
  if (since_change_ < kBetween) return;
  const double all = static_cast<double>(work), finish = this->finish(work);
  double first = finish, last = 0;
  for (size_t t = 0; t < threads_.size(); ++t) {
    const double done = threads_[t].late + (before_[t + 1] - before_[t]) * all / threads_[t].speed;
    first = std::min(first, done);
    last = std::max(last, before_[t + 1] > before_[t] ? done : 0);
  }
  if (last <= (1 + kMostBehind) * finish && first >= (1 - kMostAhead) * finish) return;
  since_change_ = 0;
  for (size_t t = 0; t < threads_.size(); ++t) {
    const double part = threads_[t].speed * std::max(finish - threads_[t].late, 0.0) / all;
    before_[t + 1] = before_[t] + part;
  }
  before_.back() = 1;
}

}  // namespace fusedstep
