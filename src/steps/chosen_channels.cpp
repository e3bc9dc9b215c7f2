#include "src/steps/chosen_channels.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "src/run/dispatch.h"
#include "src/run/session.h"

namespace fusedstep {
namespace {

// Elements of a tile.
constexpr int64_t kTileElements = 16384;

// A tile of a matrix of a tensor.
struct MatrixTile {
  size_t tensor;
  int64_t matrix;
  cpu::Tile tile;
};

// Tiles of all tensors, and what they cost.
struct Tiles {
  std::vector<MatrixTile> all;
  std::vector<int64_t> cost = {0};

  // Those of a matrix of so many rows and columns, with so many of a tile.
  void cut(size_t tensor, int64_t matrix, int64_t rows, int64_t columns, int64_t rows_of,
           int64_t columns_of) {
    for (int64_t row = 0; row < rows; row += rows_of) {
      const int64_t row_end = std::min(row + rows_of, rows);
      for (int64_t column = 0; column < columns; column += columns_of) {
        const int64_t column_end = std::min(column + columns_of, columns);
        all.push_back({tensor, matrix, {row, row_end, column, column_end}});
        cost.push_back(cost.back() + (row_end - row) * (column_end - column));
      }
    }
  }
};

// Calls run(tensor, matrix) for all matrices.
template <class Run>
void for_matrices(std::span<const ChosenTensor> tensors, Run run) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (int64_t matrix = 0; matrix < tensors[i].matrices; ++matrix) run(i, matrix);
  }
}

// The rows of a tile of so many columns at most.
int64_t rows_together(int64_t columns, int64_t most) {
  return std::clamp<int64_t>(kTileElements / std::min(columns, most), 1, cpu::kTileColumns);
}

Tiles tiles_of_norms(std::span<const ChosenTensor> tensors) {
  Tiles tiles;
  for_matrices(tensors, [&](size_t i, int64_t matrix) {
    const ChosenTensor& of = tensors[i];
    if (has_rows(of)) {
      tiles.cut(i, matrix, of.rows, of.columns, rows_together(of.columns, kRowSegment), kRowSegment);
    } else {
      tiles.cut(i, matrix, of.rows, of.columns, kColumnSegment, cpu::kTileColumns);
    }
  });
  return tiles;
}

Tiles tiles_of_updates(std::span<const ChosenTensor> tensors) {
  Tiles tiles;
  for_matrices(tensors, [&](size_t i, int64_t matrix) {
    const ChosenTensor& of = tensors[i];
    const int64_t rows = has_rows(of) ? of.chosen : of.rows, columns = has_rows(of) ? of.columns : of.chosen;
    tiles.cut(i, matrix, rows, columns, rows_together(columns, cpu::kTileColumns), cpu::kTileColumns);
  });
  return tiles;
}

Tiles tiles_of_moves(std::span<const ChosenTensor> tensors) {
  Tiles tiles;
  for_matrices(tensors, [&](size_t i, int64_t matrix) {
    const ChosenTensor& of = tensors[i];
    tiles.cut(i, matrix, of.rows, of.columns, rows_together(of.columns, cpu::kTileColumns),
              cpu::kTileColumns);
  });
  return tiles;
}

void sum_norms(const cpu::ChosenKernels& run, std::span<const ChosenTensor> tensors, const MatrixTile& of,
               const ChoiceMemory& memory, bool maximizes) {
  const ChosenTensor& tensor = tensors[of.tensor];
  const auto& [row, row_end, column, column_end] = of.tile;
  const bool by_rows = has_rows(tensor);
  const int64_t channels = channels_of(tensor), first = of.matrix * channels + (by_rows ? row : column);
  const int64_t segment = by_rows ? column / kRowSegment : row / kColumnSegment;
  double norms[cpu::kTileColumns];
  (by_rows ? run.norms_of_rows : run.norms_of_columns)(tensor, of.matrix, maximizes, of.tile, norms);
  const int64_t count = by_rows ? row_end - row : column_end - column;
  if (partials_of(tensor) > 0) {
    std::copy_n(norms, count,
                memory.partials + tensor.first_partial + segment * tensor.matrices * channels + first);
  } else {
    std::copy_n(norms, count, memory.norms + tensor.first_channel + first);
  }
}

// Adds the segments of a matrix's norms.
void fold_norms(const ChosenTensor& tensor, int64_t matrix, const ChoiceMemory& memory) {
  const int64_t channels = channels_of(tensor), all = tensor.matrices * channels;
  const double* const partials = memory.partials + tensor.first_partial + matrix * channels;
  float* const norms = memory.norms + tensor.first_channel + matrix * channels;
  for (int64_t c = 0; c < channels; ++c) {
    double norm = 0;
    for (int64_t segment = 0; segment < segments_of(tensor); ++segment) norm += partials[segment * all + c];
    norms[c] = static_cast<float>(norm);
  }
}

// Chooses of a matrix the channels with the largest norms; of equal ones the first. The positions hold their
// order first.
void choose(const ChosenTensor& tensor, int64_t matrix, const ChoiceMemory& memory) {
  if (partials_of(tensor) > 0) fold_norms(tensor, matrix, memory);
  const int64_t channels = channels_of(tensor), first = tensor.first_channel + matrix * channels;
  const float* const norms = memory.norms + first;
  int32_t *const order = memory.positions + first, *const end = order + channels;
  int32_t* const places = memory.places + tensor.first_chosen + matrix * tensor.chosen;
  std::iota(order, end, 0);
  if (tensor.chosen < channels) {
    std::nth_element(order, order + tensor.chosen, end, [&](int32_t a, int32_t b) {
      const uint32_t of_a = key_of(norms[a]), of_b = key_of(norms[b]);
      return of_a != of_b ? of_a > of_b : a < b;
    });
  }
  std::sort(order, order + tensor.chosen);
  std::copy_n(order, tensor.chosen, places);
  std::fill(order, end, -1);
  for (int32_t position = 0; position < tensor.chosen; ++position) order[places[position]] = position;
}

}  // namespace

void choose_updates(PassFormat format, std::span<const ChosenTensor> tensors, const ChoiceMemory& memory,
                    bool maximizes, int threads) {
  const cpu::ChosenKernels& run = pass_kernels().chosen[static_cast<int>(format)];
  const Tiles norms = tiles_of_norms(tensors), updates = tiles_of_updates(tensors);
  std::vector<std::pair<size_t, int64_t>> matrices;
  std::vector<int64_t> cost_of_choice = {0};
  for_matrices(tensors, [&](size_t i, int64_t matrix) {
    matrices.emplace_back(i, matrix);
    const int64_t channels = channels_of(tensors[i]);
    cost_of_choice.push_back(cost_of_choice.back() + channels * (8 + segments_of(tensors[i])));
  });
  const auto run_item = [&](size_t stage, int64_t i) {
    if (stage == 0) return sum_norms(run, tensors, norms.all[i], memory, maximizes);
    if (stage == 1) return choose(tensors[matrices[i].first], matrices[i].second, memory);
    const auto& [tensor, matrix, tile] = updates.all[i];
    run.take(tensors[tensor], matrix, maximizes, tile, memory);
  };
  const Stage stages[] = {{norms.cost}, {cost_of_choice, true}, {updates.cost, true}};
  auto run_stage = [&](size_t stage, Pieces& mine) {
    for (int64_t begin, end; mine.next(begin, end);) {
      for (int64_t i = begin; i < end; ++i) run_item(stage, i);
    }
  };
  LoadBalance balance;
  run_stages(threads, stages, run_stage, {}, &balance);
}

void advance_chosen(PassFormat format, std::span<const ChosenTensor> tensors, std::span<void* const> weights,
                    const ChoiceMemory& memory, const ChosenMove& options, int threads) {
  const auto run = pass_kernels().chosen[static_cast<int>(format)].advance;
  const Tiles moves = tiles_of_moves(tensors);
  auto run_some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto& [tensor, matrix, tile] = moves.all[i];
      run(tensors[tensor], weights[tensor], matrix, options, tile, memory);
    }
  };
  LoadBalance balance;
  run_session(threads, moves.cost, run_some, {}, &balance);
}

}  // namespace fusedstep
