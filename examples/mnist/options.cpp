#include "options.h"

#include <algorithm>
#include <charconv>
#include <iomanip>
#include <limits>
#include <sstream>
#include <variant>

namespace mnist {
namespace {

using Text = std::string Options::*;
using Real = double Options::*;
struct Integer {
  std::int64_t Options::*member;
  std::int64_t least;
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
};

struct Row {
  std::string_view name, metavar, help;
  std::variant<Text, Real, Integer> member;
};

constexpr std::int64_t kMostThreads = 1024;  // the system starts a part of many more, and then fails
constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::min();

const Row kRows[] = {
    {"--data", "DIR", "folder that holds the MNIST files", &Options::data},
    {"--epochs", "N", "epochs to train", Integer{&Options::epochs, 1}},
    {"--batch-size", "N", "images of a training step", Integer{&Options::batch_size, 1}},
    {"--test-batch-size", "N", "images of a test batch", Integer{&Options::test_batch_size, 1}},
    {"--lr", "X", "learning rate of the first epoch", &Options::lr},
    {"--gamma", "X", "its factor from epoch to epoch", &Options::gamma},
    {"--seed", "N", "seed of the random numbers", Integer{&Options::seed, kAny}},
    {"--threads", "N", "threads torch uses; 0: its own choice", Integer{&Options::threads, 0, kMostThreads}},
    {"--log-interval", "N", "steps between two losses", Integer{&Options::log_interval, 1}},
    {"--json", "FILE", "file for the figures of each epoch", &Options::json},
};

template <class Number>
Number parse_number(std::string_view name, std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw UsageError(std::string(name) + ": '" + std::string(text) + "' is not a valid number");
  }
  return value;
}

struct Assign {
  Options& options;
  std::string_view name, text;

  void operator()(Text member) const { options.*member = text; }
  void operator()(Real member) const { options.*member = parse_number<double>(name, text); }
  void operator()(Integer integer) const {
    const auto value = parse_number<std::int64_t>(name, text);
    if (value < integer.least) {
      throw UsageError(std::string(name) + ": " + std::to_string(value) + " is less than " +
                       std::to_string(integer.least));
    }
    if (value > integer.most) {
      throw UsageError(std::string(name) + ": " + std::to_string(value) + " is more than " +
                       std::to_string(integer.most));
    }
    options.*integer.member = value;
  }
};

struct ShowDefault {
  std::ostream& out;

  void operator()(Text) const {}
  void operator()(Real member) const { out << " (default: " << Options{}.*member << ")"; }
  void operator()(Integer integer) const { out << " (default: " << Options{}.*integer.member << ")"; }
};

}  // namespace

Options parse_options(const std::vector<std::string_view>& arguments) {
  Options options;
  for (auto argument = arguments.begin(); argument != arguments.end(); ++argument) {
    if (*argument == "--help" || *argument == "-h") {
      options.help = true;
      continue;
    }
    const std::size_t equals = argument->find('=');
    const std::string_view name = argument->substr(0, equals);
    const auto row = std::ranges::find(kRows, name, &Row::name);
    if (row == std::end(kRows)) throw UsageError("unknown option " + std::string(name));
    std::string_view value;
    if (equals != std::string_view::npos) {
      value = argument->substr(equals + 1);
    } else if (++argument == arguments.end()) {
      throw UsageError(std::string(name) + " needs a value");
    } else {
      value = *argument;
    }
    std::visit(Assign{options, name, value}, row->member);
  }
  return options;
}

std::string usage() {
  std::ostringstream out;
  out << "usage: mnist [OPTIONS]\n\nTrains a small convolutional network on MNIST with fused LAMB.\n\n";
  for (const Row& row : kRows) {
    const std::string option = std::string(row.name) + " " + std::string(row.metavar);
    out << "  " << std::left << std::setw(22) << option << row.help;
    std::visit(ShowDefault{out}, row.member);
    out << "\n";
  }
  return out.str();
}

}  // namespace mnist
