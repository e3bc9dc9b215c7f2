#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace mnist {

/// Progress on standard error: one line that is written anew on a terminal, a line every ten seconds
/// elsewhere.
class Progress {
 public:
  Progress(std::string what, std::int64_t total);
  ~Progress();  // takes the line off the terminal
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// One more of the steps is done; `note` is shown beside their share and the time left.
  void advance(const std::string& note);

 private:
  using Clock = std::chrono::steady_clock;

  const std::string what_;
  const std::int64_t total_;
  const bool on_terminal_;
  const Clock::duration interval_;
  std::int64_t done_ = 0;
  const Clock::time_point began_ = Clock::now();
  Clock::time_point next_ = began_ + interval_;
};

}  // namespace mnist
