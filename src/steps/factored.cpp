#include "src/steps/factored.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "src/core/reduction.h"
#include "src/run/dispatch.h"
#include "src/run/session.h"

namespace fusedstep {
namespace {

// A thread takes blocks together that have so many elements. The stages of a step go over so many for each
// thread before the next ones: later stages then find the wave's weights and gradients in the caches.
constexpr int64_t kItemElements = int64_t{1} << 15, kWaveElements = int64_t{1} << 18;

// Memory that a thread keeps from step to step, unless it is much.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (kept().bytes > kMostKept) kept() = {};
  }

  template <class T = std::byte>
  size_t reserve(int64_t count) {
    const size_t at = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kLine - 1) / kLine * kLine;
    bytes_ = std::max(bytes_, used_);
    return at;
  }
  // Frees all that has been reserved so far: it is never needed at the same time as what comes next.
  void reuse() { used_ = 0; }
  void allocate() {
    Kept& here = kept();
    if (here.bytes < bytes_ + kLine) {
      here = {};
      here = {std::make_unique_for_overwrite<std::byte[]>(bytes_ + kLine), bytes_ + kLine};
    }
    const auto address = reinterpret_cast<uintptr_t>(here.memory.get());
    begin_ = here.memory.get() + (kLine - address % kLine) % kLine;
  }
  template <class T>
  T* at(size_t place) const {
    return reinterpret_cast<T*>(begin_ + place);
  }

 private:
  static constexpr size_t kLine = 64, kMostKept = size_t{1} << 26;
  struct Kept {
    std::unique_ptr<std::byte[]> memory;
    size_t bytes = 0;
  };
  static Kept& kept() {
    static thread_local Kept here;
    return here;
  }

  size_t used_ = 0, bytes_ = 0;
  std::byte* begin_ = nullptr;
};

// The blocks that a tensor is cut into, and the offsets of its sums and factors in the scratch memory.
struct Cut : FactoredCut {
  explicit Cut(const FactoredTensor& tensor)
      : FactoredCut(tensor),
        column_blocks(parts(tensor.columns, kBlockColumns)),
        blocks(tensor.count * row_tiles * column_blocks) {}

  int64_t tiles(const FactoredTensor& tensor) const { return tensor.count * row_tiles * column_tiles; }

  int64_t column_blocks, blocks;
  size_t row_sums = 0, column_sums = 0, row_factors = 0, column_factors = 0;
  size_t norms = 0;  // of its first tile
};

// The sum over i in [0, count) of at(i), in groups as norms are summed.
template <class At>
double sum_in_groups(int64_t count, At at) {
  double total = 0;
  for (int64_t first = 0; first < count; first += kPartialsGroup) {
    double group = 0;
    for (int64_t i = first; i < std::min(first + kPartialsGroup, count); ++i) group += at(i);
    total += group;
  }
  return total;
}

// Blocks of a tensor, or its matrices where these are reduced.
struct Item {
  size_t tensor;
  int64_t begin, end;
};

class Step {
 public:
  Step(std::span<const FactoredTensor> tensors, const FactoredOptions& options, FactoredPart part,
       int threads)
      : tensors_(tensors), options_(options), part_(part), threads_(threads) {
    for (const FactoredTensor& tensor : tensors) cuts_.emplace_back(tensor);
    make_items();
    scratch_.allocate();
  }

  void run() { run_stages(threads_, stages_, *this); }

  void operator()(size_t stage, Pieces& pieces) const {
    const std::span<const StageKind> kinds = stages_of(part_);
    const Wave& wave = waves_[stage / kinds.size()];
    KnownLengths lengths;
    for (int64_t begin, end; pieces.next(begin, end);) {
      for (int64_t i = begin; i < end; ++i) {
        switch (kinds[stage % kinds.size()]) {
          case StageKind::kSums:
            run_blocks<kSums>(wave.first_blocks + i, lengths);
            break;
          case StageKind::kMatrices:
            run_matrices(matrix_items_[wave.first_matrices + i]);
            break;
          case StageKind::kNorms:
            run_blocks<kNorms>(wave.first_blocks + i, lengths);
            break;
          case StageKind::kNormSums:
            add_norms(matrix_items_[wave.first_matrices + i]);
            break;
          case StageKind::kApply:
            run_blocks<kApply>(wave.first_blocks + i, lengths);
        }
      }
    }
  }

 private:
  // The lengths of the tensor that a thread is at.
  struct KnownLengths {
    size_t tensor = ~size_t{0};
    FactoredLengths lengths{};
  };

  void reserve(const FactoredTensor& tensor, Cut& cut) {
    const int size = size_of_maths(tensor.format);
    cut.row_sums = scratch_.reserve<double>(tensor.count * cut.column_tiles * tensor.rows);
    cut.column_sums = scratch_.reserve(tensor.count * cut.row_tiles * tensor.columns * size);
    cut.row_factors = scratch_.reserve(tensor.count * tensor.rows * size);
    // Sums of one part are read before the factors are written.
    cut.column_factors =
        cut.row_tiles == 1 ? cut.column_sums : scratch_.reserve(tensor.count * tensor.columns * size);
    cut.norms = scratch_.reserve<double>(2 * cut.tiles(tensor));
  }

  // The stages that a wave goes through.
  enum class StageKind : uint8_t { kSums, kMatrices, kNorms, kNormSums, kApply };
  static std::span<const StageKind> stages_of(FactoredPart part) {
    static constexpr StageKind kWhole[] = {StageKind::kSums, StageKind::kMatrices, StageKind::kNorms,
                                           StageKind::kApply},
                               kOfSums[] = {StageKind::kSums, StageKind::kMatrices},
                               kOfRows[] = {StageKind::kMatrices},
                               kOfNorms[] = {StageKind::kMatrices, StageKind::kNorms, StageKind::kNormSums},
                               kOfApply[] = {StageKind::kMatrices, StageKind::kApply};
    switch (part) {
      case FactoredPart::kSums:
        return kOfSums;
      case FactoredPart::kRows:
        return kOfRows;
      case FactoredPart::kNorms:
        return kOfNorms;
      case FactoredPart::kApply:
        return kOfApply;
      default:
        return kWhole;
    }
  }

  struct Wave {
    size_t first_blocks, first_matrices;
    std::vector<int64_t> cost_of_blocks{0}, cost_of_matrices{0};
  };

  void make_items() {
    const int64_t in_wave = kWaveElements * threads_;
    int64_t elements = in_wave;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const FactoredTensor& tensor = tensors_[t];
      Cut& cut = cuts_[t];
      if (elements >= in_wave) {
        waves_.push_back({block_items_.size(), matrix_items_.size()});
        scratch_.reuse();
        elements = 0;
      }
      reserve(tensor, cut);
      Wave& wave = waves_.back();
      const int64_t all = tensor.count * tensor.rows * tensor.columns;
      const int64_t each = std::max<int64_t>(1, kItemElements * cut.blocks / std::max<int64_t>(all, 1));
      add_items(t, cut.blocks, each, all / cut.blocks + 1, block_items_, wave.cost_of_blocks);
      const int64_t sums = cut.column_tiles * tensor.rows + cut.row_tiles * tensor.columns;
      const int64_t together = std::max<int64_t>(1, kItemElements / (8 * sums));
      add_items(t, tensor.count, together, 8 * sums, matrix_items_, wave.cost_of_matrices);
      elements += all;
    }
    for (const Wave& wave : waves_) {
      for (const StageKind kind : stages_of(part_)) {
        const bool is_of_matrices = kind == StageKind::kMatrices || kind == StageKind::kNormSums;
        // The first one waits too: memory of the wave before is reused.
        stages_.push_back({is_of_matrices ? wave.cost_of_matrices : wave.cost_of_blocks, !stages_.empty(),
                           kind == StageKind::kNorms});
      }
    }
  }

  static void add_items(size_t tensor, int64_t count, int64_t each, int64_t cost, std::vector<Item>& items,
                        std::vector<int64_t>& costs) {
    for (int64_t begin = 0; begin < count; begin += each) {
      const int64_t end = std::min(begin + each, count);
      items.push_back({tensor, begin, end});
      costs.push_back(costs.back() + (end - begin) * cost);
    }
  }

  static BlockArray part_of(const Matrices& whole, Dims outer, int64_t matrix, int64_t row, int64_t column,
                            int size) {
    if (whole.data == nullptr) return {};
    int64_t offset = row * whole.row + column * whole.column;
    for (size_t d = outer.size(); d-- > 0; matrix /= outer[d]) offset += matrix % outer[d] * whole.outer[d];
    return {static_cast<std::byte*>(whole.data) + offset * size, whole.row, whole.column};
  }

  template <FactoredPhase kPhase>
  void run_blocks(size_t item_index, KnownLengths& known) const {
    const Item& item = block_items_[item_index];
    const FactoredTensor& tensor = tensors_[item.tensor];
    const Cut& cut = cuts_[item.tensor];
    FactoredBlock block{};
    block.grad_factor = options_.grad_factor;
    block.most = options_.most;
    block.beta = options_.beta;
    block.row_sums_of_tile = tensor.rows;
    if constexpr (kPhase == kApply) {
      if (known.tensor != item.tensor) known = {item.tensor, lengths(tensor, cut)};
      block.keep = known.lengths.keep;
      block.step = known.lengths.step;
    }
    const auto run = kernels().factored(tensor.format)->phase[kPhase];
    const int maths = size_of_maths(tensor.format);
    const int weight_size = size_of_weight(tensor.format), grad_size = size_of_grad(tensor.format);
    for (int64_t b = item.begin; b < item.end; ++b) {
      const int64_t column_block = b % cut.column_blocks, row_tile = b / cut.column_blocks % cut.row_tiles,
                    matrix = b / (cut.column_blocks * cut.row_tiles);
      const int64_t row = row_tile * kTileRows, column = column_block * kBlockColumns,
                    tile = column_block * kBlockTiles;
      block.rows = std::min(kTileRows, tensor.rows - row);
      block.columns = std::min(kBlockColumns, tensor.columns - column);
      block.weight = part_of(tensor.weight, tensor.outer, matrix, row, column, weight_size);
      block.grad = part_of(tensor.grad, tensor.outer, matrix, row, column, grad_size);
      block.moment = part_of(tensor.moment, tensor.outer, matrix, row, column, maths);
      block.row_sums =
          scratch_.at<double>(cut.row_sums) + (matrix * cut.column_tiles + tile) * tensor.rows + row;
      block.column_sums = scratch_.at<std::byte>(cut.column_sums) +
                          ((matrix * cut.row_tiles + row_tile) * tensor.columns + column) * maths;
      block.row_factors = tensor.row_moments == nullptr ? nullptr
                                                        : scratch_.at<std::byte>(cut.row_factors) +
                                                              (matrix * tensor.rows + row) * maths;
      block.column_factors =
          scratch_.at<std::byte>(cut.column_factors) + (matrix * tensor.columns + column) * maths;
      block.norms = scratch_.at<double>(cut.norms) +
                    2 * ((matrix * cut.row_tiles + row_tile) * cut.column_tiles + tile);
      run(block);
    }
  }

  // The squares of the norms of weight and update, over all tiles.
  double norm2(const FactoredTensor& tensor, const Cut& cut, int which) const {
    const double* const norms = scratch_.at<double>(cut.norms);
    return sum_in_groups(cut.tiles(tensor), [&](int64_t tile) { return norms[2 * tile + which]; });
  }

  FactoredLengths lengths(const FactoredTensor& tensor, const Cut& cut) const {
    if (part_ == FactoredPart::kApply) {
      const FactoredShare& share = tensor.share;
      return lengths_of(options_, share.norms2[0], share.norms2[1], static_cast<double>(share.elements));
    }
    return lengths_of(options_, norm2(tensor, cut, 0), norm2(tensor, cut, 1),
                      static_cast<double>(tensor.count * tensor.rows * tensor.columns));
  }

  void add_norms(const Item& item) const {
    if (item.begin != 0) return;  // once for a tensor
    const FactoredTensor& tensor = tensors_[item.tensor];
    for (int which = 0; which < 2; ++which) {
      tensor.share.norms2[which] = norm2(tensor, cuts_[item.tensor], which);
    }
  }

  void run_matrices(const Item& item) const {
    const FactoredTensor& tensor = tensors_[item.tensor];
    for (int64_t m = item.begin; m < item.end; ++m) {
      if (tensor.format == FactoredFormat::kDouble) {
        run_matrix<double>(tensor, cuts_[item.tensor], m);
      } else {
        run_matrix<float>(tensor, cuts_[item.tensor], m);
      }
    }
  }

  // Takes the second moments of a matrix forward, and computes the factors of the update: as much of it as
  // belongs to this part of the step.
  template <class T>
  void run_matrix(const FactoredTensor& tensor, const Cut& cut, int64_t m) const {
    const int64_t rows = tensor.rows, columns = tensor.columns;
    const FactoredShare& share = tensor.share;
    const double* const row_sums = scratch_.at<double>(cut.row_sums) + m * cut.column_tiles * rows;
    const T* const column_sums = scratch_.at<T>(cut.column_sums) + m * cut.row_tiles * columns;
    const bool has_rows = tensor.row_moments != nullptr;
    T* const of_rows = has_rows ? static_cast<T*>(tensor.row_moments) + m * rows : nullptr;
    T* const of_columns = static_cast<T*>(tensor.column_moments) + m * columns;
    double sum = 0;
    switch (part_) {
      case FactoredPart::kSums:
        if (has_rows) for_totals(row_sums, cut.column_tiles, rows, WriteTo{share.row_sums + m * rows});
        for_totals(column_sums, cut.row_tiles, columns, WriteTo{share.column_sums + m * columns});
        return;
      case FactoredPart::kRows:
        if (!has_rows) return;
        average(of_rows, share.row_sums + m * rows, 1, rows, share.columns);
        share.mean_sums[m] = sum_of_moments(of_rows, rows);
        return;
      case FactoredPart::kNorms:
        average(of_columns, share.column_sums + m * columns, 1, columns, share.rows);
        if (has_rows) sum = share.mean_sums[m];
        break;
      case FactoredPart::kApply:
        if (has_rows) sum = share.mean_sums[m];
        break;
      default:
        if (has_rows) {
          average(of_rows, row_sums, cut.column_tiles, rows, columns);
          sum = sum_of_moments(of_rows, rows);
        }
        average(of_columns, column_sums, cut.row_tiles, columns, rows);
    }
    if (has_rows) {
      const auto mean =
          static_cast<T>(mean_of_rows(options_, sum, part_ == FactoredPart::kWhole ? rows : share.rows));
      find_factors(of_rows, mean, rows, scratch_.at<T>(cut.row_factors) + m * rows);
    }
    find_factors(of_columns, T{1}, columns, scratch_.at<T>(cut.column_factors) + m * columns);
  }

  template <class T>
  static double sum_of_moments(const T* moments, int64_t rows) {
    return sum_in_groups(parts(rows, kMeanRows), [&](int64_t part) {
      return sum_in_tree(moments + part * kMeanRows, std::min<int64_t>(kMeanRows, rows - part * kMeanRows));
    });
  }

  template <class T>
  static double sum_in_tree(const T* moments, int64_t count) {
    double sums[kMeanRows] = {};
    for (int64_t i = 0; i < count; ++i) sums[i] = static_cast<double>(moments[i]);
    for (int half = kMeanRows / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
  }

  struct WriteTo {
    double* totals;
    void operator()(int64_t i, double total) const { totals[i] = total; }
  };

  // Takes the mean of `terms` squares into each moment. Their sums are in `tiles` arrays, one behind the
  // other.
  template <class T, class Sum>
  void average(T* __restrict moments, const Sum* __restrict sums, int64_t tiles, int64_t count,
               int64_t terms) const {
    for_totals(sums, tiles, count, [&](int64_t i, double total) {
      moments[i] = next_moment(options_, moments[i], total, terms);
    });
  }

  // Calls take(i, the sum over the tiles of sums[tile][i]) for each i in [0, count).
  template <class Sum, class Take>
  static void for_totals(const Sum* __restrict sums, int64_t tiles, int64_t count, const Take& take) {
    constexpr int64_t kPart = 512;
    double total[kPart], group[kPart];
    for (int64_t begin = 0; begin < count; begin += kPart) {
      const int64_t size = std::min(kPart, count - begin);
      std::fill_n(total, size, 0.0);
      for (int64_t first = 0; first < tiles; first += kPartialsGroup) {
        std::fill_n(group, size, 0.0);
        for (int64_t tile = first; tile < std::min(first + kPartialsGroup, tiles); ++tile) {
          const Sum* const from = sums + tile * count + begin;
          for (int64_t i = 0; i < size; ++i) group[i] += static_cast<double>(from[i]);
        }
        for (int64_t i = 0; i < size; ++i) total[i] += group[i];
      }
      for (int64_t i = 0; i < size; ++i) take(begin + i, total[i]);
    }
  }

  template <class T>
  static void find_factors(const T* __restrict moments, T mean, int64_t count, T* __restrict factors) {
    for (int64_t i = 0; i < count; ++i) factors[i] = factor_of(moments[i], mean);
  }

  std::span<const FactoredTensor> tensors_;
  FactoredOptions options_;
  FactoredPart part_;
  int threads_;
  std::vector<Cut> cuts_;
  std::vector<Wave> waves_;
  std::vector<Item> block_items_, matrix_items_;
  std::vector<Stage> stages_;
  Scratch scratch_;
};

}  // namespace

void factored_step(std::span<const FactoredTensor> tensors, const FactoredOptions& options, FactoredPart part,
                   int threads) {
  Step step(tensors, options, part, threads);
  step.run();
}

}  // namespace fusedstep
