#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace mnist {

struct Options {
  std::string data;
  std::int64_t epochs = 14;
  std::int64_t batch_size = 64;
  std::int64_t test_batch_size = 1000;
  double lr = 0.01;
  double gamma = 0.7;
  std::int64_t seed = 1;
  std::int64_t threads = 0;  // 0: torch's own choice
  std::int64_t log_interval = 10;
  std::string json;
  bool help = false;
};

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Reads `--name value` and `--name=value`; of an option given twice the last counts. Throws UsageError.
Options parse_options(const std::vector<std::string_view>& arguments);

/// Text that `--help` prints.
std::string usage();

}  // namespace mnist
