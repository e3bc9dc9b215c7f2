#include "progress.h"

#include <unistd.h>

#include <iostream>
#include <utility>

namespace mnist {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr const char* kEraseLine = "\r\033[K";

Progress::Progress(std::string what, std::int64_t total)
    : what_(std::move(what)),
      total_(total),
      on_terminal_(isatty(STDERR_FILENO) != 0),
      interval_(on_terminal_ ? milliseconds(100) : seconds(10)) {}

Progress::~Progress() {
  if (on_terminal_) std::cerr << kEraseLine << std::flush;
}

void Progress::advance(const std::string& note) {
  ++done_;
  const auto now = Clock::now();
  if (now < next_) return;
  next_ = now + interval_;
  const auto left = std::chrono::ceil<seconds>((now - began_) * (total_ - done_) / done_);
  std::cerr << (on_terminal_ ? kEraseLine : "") << what_ << ": " << 100 * done_ / total_ << " %, "
            << left.count() << " s left, " << note << (on_terminal_ ? "" : "\n") << std::flush;
}

}  // namespace mnist
