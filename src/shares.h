// How much of a team's work each of its threads is given, learnt from session to session.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fusedstep {

// What a thread got done in a session.
struct Progress {
  double late = 0;   // seconds until it began
  double busy = 0;   // seconds that it worked
  int64_t done = 0;  // the cost of what it did
};

// Items of a run that nobody has taken yet: whose they are takes them from one end, others from the other.
class alignas(64) Rest {
 public:
  Rest() = default;
  Rest(int64_t begin, int64_t end) { set(begin, end); }
  void set(int64_t begin, int64_t end);
  int64_t left() const;
  // Up to `most` items from the front or the back, if there are `least`.
  bool take(bool front, int64_t most, int64_t least, int64_t& begin, int64_t& end);

 private:
  std::atomic<uint64_t> range_{0};
};

// Threads that run the same code are not equally fast: two may have one core between them, as processors of a
// virtual machine or as its hardware threads, another program may use a core, and the calling thread may have
// something else to do first. So each is given what lets all be done at one time F:
//
//   share_t = speed_t (F - late_t),   sum of share_t = all work
//
// A thread finds in its cache what it had in the last stage or session, and far away what another one had: so
// shares are the same in all stages, and stay as they are until a thread is a tenth behind that time, or a
// quarter ahead of it.
class Shares {
 public:
  // Whether a thread that is done may take of what others have left. Not where caches keep what a thread had:
  // what was taken from it once would have to be fetched back in each session, which makes it late again.
  bool may_take = true;

  // Makes room for a session of so many stages. Forgets what was learnt of a team of another size.
  void of_team(int threads, size_t stages = 0);

  // The room: for what every thread has left of each stage, [stages][threads], and for what it got done.
  std::vector<Rest> rests;
  std::vector<Progress> progress;

  // The part of all work that lies before what a thread is given, from 0 to 1 for one past the last.
  double before(int thread) const { return before_[thread]; }

  // Takes note of a session of `work`.
  void learn(std::span<const Progress> progress, int64_t work);

 private:
  struct Thread {
    double late = 0, speed = 0;
  };

  // When all are done with `work` if each is given its share; 0 if nothing is known.
  double finish(int64_t work) const;

  int since_change_ = 0, learnt_ = 0;  // sessions
  std::vector<Thread> threads_;
  std::vector<double> before_;
};

}  // namespace fusedstep
