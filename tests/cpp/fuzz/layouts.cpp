#include "tests/cpp/fuzz/layouts.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "src/core/reduction.h"
#include "src/plan/layout.h"
#include "src/plan/overlap.h"
#include "src/plan/plan.h"

namespace fusedstep::fuzz {
namespace {

using Numbers = std::vector<int64_t>;

// Numbers from the bytes of an input; all zero once these are used up.
class Choices {
 public:
  Choices(const uint8_t* data, size_t size) : left_(data, size) {}

  int64_t below(int64_t most) {
    if (left_.empty()) return 0;
    const uint8_t byte = left_.front();
    left_ = left_.subspan(1);
    return byte % most;
  }
  // True for one byte in `n`, and never once they are used up.
  bool one_in(int64_t n) { return below(n) == n - 1; }

 private:
  std::span<const uint8_t> left_;
};

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "layouts: %s\n", what);
  std::abort();
}

// ---- Operands -------------------------------------------------------------------------------------------

Numbers sizes_of(Choices& choices, int64_t most_elements) {
  Numbers sizes(choices.below(7));
  int64_t elements = 1;
  for (int64_t& size : sizes) {
    size = choices.one_in(8) ? 1 + choices.below(200) : 1 + choices.below(9);
    if (choices.one_in(64)) size = 0;
    if (elements * size > most_elements) size = 1;
    elements = std::max<int64_t>(elements * size, 1);
  }
  return sizes;
}

int64_t product(const Numbers& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// Returns the offset of every element, in the order of indices.
Numbers offsets_of(const Numbers& sizes, const Numbers& strides) {
  Numbers offsets{0};
  for (size_t d = 0; d < sizes.size(); ++d) {
    Numbers longer;
    for (const int64_t offset : offsets) {
      for (int64_t i = 0; i < sizes[d]; ++i) longer.push_back(offset + i * strides[d]);
    }
    offsets = std::move(longer);
  }
  return offsets;
}

bool repeats(Numbers offsets) {
  std::ranges::sort(offsets);
  return std::ranges::adjacent_find(offsets) != offsets.end();
}

Numbers any_strides(Choices& choices, size_t dims, int64_t least = 0) {
  Numbers strides(dims);
  for (int64_t& stride : strides) stride = least + choices.below(48);
  return strides;
}

// Dimensions in any order, with gaps between elements and behind rows.
Numbers nested_strides(Choices& choices, const Numbers& sizes) {
  Numbers strides(sizes.size());
  std::vector<size_t> order(sizes.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  for (size_t d = 0; choices.one_in(2) && d < order.size(); ++d) {
    std::swap(order[d], order[choices.below(static_cast<int64_t>(order.size()))]);
  }
  const bool has_gaps = choices.one_in(2);
  int64_t extent = 1;
  for (const size_t dim : order) {
    strides[dim] = extent * (has_gaps ? 1 + choices.below(3) : 1);
    extent = strides[dim] * std::max<int64_t>(sizes[dim], 1) + (has_gaps ? choices.below(3) : 0);
  }
  return strides;
}

Numbers strides_without_overlap(Choices& choices, const Numbers& sizes) {
  if (choices.one_in(4)) {
    Numbers strides = any_strides(choices, sizes.size());
    if (!repeats(offsets_of(sizes, strides))) return strides;
  }
  return nested_strides(choices, sizes);
}

Numbers gradient_strides(Choices& choices, const Numbers& sizes) {
  if (choices.one_in(6)) return any_strides(choices, sizes.size());
  Numbers strides = nested_strides(choices, sizes);
  for (int64_t& stride : strides) {
    if (choices.one_in(8)) stride = 0;
  }
  return strides;
}

// The strides of the operands of one tensor, alike or each for itself.
std::vector<Numbers> operands_of(Choices& choices, const Numbers& sizes, int count) {
  std::vector<Numbers> operands{strides_without_overlap(choices, sizes)};
  for (int k = 1; k < count; ++k) {
    const bool alike = choices.below(3) != 2;
    operands.push_back(alike        ? operands[0]
                       : k == kGrad ? gradient_strides(choices, sizes)
                                    : strides_without_overlap(choices, sizes));
  }
  return operands;
}

// ---- Layouts --------------------------------------------------------------------------------------------

void check_overlap(Choices& choices) {
  const Numbers sizes = sizes_of(choices, 2000);
  const Numbers strides = any_strides(choices, sizes.size(), /*least=*/-8);
  expect(overlaps_itself(sizes, strides) == repeats(offsets_of(sizes, strides)), "overlaps_itself");
}

using Places = std::array<int64_t, kMaxOperands>;  // of one element in each operand

// Adds the elements of units [begin, end) of a walk.
void walk(const Layout& layout, int operands, int64_t begin, int64_t end, std::vector<Places>& visited) {
  if (begin == end) return;
  if (layout.dense()) {
    for (int64_t i = begin; i < end; ++i) {
      std::fill_n(visited.emplace_back(Places{}).begin(), operands, i);
    }
    return;
  }
  const BlockLayout& blocks = *layout.blocks();
  BlockWalk blocks_walked(blocks, operands, begin);
  for (int64_t unit = begin; unit < end; ++unit) {
    if (unit != begin) blocks_walked.go_to(unit);
    const Block& block = blocks_walked.block();
    const Block located = locate(blocks, operands, unit);
    expect(block.rows == located.rows && block.columns == located.columns, "the size of a block");
    expect(std::equal(block.offset, block.offset + operands, located.offset), "the offset of a block");
    expect(block.rows > 0 && block.columns > 0, "an empty block");
    expect(block.rows <= blocks.extent[0] && block.columns <= blocks.extent[1], "a block beyond its extent");
    if (blocks.blocks_per_tile > 1) {
      expect(block.rows == blocks.extent[0] && block.columns == blocks.extent[1], "a cut block in a tile");
    }
    for (int64_t row = 0; row < block.rows; ++row) {
      for (int64_t column = 0; column < block.columns; ++column) {
        Places& places = visited.emplace_back(Places{});
        for (int k = 0; k < operands; ++k) {
          const int64_t* strides = blocks.strides + (k + 1) * blocks.dims - 2;
          places[k] = block.offset[k] + row * strides[0] + column * strides[1];
        }
      }
    }
  }
}

void check_layout(Choices& choices) {
  const Numbers sizes = sizes_of(choices, 6000);
  const int operands = 2 + static_cast<int>(choices.below(kMaxOperands - 1));
  const std::vector<Numbers> strides = operands_of(choices, sizes, operands);
  const std::vector<Dims> dims(strides.begin(), strides.end());
  const Layout layout(sizes, dims);
  if (!layout.dense()) {
    const BlockLayout& blocks = *layout.blocks();
    const int64_t elements = layout.elements_per_unit();
    expect(elements == blocks.extent[0] * blocks.extent[1] && elements <= kTileElements,
           "the size of a block");
    expect(blocks.blocks_per_tile >= 1 && blocks.blocks_per_tile <= kTileBlocks &&
               blocks.blocks_per_tile * elements <= kTileElements,
           "blocks of a tile");
  }
  const int64_t seam = layout.units() * choices.below(256) / 256;
  std::vector<Places> visited, expected(product(sizes));
  walk(layout, operands, seam, layout.units(), visited);
  walk(layout, operands, 0, seam, visited);
  for (int k = 0; k < operands; ++k) {
    const Numbers offsets = offsets_of(sizes, strides[k]);
    for (size_t i = 0; i < expected.size(); ++i) expected[i][k] = offsets[i];
  }
  std::ranges::sort(visited);
  std::ranges::sort(expected);
  expect(visited == expected, "a walk visits each element once, in each operand at its place");
}

// ---- Plans ----------------------------------------------------------------------------------------------

struct Range {
  int64_t begin, end;  // addresses
  bool operator<(const Range& other) const { return begin < other.begin; }
  bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
};

// One tensor of a list. Nobody looks at what lies at its addresses.
struct Listed {
  Numbers sizes;
  std::vector<Numbers> strides;
  DType dtype = DType::kFloat, state_dtype = DType::kFloat;
  Numbers addresses;  // of operands

  TensorView view(int operand) const {
    return {reinterpret_cast<void*>(addresses[operand]), operand < kFirstState ? dtype : state_dtype, sizes,
            strides[operand]};
  }
  TensorOperands operands() const {
    TensorOperands operands{view(kWeight), view(kGrad), {}};
    for (size_t k = kFirstState; k < strides.size(); ++k) {
      operands.states[k - kFirstState] = view(static_cast<int>(k));
    }
    return operands;
  }
  std::vector<Range> elements(int operand) const {
    std::vector<Range> elements;
    for (const int64_t offset : offsets_of(sizes, strides[operand])) {
      const int64_t begin = addresses[operand] + offset * element_size(dtype);
      elements.push_back({begin, begin + element_size(dtype)});
    }
    return elements;
  }
  // From the first to the last byte of the weight or the gradient.
  Range extent(int operand) const {
    const std::vector<Range> all = elements(operand);
    if (all.empty()) return {0, 0};
    return {all.front().begin, std::ranges::max(all, {}, &Range::end).end};
  }
};

// Mostly behind all that there is so far; at times in the middle of it.
int64_t address_of(Choices& choices, int64_t& end, int64_t bytes) {
  constexpr int64_t kStart = int64_t{1} << 40;
  if (choices.one_in(12)) return kStart + choices.below(256) * 8;
  const int64_t begin = kStart + end + choices.below(4) * 8;
  end = begin - kStart + bytes;
  return begin;
}

Listed listed(Choices& choices, int slots, int64_t& end) {
  static constexpr DType kDTypes[] = {DType::kFloat, DType::kDouble, DType::kBFloat16, DType::kHalf};
  Listed tensor;
  tensor.sizes = sizes_of(choices, choices.one_in(4) ? 20000 : 100);
  tensor.strides = operands_of(choices, tensor.sizes, kFirstState + slots);
  tensor.dtype = tensor.state_dtype = kDTypes[choices.below(4)];
  if (element_size(tensor.dtype) == 2 && choices.one_in(2)) tensor.state_dtype = DType::kFloat;
  for (int k = 0; k < kFirstState + slots; ++k) {
    int64_t last = 0;
    for (size_t d = 0; d < tensor.sizes.size(); ++d) {
      last += std::max<int64_t>(tensor.sizes[d] - 1, 0) * tensor.strides[k][d];
    }
    const DType dtype = k < kFirstState ? tensor.dtype : tensor.state_dtype;
    tensor.addresses.push_back(address_of(choices, end, (last + 1) * element_size(dtype)));
  }
  return tensor;
}

bool throws(Plan& plan) {
  try {
    plan.check_weights_apart();
  } catch (const std::runtime_error&) {
    return true;
  }
  return false;
}

void check_memory(Plan& plan, const std::vector<Listed>& list) {
  std::vector<Range> elements;
  for (const Listed& tensor : list) {
    const std::vector<Range> more = tensor.elements(kWeight);
    elements.insert(elements.end(), more.begin(), more.end());
  }
  std::ranges::sort(elements, std::less<>());
  const auto meet = [](const Range& a, const Range& b) { return a.meets(b); };
  const auto is_in_a_weight = [&](const Range& element) {
    const auto next = std::ranges::lower_bound(elements, element, std::less<>());
    return (next != elements.end() && next->meets(element)) ||
           (next != elements.begin() && std::prev(next)->meets(element));
  };
  const auto shares = [&](const Listed& tensor) {
    const std::vector<Range> grad = tensor.elements(kGrad);
    return !std::ranges::equal(grad, tensor.elements(kWeight), {}, &Range::begin, &Range::begin) &&
           std::ranges::any_of(grad, is_in_a_weight);
  };
  expect(throws(plan) == (std::ranges::adjacent_find(elements, meet) != elements.end() ||
                          std::ranges::any_of(list, shares)),
         "weights that share memory, or have a gradient in theirs");

  Plan* plans[] = {&plan};
  Plan::find_aliasing_grads(plans);
  for (size_t i = 0; i < list.size(); ++i) {
    const Range grad = list[i].extent(kGrad);
    bool is_apart = !repeats(offsets_of(list[i].sizes, list[i].strides[kGrad]));
    for (size_t other = 0; other < list.size(); ++other) {
      is_apart = is_apart && !grad.meets(list[other].extent(kWeight));
      is_apart = is_apart && (other == i || !grad.meets(list[other].extent(kGrad)));
    }
    expect(plan.grad_is_writable(i) == is_apart, "gradients that share memory");
  }
}

void check_chunks(const Plan& plan, const std::vector<Listed>& list, int64_t wave_bytes) {
  std::vector<int> waves_of(plan.chunks().size(), 0);
  int64_t next = 0;
  for (const Wave& wave : plan.waves()) {
    expect(wave.first >= next && wave.first < wave.last, "the order of waves");
    next = wave.last;
    int64_t bytes = 0, tensors = 0;
    for (int64_t c = wave.first; c < wave.last; ++c) ++waves_of[c];
    for (size_t i = 0; i < list.size(); ++i) {
      const bool is_inside = plan.first_chunk(i) >= wave.first && plan.first_chunk(i) < wave.last;
      if (!is_inside || plan.has_one_chunk(i) || plan.empty(i)) continue;
      ++tensors;
      for (size_t k = 0; k < list[i].strides.size(); ++k) {
        bytes += product(list[i].sizes) * plan.task(i).element_size[k];
      }
    }
    expect(tensors == 1 || (tensors > 1 && bytes <= wave_bytes), "the size of a wave");
  }
  int64_t chunk = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::vector<Dims> strides(list[i].strides.begin(), list[i].strides.end());
    const Layout layout(list[i].sizes, strides);
    int64_t unit = 0;
    expect(plan.first_chunk(i) == chunk, "a tensor's first chunk");
    for (; unit < layout.units(); ++chunk) {
      const Chunk& part = plan.chunks()[chunk];
      const int64_t elements = (part.end - part.begin) * layout.elements_per_unit();
      expect(part.tensor == i && part.begin == unit && part.end > unit, "chunks cover a tensor in order");
      expect(elements <= std::max(kChunkElements, layout.elements_per_unit()), "the size of a chunk");
      expect(plan.cost()[chunk + 1] - plan.cost()[chunk] == elements, "the cost of a chunk");
      const bool single = plan.has_one_chunk(i);
      expect(plan.single_cost()[chunk + 1] - plan.single_cost()[chunk] == (single ? elements : 0),
             "the cost of a tensor's only chunk");
      expect(single || waves_of[chunk] == 1, "a chunk's wave");
      unit = part.end;
    }
    expect(unit == layout.units(), "chunks end with their tensor");
    expect(plan.empty(i) == (product(list[i].sizes) == 0), "empty tensors");
  }
  expect(chunk == static_cast<int64_t>(plan.chunks().size()), "chunks of no tensor");
  expect(plan.first_chunk(list.size()) == chunk, "the end of chunks");
}

void check_plan(Choices& choices) {
  const int slots = 1 + static_cast<int>(choices.below(kMaxStates));
  int64_t end = 0;
  std::vector<Listed> list;
  for (int64_t left = 1 + choices.below(6); left > 0; --left) list.push_back(listed(choices, slots, end));
  Plan plan(list.size(), slots);
  for (size_t i = 0; i < list.size(); ++i) plan.bind(i, list[i].operands());
  for (int step = 0; step < 3; ++step) {  // something else has moved at each
    const int64_t wave_bytes = 1024 << choices.below(12);
    check_memory(plan, list);
    plan.refresh(wave_bytes);
    check_chunks(plan, list, wave_bytes);
    const auto i = static_cast<size_t>(choices.below(static_cast<int64_t>(list.size())));
    const int64_t what = choices.below(3);
    if (what == 0) {
      Listed other = listed(choices, slots, end);
      if (choices.one_in(2)) other.addresses = list[i].addresses;
      list[i] = std::move(other);
      plan.bind(i, list[i].operands());
    } else if (what == 1) {
      list[i].addresses[choices.below(kFirstState + slots)] = address_of(choices, end, 1 << 16);
      plan.bind(i, list[i].operands());
    } else {
      list[i].addresses[kGrad] = address_of(choices, end, 1 << 16);
      plan.move_grad(i, list[i].view(kGrad).data);
    }
  }
}

}  // namespace
}  // namespace fusedstep::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fusedstep::fuzz::Choices choices(data, size);
  switch (choices.below(3)) {
    case 0:
      fusedstep::fuzz::check_overlap(choices);
      break;
    case 1:
      fusedstep::fuzz::check_layout(choices);
      break;
    default:
      fusedstep::fuzz::check_plan(choices);
  }
  return 0;
}
