#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "options.h"

namespace mnist {

struct EpochFigures {
  double loss = 0;  // average over the test set
  std::int64_t correct = 0;
  double seconds = 0;                   // spent on training
  std::vector<double> training_losses;  // of every log_interval-th step
};

/// The figures of a run, with the keys that mnist.py writes too.
struct Report {
  Options options;
  std::string torch;
  std::string isa;
  int threads = 0;
  std::int64_t train_images = 0;
  std::int64_t test_images = 0;
  std::vector<EpochFigures> epochs;

  /// Writes the figures to options.json, unless that is empty. Throws std::runtime_error if that cannot be
  /// done.
  void write() const;

  /// Time and speed of the training, the most memory that the process has had, and the first and last loss,
  /// as the recipes in Python print them.
  std::string closing_line() const;
};

}  // namespace mnist
