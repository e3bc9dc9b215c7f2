// Which instruction sets there are, which one runs, and where states are placed.
#include "fusedstep/isa.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

#include "src/plan/placement.h"
#include "tests/cpp/model.h"

namespace fusedstep::test {
namespace {

// ---- Instruction sets -----------------------------------------------------------------------------------

std::string message_of(void (*use)()) {
  try {
    use();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

std::string known() {
  std::string names;
  for (const auto& list : {product_isas(), isas()}) {
    for (const std::string& name : list) names += (names.empty() ? "" : ", ") + name;
  }
  return names;
}

class IsaTest : public testing::Test {
 protected:
  void SetUp() override {
    unsetenv("FUSEDSTEP_ISA");
    force_isa("");
  }
  void TearDown() override { SetUp(); }
};

#if defined(__x86_64__)

// The kernel's account of the CPU, not the compiler's.
std::set<std::string> cpu_flags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0) continue;
    std::istringstream words(line);
    return {std::istream_iterator<std::string>(words), std::istream_iterator<std::string>()};
  }
  return {};
}

TEST_F(IsaTest, ListsWhatTheCpuHasBestFirst) {
  const std::set<std::string> flags = cpu_flags();
  const auto has = [&](std::initializer_list<const char*> wanted) {
    return std::ranges::all_of(wanted, [&](const char* flag) { return flags.count(flag) != 0; });
  };
  std::vector<std::string> expected;
  if (has({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"})) expected.emplace_back("avx512");
  if (has({"avx2", "fma", "f16c"})) expected.emplace_back("avx2");
  expected.emplace_back("base");
  EXPECT_EQ(isas(), expected);
  std::vector<std::string> of_products;
  if (has({"avx512f", "avx512_bf16", "amx_tile", "amx_bf16"})) of_products.emplace_back("amx");
  if (has({"avx512f", "avx512_bf16"})) of_products.emplace_back("avx512bf16");
  EXPECT_EQ(product_isas(), of_products);
}

#endif

TEST_F(IsaTest, TheBestIsUsed) { EXPECT_EQ(isa(), isas().front()); }

TEST_F(IsaTest, TheForcedOneRuns) {
  const Case test_case = all_cases().front();
  Model model(test_case, dense_tensors(test_case, {100}));
  model.fill_grads(1);
  for (const std::string& name : isas()) {
    force_isa(name);
    EXPECT_EQ(isa(), name);
    model.step({});
    EXPECT_EQ(model.plan().memory().ran_on, name);
  }
  force_isa("");
  EXPECT_EQ(isa(), isas().front());
}

TEST_F(IsaTest, ALevelOfProductsHasTheOtherKernelsOfAvx512) {
  EXPECT_EQ(product_isa(), product_isas().empty() ? "" : product_isas().front());
  for (const std::string& name : product_isas()) {
    force_isa(name);
    EXPECT_EQ(product_isa(), name);
    EXPECT_EQ(isa(), "avx512");
  }
  for (const std::string& name : isas()) {
    force_isa(name);
    EXPECT_EQ(product_isa(), "");
  }
}

TEST_F(IsaTest, AnUnknownOneIsRefusedAndChangesNothing) {
  force_isa("base");
  EXPECT_EQ(message_of([] { force_isa("sse9"); }),
            "force_isa: 'sse9' is not an instruction set of this machine (" + known() + ")");
  EXPECT_EQ(message_of([] { force_isa("AVX2"); }),
            "force_isa: 'AVX2' is not an instruction set of this machine (" + known() + ")");
  EXPECT_EQ(isa(), "base");
}

TEST_F(IsaTest, TheEnvironmentChooses) {
  setenv("FUSEDSTEP_ISA", "base", 1);
  force_isa("");
  EXPECT_EQ(isa(), "base");
  setenv("FUSEDSTEP_ISA", "", 1);
  force_isa("");
  EXPECT_EQ(isa(), isas().front());
}

TEST_F(IsaTest, AnUnknownOneInTheEnvironmentIsRefusedAndChangesNothing) {
  force_isa("base");
  setenv("FUSEDSTEP_ISA", "sse9", 1);
  EXPECT_EQ(message_of([] { force_isa(""); }),
            "FUSEDSTEP_ISA: 'sse9' is not an instruction set of this machine (" + known() + ")");
  EXPECT_EQ(isa(), "base");
}

// ---- Placement ------------------------------------------------------------------------------------------

const void* at(int64_t address) { return reinterpret_cast<const void*>(address); }

// The distance of two offsets in a page, either way round.
int64_t apart(int64_t a, int64_t b) {
  const int64_t distance = ((a - b) % kPage + kPage) % kPage;
  return std::min(distance, kPage - distance);
}

TEST(PlacementTest, StatesStartApartFromEachOtherAndFromTheWeight) {
  for (int slots = 1; slots <= kMaxStates; ++slots) {
    for (const int64_t weight : {0x10000, 0x10040, 0x10fc0, 0x10010, 0x12345670}) {
      for (const int64_t allocation : {0x800000, 0x800010, 0x800040, 0x800ff0, 0x7654320}) {
        std::vector<int64_t> starts = {weight};
        for (int slot = 0; slot < slots; ++slot) {
          const int64_t offset = placement_offset(at(allocation), at(weight), slot, slots);
          ASSERT_GE(offset, 0);
          ASSERT_LT(offset, kPage);
          ASSERT_EQ(offset % kLine, 0);  // keeps the allocation's alignment
          // As far as it goes, but for rounding to lines: of the distance and of both addresses.
          for (const int64_t start : starts) {
            ASSERT_GE(apart(allocation + offset, start), kPage / (slots + 1) - 3 * kLine)
                << "slot " << slot << " of " << slots << ", weight " << weight << ", allocation "
                << allocation;
          }
          starts.push_back(allocation + offset);
        }
      }
    }
  }
}

TEST(PlacementTest, AskingForHugePagesChangesNoByte) {
  const int64_t huge = int64_t{2} << 20, bytes = 5 * huge;
  auto* memory = static_cast<unsigned char*>(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(memory, MAP_FAILED);
  const auto pattern = [](int64_t i) { return static_cast<unsigned char>(i * 7 + (i >> 12)); };
  for (int64_t i = 0; i < bytes; ++i) memory[i] = pattern(i);
  ask_for_huge_pages(memory, bytes);
  ask_for_huge_pages(memory + 1, bytes - 1);
  ask_for_huge_pages(memory + 4096, huge);
  ask_for_huge_pages(memory + 123, 45);
  ask_for_huge_pages(memory, 0);
  ask_for_huge_pages(nullptr, 0);
  for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ(memory[i], pattern(i)) << "byte " << i;
  munmap(memory, bytes);
}

}  // namespace
}  // namespace fusedstep::test
