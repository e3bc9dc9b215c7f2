// The load balance of a team: the part of the work that each thread is given, learnt from session to session.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fusedstep {

// The times of a thread in a session, and the work that it did.
struct Progress {
  double late = 0;   // seconds until it began
  double busy = 0;   // seconds that it worked
  int64_t done = 0;  // the cost of what it did
};

// The unclaimed part of one thread's range of items, as one atomic word. The owner claims items at one end,
// idle threads steal them at the other.
class alignas(64) UnclaimedItems {
 public:
  UnclaimedItems() = default;
  UnclaimedItems(int64_t begin, int64_t end) { set(begin, end); }
  void set(int64_t begin, int64_t end);
  int64_t count() const;
  // Claims up to `most` items at the front or the back. Returns false if fewer than `least` are left.
  bool claim(bool front, int64_t most, int64_t least, int64_t& begin, int64_t& end);

 private:
  std::atomic<uint64_t> range_{0};
};

// Threads that run the same code are not equally fast: two may share a core, as processors of a virtual
// machine or as hardware threads, another program may use a core, and the calling thread may have something
// else to do first. So each thread is given the part of the work with which all are done at one time F:
//
//   part_t = speed_t (F - late_t),   sum of part_t = all work
//
// A thread finds in its cache what it had in the last stage or session, and far away what another thread had.
// So the parts are the same in all stages, and stay as they are until a thread is a tenth behind F, or a
// quarter ahead of it.
class LoadBalance {
 public:
  // Lets idle threads steal work from other threads. False if each thread's data stays in its own cache.
  // Stealing would move the data to another cache; the next session has to fetch the data back, and the
  // thread is late again.
  bool may_steal = true;

  // Makes room for a session of so many stages. Forgets what was learnt of a team of another size.
  void of_team(int threads, size_t stages = 0);

  // The room: every thread's unclaimed items of each stage, [stages][threads], and its progress.
  std::vector<UnclaimedItems> unclaimed;
  std::vector<Progress> progress;

  // The part of all work that is given to the threads before this one, from 0 to 1 for one past the last.
  double before(int thread) const { return before_[thread]; }

  // Learns from a session of `work`.
  void learn(std::span<const Progress> progress, int64_t work);

 private:
  struct Thread {
    double late = 0, speed = 0;
  };

  // Returns the time F at which all are done with `work`; 0 if nothing is known.
  double finish(int64_t work) const;

  int since_change_ = 0, learnt_ = 0;  // sessions
  std::vector<Thread> threads_;
  std::vector<double> before_;
};

}  // namespace fusedstep
