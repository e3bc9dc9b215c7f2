// The fuzz target over the same pseudo-random inputs each time, for whoever has no libFuzzer.
#include "tests/cpp/fuzz/layouts.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace fusedstep::test {
namespace {

TEST(LayoutFuzzTest, PseudoRandomInputs) {
  std::mt19937 random(1);
  for (int input = 0; input < 5000; ++input) {
    std::vector<uint8_t> bytes(random() % 400);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
}

}  // namespace
}  // namespace fusedstep::test
