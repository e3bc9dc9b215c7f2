// Layouts of a walk over a tensor. It visits every element once.
#include "src/plan/layout.h"
#include "src/plan/overlap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "tests/cpp/layouts.h"

namespace fusedstep::test {
namespace {

// ---- Overlap --------------------------------------------------------------------------------------------

struct OverlapCase {
  const char* name;
  Sizes sizes, strides;
  bool overlaps;
};

TEST(OverlapTest, SharedMemoryIsFound) {
  const OverlapCase cases[] = {
      {"scalar", {}, {}, false},
      {"contiguous", {3, 4}, {4, 1}, false},
      {"transposed", {3, 4}, {1, 3}, false},
      {"rows with gaps", {3, 4}, {9, 1}, false},
      {"columns with gaps", {3, 4}, {8, 2}, false},
      {"expanded rows", {3, 4}, {0, 1}, true},
      {"expanded columns", {3, 4}, {1, 0}, true},
      {"one number expanded", {5}, {0}, true},
      {"expanded along a dimension of one", {1, 4}, {0, 1}, false},
      {"empty", {0, 4}, {0, 0}, false},
      {"sliding windows", {5, 3}, {1, 1}, true},
      {"sliding windows that only touch", {5, 3}, {3, 1}, false},
      {"sliding windows that share an end", {5, 4}, {3, 1}, true},
      {"interleaved without meeting", {3, 2}, {2, 3}, false},  // offsets 0 3 2 5 4 7
      {"interleaved and meeting", {4, 2}, {2, 6}, true},       // offsets 0 6 2 8 4 10 6 12
      {"dimensions of one with any stride", {1, 4, 1}, {1, 1, 1}, false},
  };
  for (const OverlapCase& c : cases) EXPECT_EQ(overlaps_itself(c.sizes, c.strides), c.overlaps) << c.name;
}

// ---- What is recognised ---------------------------------------------------------------------------------

Layout layout_of(const Sizes& sizes, const std::vector<Sizes>& strides) {
  const std::vector<Dims> dims(strides.begin(), strides.end());
  return Layout(sizes, dims);
}

TEST(LayoutTest, DenseInAnyOrder) {
  const Sizes sizes = {2, 1, 3, 5, 4};
  std::vector<int> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  do {
    const Sizes strides = dense(sizes, order).strides;
    const Layout layout = layout_of(sizes, {strides, strides, strides});
    ASSERT_TRUE(layout.dense());
    ASSERT_EQ(layout.blocks(), nullptr);
    ASSERT_EQ(layout.units(), 120);
    ASSERT_EQ(layout.elements_per_unit(), 1);
  } while (std::ranges::next_permutation(order).found);
}

TEST(LayoutTest, DimensionsOfOneHaveNoStride) {
  EXPECT_TRUE(layout_of({1, 6, 1}, {{1, 1, 77}, {600, 1, 0}}).dense());
  EXPECT_TRUE(layout_of({1, 1}, {{5, 5}, {0, 9}}).dense());
}

TEST(LayoutTest, NothingToWalk) {
  const Layout layout = layout_of({4, 0, 3}, {{1, 2, 3}, {3, 2, 1}});
  EXPECT_TRUE(layout.dense());
  EXPECT_EQ(layout.units(), 0);
}

TEST(LayoutTest, NotDense) {
  EXPECT_FALSE(layout_of({6}, {{2}, {2}}).dense());           // gaps
  EXPECT_FALSE(layout_of({3, 4}, {{4, 1}, {1, 3}}).dense());  // two orders
  EXPECT_FALSE(layout_of({3, 4}, {{4, 1}, {0, 1}}).dense());  // an expanded gradient
  EXPECT_FALSE(layout_of({3, 4}, {{5, 1}, {4, 1}}).dense());  // gaps in one operand
  EXPECT_FALSE(layout_of({3, 4}, {{8, 2}, {8, 2}}).dense());  // the same gaps in both
}

struct CoalesceCase {
  const char* name;
  Sizes sizes;
  std::vector<Sizes> strides;
  Sizes expected;  // sizes of the walk, the last one fastest
};

TEST(LayoutTest, NeighboursMergeWhereEveryOperandAllows) {
  const CoalesceCase cases[] = {
      {"slice of the outermost dimension", {4, 5, 6}, {{60, 6, 1}, {60, 6, 1}}, {4, 30}},
      {"slice of the middle dimension", {4, 5, 6}, {{48, 6, 1}, {48, 6, 1}}, {4, 30}},
      {"slice of the innermost dimension", {4, 5, 6}, {{40, 8, 1}, {40, 8, 1}}, {20, 6}},
      {"every second element", {4, 5, 6}, {{60, 12, 2}, {60, 12, 2}}, {1, 120}},
      {"an operand in the way", {4, 5, 6}, {{30, 6, 1}, {30, 6, 1}, {60, 6, 1}}, {4, 30}},
      {"expanded gradient", {4, 5, 6}, {{30, 6, 1}, {0, 0, 1}}, {20, 6}},
      {"gradient of one number", {4, 5, 6}, {{30, 6, 1}, {0, 0, 0}}, {1, 120}},
      {"the weight's order", {4, 5, 6}, {{1, 48, 8}, {1, 48, 8}}, {30, 4}},
  };
  for (const CoalesceCase& c : cases) {
    const Layout layout = layout_of(c.sizes, c.strides);
    ASSERT_FALSE(layout.dense()) << c.name;
    const BlockLayout& blocks = *layout.blocks();
    EXPECT_EQ(Sizes(blocks.sizes, blocks.sizes + blocks.dims), c.expected) << c.name;
  }
}

// A GPU keeps offsets within a block, and within the blocks of a tile, in 32 bits.
TEST(LayoutTest, BlocksAreCutWhereStridesAreHuge) {
  constexpr int64_t kHuge = int64_t{1} << 28, kMost = std::numeric_limits<int32_t>::max();
  struct HugeCase {
    const char* name;
    Sizes sizes;
    std::vector<Sizes> strides;
  };
  const HugeCase cases[] = {
      {"transposed", {64, kHuge}, {{kHuge, 1}, {1, 64}}},
      {"transposed, few rows", {9, 7 * kHuge}, {{7 * kHuge, 1}, {1, 9}}},
      {"few columns", {kHuge, 9}, {{1, kHuge}, {9, 1}}},
      {"small blocks", {kHuge, 2, 3}, {{6, 3, 1}, {1, 3 * kHuge, kHuge}}},
      {"narrow rows", {kHuge, 200}, {{40 * kHuge, 1}, {200, 1}}},
      {"far columns", {5, 300}, {{1, 8 * kHuge}, {300, 1}}},
  };
  for (const HugeCase& c : cases) {
    SCOPED_TRACE(c.name);
    const Layout layout = layout_of(c.sizes, c.strides);
    const BlockLayout& blocks = *layout.blocks();
    // All elements of the first tiles, and of some in the middle, from the first of each.
    for (const int64_t first : {int64_t{0}, layout.units() / 2}) {
      const int64_t last = std::min<int64_t>(first + blocks.blocks_per_tile, layout.units());
      const auto operands = static_cast<int>(c.strides.size());
      const Block start = locate(blocks, operands, first);
      for (int64_t i = first; i < last; ++i) {
        const Block block = locate(blocks, operands, i);
        for (int k = 0; k < operands; ++k) {
          const int64_t* strides = blocks.strides + (k + 1) * blocks.dims - 2;
          const int64_t end =
              block.offset[k] + (block.rows - 1) * strides[0] + (block.columns - 1) * strides[1];
          ASSERT_LE(std::abs(block.offset[k] - start.offset[k]), kMost);
          ASSERT_LE(std::abs(end - start.offset[k]), kMost);
        }
      }
      EXPECT_GE(layout.elements_per_unit(), 1);
    }
  }
}

// ---- Every element exactly once -------------------------------------------------------------------------

// Adagrad with these numbers moves every weight by one against the sign of its gradient, and adds the
// gradient's square to the state: all of it exact in every dtype. An element visited twice, missed, or taken
// together with another one's gradient or state shows.
const rules::AdagradHyper kCounting{.lr = 1, .lr_decay = 0, .weight_decay = 0, .eps = 0};

void expect_every_element_once(const Case& counting, const Sizes& sizes, const Forms& forms, int threads) {
  Model model(counting, {Tensor(counting, sizes, forms, /*seed=*/0, /*margin=*/16)});
  Tensor& tensor = model.tensors()[0];
  const auto weight_before = [](int64_t i) { return static_cast<double>(i % 61) - 30; };
  for (int64_t i = 0; i < tensor.weight.elements(); ++i) {
    const double magnitude = 1 + static_cast<double>(i % 13);
    tensor.grad.set(i, i % 3 == 0 ? magnitude : -magnitude);
    tensor.weight.set(i, weight_before(i));
  }
  model.step({.threads = threads});
  ASSERT_TRUE(tensor.fill_untouched());
  for (int64_t i = 0; i < tensor.weight.elements(); ++i) {
    const double g = tensor.grad.get(i);
    ASSERT_EQ(tensor.states[0].get(i), g * g) << "element " << i;
    ASSERT_EQ(tensor.weight.get(i), weight_before(i) - (g > 0 ? 1 : -1)) << "element " << i;
  }
}

TEST(LayoutTest, EveryElementIsVisitedOnce) {
  Case counting{{"counting", 1, false, bind_rule<rules::Adagrad>(kCounting, 0), nullptr}, DType::kFloat};
  for (unsigned seed = 0; seed < 600; ++seed) {
    RandomLayouts random(seed);
    const Sizes sizes = random.sizes();
    counting.dtype = counting.state_dtype = kDTypes[random.below(4)];
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", sizes " << testing::PrintToString(sizes));
    ASSERT_NO_FATAL_FAILURE(
        expect_every_element_once(counting, sizes, random.forms(sizes), 1 + random.below(3)));
  }
}

}  // namespace
}  // namespace fusedstep::test
