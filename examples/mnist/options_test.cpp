#include "options.h"

#include <gtest/gtest.h>

namespace mnist {
namespace {

TEST(Options, DefaultsAreThoseOfTheConvergenceCheck) {
  const Options options = parse_options({});
  EXPECT_EQ(options.epochs, 14);
  EXPECT_EQ(options.batch_size, 64);
  EXPECT_EQ(options.test_batch_size, 1000);
  EXPECT_EQ(options.lr, 0.01);
  EXPECT_EQ(options.gamma, 0.7);
}

TEST(Options, ReadsEveryOption) {
  const Options options = parse_options({"--data", "a b", "--epochs=2", "--batch-size", "3",
                                         "--test-batch-size=4", "--lr", "5e-3", "--gamma=.6", "--seed", "-7",
                                         "--threads", "8", "--log-interval", "9", "--json=x=y"});
  EXPECT_EQ(options.data, "a b");
  EXPECT_EQ(options.epochs, 2);
  EXPECT_EQ(options.batch_size, 3);
  EXPECT_EQ(options.test_batch_size, 4);
  EXPECT_EQ(options.lr, 5e-3);
  EXPECT_EQ(options.gamma, 0.6);
  EXPECT_EQ(options.seed, -7);
  EXPECT_EQ(options.threads, 8);
  EXPECT_EQ(options.log_interval, 9);
  EXPECT_EQ(options.json, "x=y");
}

TEST(Options, TheLastOneCounts) { EXPECT_EQ(parse_options({"--epochs", "2", "--epochs=3"}).epochs, 3); }

TEST(Options, HelpListsThemAll) {
  EXPECT_TRUE(parse_options({"--help"}).help);
  for (const char* line : {"--data DIR", "--epochs N", "--json FILE", "(default: 0.01)", "(default: 14)"}) {
    EXPECT_NE(usage().find(line), std::string::npos) << line;
  }
}

struct Bad {
  std::vector<std::string_view> arguments;
  std::string error;
};

TEST(Options, RefusesWhatItCannotRead) {
  const Bad cases[] = {
      {{"--epoch", "1"}, "unknown option --epoch"},
      {{"data"}, "unknown option data"},
      {{"--epochs"}, "--epochs needs a value"},
      {{"--epochs", "1.5"}, "--epochs: '1.5' is not a valid number"},
      {{"--epochs="}, "--epochs: '' is not a valid number"},
      {{"--lr", "fast"}, "--lr: 'fast' is not a valid number"},
      {{"--seed", "99999999999999999999"}, "--seed: '99999999999999999999' is not a valid number"},
      {{"--batch-size", "0"}, "--batch-size: 0 is less than 1"},
      {{"--threads", "-1"}, "--threads: -1 is less than 0"},
      {{"--threads", "100000"}, "--threads: 100000 is more than 1024"},
  };
  for (const Bad& bad : cases) {
    try {
      parse_options(bad.arguments);
      ADD_FAILURE() << "no error; expected: " << bad.error;
    } catch (const UsageError& error) {
      EXPECT_EQ(error.what(), bad.error);
    }
  }
}

}  // namespace
}  // namespace mnist
