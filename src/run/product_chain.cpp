#include "src/run/product_chain.h"

#include <algorithm>
#include <utility>

#include "src/run/load_balance.h"
#include "src/run/session.h"

namespace fusedstep {
namespace {

// What a block costs, in elements of an update: to be packed, and to be multiplied by another.
constexpr int64_t kPacked = 1024, kMultiplied = 128;

// The blocks along a side of a square. A large square reads operands less often, a small one leaves work for
// more threads: a stage has large ones where each thread gets so many.
constexpr int64_t kLarge = cpu::kMostSquareBlocks, kSmall = 2, kLargeForEach = 8;

// The blocks along the sides of a part of a task, where a square's side has so many. A part of a wide product
// covers the shorter side of the result as far as possible, since it packs the operand of the longer side.
std::pair<int64_t, int64_t> part_sides(const ProductChain::Task& task, int64_t side) {
  const auto* wide = std::get_if<cpu::WideProduct>(&task);
  if (wide == nullptr) return {side, side};
  if (side < kLarge) return {kLarge, kLarge};
  constexpr int64_t kMostSummed = 16, kMostFinished = 32;  // the latter one sum after another
  const bool is_deep = wide->depth > cpu::kWideDepth;
  const int64_t shorter = std::min({wide->rows, wide->columns, is_deep ? kMostSummed : kMostFinished});
  const int64_t longer =
      is_deep ? std::min(cpu::kMostWideBlocks, cpu::kMostWideSums / shorter) : cpu::kMostWideBlocks / 2;
  return wide->left_is_packed() ? std::pair(shorter, longer) : std::pair(longer, shorter);
}

// The parts of a task, in an order in which neighbours have operands in common: down the columns of a whole
// matrix, and along the rows of a symmetric matrix up to the diagonal.
template <class Use>
void each_square(const ProductChain::Task& task, int64_t side, Use use) {
  const auto sides = [&](const auto& known) { return std::pair(known.rows, known.columns); };
  const auto [rows, columns] = std::visit(sides, task);
  const auto* product = std::get_if<cpu::Product>(&task);
  const auto [high, wide] = part_sides(task, side);
  const auto use_at = [&, high = high, wide = wide](int64_t i, int64_t j) {
    use(cpu::Square{0, i, j, std::min(high, rows - i), std::min(wide, columns - j)});
  };
  if (product != nullptr && product->is_symmetric) {
    for (int64_t i = 0; i < rows; i += high) {
      for (int64_t j = 0; j <= i; j += wide) use_at(i, j);
    }
  } else {
    for (int64_t j = 0; j < columns; j += wide) {
      for (int64_t i = 0; i < rows; i += high) use_at(i, j);
    }
  }
}

int64_t cost_of(const ProductChain::Task& task, const cpu::Square& square) {
  const int64_t blocks = square.rows * square.columns;
  if (const auto* wide = std::get_if<cpu::WideProduct>(&task)) {
    const int64_t products = wide->parts == 1 ? 1 : 3;
    return blocks * (kPacked + products * kMultiplied * wide->depth) +
           (wide->left_is_packed() ? square.columns : square.rows) * wide->depth * kPacked;
  }
  if (const auto* factors = std::get_if<cpu::RowFactors>(&task)) return blocks * factors->rows * kPacked;
  const auto* product = std::get_if<cpu::Product>(&task);
  if (product == nullptr) return blocks * kPacked;
  const bool is_cut = product->is_symmetric && square.i == square.j;
  return (is_cut ? (blocks + square.rows) / 2 : blocks) * (kPacked + kMultiplied * product->depth);
}

// The work of a task in a stage: its squares in one matrix, and the first of its items among the stage's.
struct Part {
  const ProductChain::Task* task;
  int64_t first;
  std::vector<cpu::Square> squares;
};

struct Work {
  std::vector<Part> parts;
  std::vector<int64_t> cost = {0};  // of all items before each

  void add(const ProductChain::Task& task, int64_t matrices, int64_t side) {
    Part part{&task, static_cast<int64_t>(cost.size()) - 1, {}};
    each_square(task, side, [&](const cpu::Square& square) { part.squares.push_back(square); });
    for (int64_t matrix = 0; matrix < matrices; ++matrix) {
      for (const cpu::Square& square : part.squares) cost.push_back(cost.back() + cost_of(task, square));
    }
    parts.push_back(std::move(part));
  }

  void run_item(const cpu::ProductKernels& kernels, int64_t item) const {
    const Part& part = *(std::ranges::upper_bound(parts, item, {}, &Part::first) - 1);
    const auto squares = static_cast<int64_t>(part.squares.size());
    cpu::Square square = part.squares[(item - part.first) % squares];
    square.matrix = (item - part.first) / squares;
    if (const auto* product = std::get_if<cpu::Product>(part.task)) kernels.multiply(*product, square);
    if (const auto* packing = std::get_if<cpu::WidePacking>(part.task)) kernels.pack_wide(*packing, square);
    if (const auto* wide = std::get_if<cpu::WideProduct>(part.task)) kernels.multiply_wide(*wide, square);
    if (const auto* packing = std::get_if<cpu::Packing>(part.task)) kernels.pack(*packing, square);
    if (const auto* factors = std::get_if<cpu::RowFactors>(part.task)) kernels.find_factors(*factors, square);
    if (const auto* scaling = std::get_if<cpu::Scaling>(part.task)) kernels.scale(*scaling, square);
  }
};

}  // namespace

void ProductChain::add(size_t stage, int64_t matrices, const Task& task) {
  if (stages_.size() <= stage) stages_.resize(stage + 1);
  stages_[stage].push_back({task, matrices});
}

void ProductChain::run(const cpu::ProductKernels& kernels, int threads) const {
  std::vector<Work> work(stages_.size());
  std::vector<Stage> stages;
  for (size_t i = 0; i < stages_.size(); ++i) {
    int64_t large = 0;
    for (const auto& [task, matrices] : stages_[i]) {
      each_square(task, kLarge, [&](const cpu::Square&) { large += matrices; });
    }
    const int64_t side = large >= kLargeForEach * threads ? kLarge : kSmall;
    for (const auto& [task, matrices] : stages_[i]) work[i].add(task, matrices, side);
    stages.push_back({work[i].cost, true});
  }
  auto run_stage = [&](size_t stage, Pieces& pieces) {
    kernels.begin();
    for (int64_t begin, end; pieces.next(begin, end);) {
      for (int64_t item = begin; item < end; ++item) work[stage].run_item(kernels, item);
    }
    kernels.end();
  };
  LoadBalance balance;  // nothing is learnt in one run, but idle threads take items of others
  run_stages(threads, stages, run_stage, {}, &balance);
}

}  // namespace fusedstep
