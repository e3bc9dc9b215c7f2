#include "src/steps/factored.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "src/core/reduction.h"
#include "src/plan/operand_checks.h"
#include "src/run/backend.h"
#include "src/run/dispatch.h"
#include "src/run/session.h"

namespace fusedstep {
namespace {

// A thread takes blocks together that have so many elements. The stages of a step go over so many for each
// thread before the next ones: later stages then find the wave's weights and gradients in the caches.
constexpr int64_t kItemElements = int64_t{1} << 15, kWaveElements = int64_t{1} << 18;

// What a tensor of one block costs beside its elements, as a number of elements.
constexpr int64_t kSingleCost = 256;

// Memory that is kept from step to step. Large memory is freed after the step.
class Scratch {
 public:
  explicit Scratch(KeptBytes& kept) : kept_(kept) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (kept_.bytes > kMostKept) kept_ = {};
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
    if (kept_.bytes < bytes_ + kLine) {
      kept_ = {};
      kept_ = {std::make_unique_for_overwrite<std::byte[]>(bytes_ + kLine), bytes_ + kLine};
    }
    const auto address = reinterpret_cast<uintptr_t>(kept_.memory.get());
    begin_ = kept_.memory.get() + (kLine - address % kLine) % kLine;
  }
  template <class T>
  T* at(size_t place) const {
    return reinterpret_cast<T*>(begin_ + place);
  }

 private:
  static constexpr size_t kLine = 64, kMostKept = size_t{1} << 26;

  KeptBytes& kept_;
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
  bool is_of_one_tile() const { return row_tiles == 1 && column_tiles == 1; }  // each matrix

  int64_t column_blocks, blocks;
  size_t row_sums = 0, column_sums = 0, row_factors = 0, column_factors = 0;
  size_t norms = 0;  // of its first tile
};

// The sum over i in [0, count) of at(i), in groups as norms are summed.
template <class Sum = double, class At>
Sum sum_in_groups(int64_t count, At at) {
  Sum total{};
  for (int64_t first = 0; first < count; first += kPartialsGroup) {
    Sum group{};
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
  Step(std::vector<FactoredTensor> tensors, OptionsOfTensors options, FactoredPart part, int threads,
       KeptBytes& kept)
      : tensors_(std::move(tensors)),
        options_(std::move(options)),
        part_(part),
        threads_(threads),
        scratch_(kept) {
    cuts_.reserve(tensors_.size());
    for (const FactoredTensor& tensor : tensors_) cuts_.emplace_back(tensor);
    make_items();
    scratch_.allocate();
  }

  void run(const Aside& aside = {}) { run_stages(threads_, stages_, *this, aside); }

  void operator()(size_t stage, Pieces& pieces) const {
    if (!single_tensors_.empty() && stage-- == 0) return step_singles(pieces);
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
      if (part_ == FactoredPart::kWhole && cut.blocks == 1) {
        single_tensors_.push_back(t);
        cost_of_singles_.push_back(cost_of_singles_.back() + tensor.rows * tensor.columns + kSingleCost);
        continue;
      }
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
    if (!single_tensors_.empty()) stages_.push_back({cost_of_singles_});
    bool is_first = true;
    for (const Wave& wave : waves_) {
      for (const StageKind kind : stages_of(part_)) {
        const bool is_of_matrices = kind == StageKind::kMatrices || kind == StageKind::kNormSums;
        // The first stage of a wave waits too: the wave reuses memory of the wave before.
        stages_.push_back({is_of_matrices ? wave.cost_of_matrices : wave.cost_of_blocks, !is_first,
                           kind == StageKind::kNorms});
        is_first = false;
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
    return {static_cast<std::byte*>(whole.data) + offset * size, whole.row, whole.column,
            outer.empty() ? 0 : whole.outer[outer.size() - 1]};
  }

  // How many of the matrices [begin, end) lie at one stride, from the first one on.
  static int64_t matrices_in_a_row(Dims outer, int64_t begin, int64_t end) {
    if (outer.empty()) return 1;
    const int64_t last = outer[outer.size() - 1];
    return std::min(end - begin, last - begin % last);
  }

  // The addresses of the sums and factors of a tensor.
  struct Room {
    double* row_sums;
    std::byte *column_sums, *row_factors, *column_factors;
    double* norms;
  };
  Room room_of(const Cut& cut) const {
    return {scratch_.at<double>(cut.row_sums), scratch_.at<std::byte>(cut.column_sums),
            scratch_.at<std::byte>(cut.row_factors), scratch_.at<std::byte>(cut.column_factors),
            scratch_.at<double>(cut.norms)};
  }

  FactoredBlock block_of(size_t index, const Room& room, int64_t matrix, int64_t row_tile,
                         int64_t column_block) const {
    const FactoredTensor& tensor = tensors_[index];
    const FactoredOptions& options = options_[index];
    const Cut& cut = cuts_[index];
    const int maths = size_of_maths(tensor.format);
    const int64_t row = row_tile * kTileRows, column = column_block * kBlockColumns,
                  tile = column_block * kBlockTiles;
    FactoredBlock block{};
    block.grad_factor = options.grad_factor;
    block.most = options.most;
    block.beta = options.beta;
    block.row_sums_of_tile = tensor.rows;
    block.rows = std::min(kTileRows, tensor.rows - row);
    block.columns = std::min(kBlockColumns, tensor.columns - column);
    block.matrices = 1;
    block.weight = part_of(tensor.weight, tensor.outer, matrix, row, column, size_of_weight(tensor.format));
    block.grad = part_of(tensor.grad, tensor.outer, matrix, row, column, size_of_grad(tensor.format));
    block.moment = part_of(tensor.moment, tensor.outer, matrix, row, column, maths);
    block.row_sums = room.row_sums + (matrix * cut.column_tiles + tile) * tensor.rows + row;
    block.column_sums =
        room.column_sums + ((matrix * cut.row_tiles + row_tile) * tensor.columns + column) * maths;
    if (tensor.row_moments != nullptr) {
      block.row_factors = room.row_factors + (matrix * tensor.rows + row) * maths;
    }
    block.column_factors = room.column_factors + (matrix * tensor.columns + column) * maths;
    block.norms = room.norms + 2 * ((matrix * cut.row_tiles + row_tile) * cut.column_tiles + tile);
    return block;
  }

  template <FactoredPhase kPhase>
  void run_blocks(size_t item_index, KnownLengths& known) const {
    const Item& item = block_items_[item_index];
    const Cut& cut = cuts_[item.tensor];
    const Room room = room_of(cut);
    if (kPhase == kApply && known.tensor != item.tensor) known = {item.tensor, lengths(item.tensor, room)};
    const auto run = kernels().factored(tensors_[item.tensor].format)->phase[kPhase];
    for (int64_t b = item.begin, next; b < item.end; b = next) {
      FactoredBlock block = block_of(item.tensor, room, b / (cut.column_blocks * cut.row_tiles),
                                     b / cut.column_blocks % cut.row_tiles, b % cut.column_blocks);
      if (cut.is_of_one_tile()) block.matrices = matrices_in_a_row(tensors_[item.tensor].outer, b, item.end);
      next = b + block.matrices;
      block.keep = known.lengths.keep;
      block.step = known.lengths.step;
      run(block);
    }
  }

  // Steps tensors of one block, each at once: its sums stay in the first-level cache.
  void step_singles(Pieces& pieces) const {
    alignas(64) double row_sums[kTileRows * kBlockTiles], norms[2 * kBlockTiles];
    alignas(64) std::byte row_factors[kTileRows * sizeof(double)], columns[kBlockColumns * sizeof(double)];
    const Room room{row_sums, columns, row_factors, columns, norms};
    for (int64_t begin, end; pieces.next(begin, end);) {
      for (int64_t i = begin; i < end; ++i) {
        const size_t index = single_tensors_[i];
        const FactoredFormat format = tensors_[index].format;
        FactoredBlock block = block_of(index, room, 0, 0, 0);
        const FactoredKernels& of = *kernels().factored(format);
        of.phase[kSums](block);
        if (format == FactoredFormat::kDouble) {
          run_matrix<double>(index, 0, room);
        } else {
          run_matrix<float>(index, 0, room);
        }
        of.phase[kNorms](block);
        const FactoredLengths found = lengths(index, room);
        block.keep = found.keep;
        block.step = found.step;
        of.phase[kApply](block);
      }
    }
  }

  // The squares of the norms of weight and update, over all tiles: in one pass, since a tensor of many small
  // matrices has as many tiles.
  struct Norms2 {
    double weight, update;
    void operator+=(const Norms2& other) {
      weight += other.weight;
      update += other.update;
    }
  };
  Norms2 norms2(size_t index, const Room& room) const {
    const double* const norms = room.norms;
    return sum_in_groups<Norms2>(cuts_[index].tiles(tensors_[index]), [norms](int64_t tile) {
      return Norms2{norms[2 * tile], norms[2 * tile + 1]};
    });
  }

  FactoredLengths lengths(size_t index, const Room& room) const {
    const FactoredTensor& tensor = tensors_[index];
    const FactoredOptions& options = options_[index];
    if (part_ == FactoredPart::kApply) {
      const FactoredShare& share = tensor.share;
      return lengths_of(options, share.norms2[0], share.norms2[1], static_cast<double>(share.elements));
    }
    const auto [weight, update] = norms2(index, room);
    return lengths_of(options, weight, update,
                      static_cast<double>(tensor.count * tensor.rows * tensor.columns));
  }

  void add_norms(const Item& item) const {
    if (item.begin != 0) return;  // once for a tensor
    const auto [weight, update] = norms2(item.tensor, room_of(cuts_[item.tensor]));
    double* const found = tensors_[item.tensor].share.norms2;
    found[0] = weight;
    found[1] = update;
  }

  void run_matrices(const Item& item) const {
    const Room room = room_of(cuts_[item.tensor]);
    if (tensors_[item.tensor].format == FactoredFormat::kDouble) {
      run_matrices<double>(item, room);
    } else {
      run_matrices<float>(item, room);
    }
  }

  template <class T>
  void run_matrices(const Item& item, const Room& room) const {
    if (part_ == FactoredPart::kWhole && cuts_[item.tensor].is_of_one_tile()) {
      return run_small_matrices<T>(item, room);
    }
    for (int64_t m = item.begin; m < item.end; ++m) run_matrix<T>(item.tensor, m, room);
  }

  // Does as run_matrix() does for matrices of one tile: the moments of all of them are one array.
  template <class T>
  void run_small_matrices(const Item& item, const Room& room) const {
    const FactoredTensor& tensor = tensors_[item.tensor];
    const FactoredOptions options = options_[item.tensor];
    const int64_t rows = tensor.rows, columns = tensor.columns, count = item.end - item.begin;
    if (tensor.row_moments != nullptr) {
      T* __restrict const moments = static_cast<T*>(tensor.row_moments) + item.begin * rows;
      T* __restrict const factors = reinterpret_cast<T*>(room.row_factors) + item.begin * rows;
      average(options, moments, room.row_sums + item.begin * rows, 1, count * rows, columns);
      if (rows == 1) {
        for (int64_t i = 0; i < count; ++i) {
          const double mean = mean_of_rows(options, static_cast<double>(moments[i]), 1);
          factors[i] = factor_of(moments[i], static_cast<T>(mean));
        }
      } else {
        for (int64_t i = 0; i < count * rows; i += rows) {
          const double mean = mean_of_rows(options, sum_of_moments(moments + i, rows), rows);
          find_factors(moments + i, static_cast<T>(mean), rows, factors + i);
        }
      }
    }
    T* const moments = static_cast<T*>(tensor.column_moments) + item.begin * columns;
    T* const sums = reinterpret_cast<T*>(room.column_sums) + item.begin * columns;
    average(options, moments, sums, 1, count * columns, rows);
    find_factors(moments, T{1}, count * columns,
                 reinterpret_cast<T*>(room.column_factors) + item.begin * columns);
  }

  // Takes the second moments of a matrix forward, and computes the factors of the update: as much of it as
  // belongs to this part of the step.
  template <class T>
  void run_matrix(size_t index, int64_t m, const Room& room) const {
    const FactoredTensor& tensor = tensors_[index];
    const FactoredOptions& options = options_[index];
    const Cut& cut = cuts_[index];
    const int64_t rows = tensor.rows, columns = tensor.columns;
    const FactoredShare& share = tensor.share;
    const double* const row_sums = room.row_sums + m * cut.column_tiles * rows;
    const T* const column_sums = reinterpret_cast<const T*>(room.column_sums) + m * cut.row_tiles * columns;
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
        average(options, of_rows, share.row_sums + m * rows, 1, rows, share.columns);
        share.mean_sums[m] = sum_of_moments(of_rows, rows);
        return;
      case FactoredPart::kNorms:
        average(options, of_columns, share.column_sums + m * columns, 1, columns, share.rows);
        if (has_rows) sum = share.mean_sums[m];
        break;
      case FactoredPart::kApply:
        if (has_rows) sum = share.mean_sums[m];
        break;
      default:
        if (has_rows) {
          average(options, of_rows, row_sums, cut.column_tiles, rows, columns);
          sum = sum_of_moments(of_rows, rows);
        }
        average(options, of_columns, column_sums, cut.row_tiles, columns, rows);
    }
    if (has_rows) {
      const auto mean =
          static_cast<T>(mean_of_rows(options, sum, part_ == FactoredPart::kWhole ? rows : share.rows));
      find_factors(of_rows, mean, rows, reinterpret_cast<T*>(room.row_factors) + m * rows);
    }
    find_factors(of_columns, T{1}, columns, reinterpret_cast<T*>(room.column_factors) + m * columns);
  }

  template <class T>
  static double sum_of_moments(const T* moments, int64_t rows) {
    return sum_in_groups(parts(rows, kMeanRows), [&](int64_t part) {
      return sum_of_rows(moments + part * kMeanRows, std::min<int64_t>(kMeanRows, rows - part * kMeanRows));
    });
  }

  template <class T>
  static double sum_of_rows(const T* moments, int64_t count) {
    constexpr int kFew = 8;  // the others of a tree are zeros
    return count <= kFew ? sum_in_tree_of<kFew>(moments, count) : sum_in_tree_of<kMeanRows>(moments, count);
  }

  template <int kCount, class T>
  static double sum_in_tree_of(const T* numbers, int64_t count) {
    double sums[kCount] = {};
    for (int64_t i = 0; i < count; ++i) sums[i] = static_cast<double>(numbers[i]);
    return sum_in_tree<kCount>(sums);
  }

  struct WriteTo {
    double* totals;
    void operator()(int64_t i, double total) const { totals[i] = total; }
  };

  // Takes the mean of `terms` squares into each moment. Their sums are in `tiles` arrays, one behind the
  // other.
  template <class T, class Sum>
  static void average(const FactoredOptions& options, T* __restrict moments, const Sum* __restrict sums,
                      int64_t tiles, int64_t count, int64_t terms) {
    for_totals(sums, tiles, count,
               [&](int64_t i, double total) { moments[i] = next_moment(options, moments[i], total, terms); });
  }

  // Calls take(i, the sum over the tiles of sums[tile][i]) for each i in [0, count).
  template <class Sum, class Take>
  static void for_totals(const Sum* __restrict sums, int64_t tiles, int64_t count, const Take& take) {
    if (tiles == 1) {
      for (int64_t i = 0; i < count; ++i) take(i, static_cast<double>(sums[i]));
      return;
    }
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

  std::vector<FactoredTensor> tensors_;
  OptionsOfTensors options_;
  FactoredPart part_;
  int threads_;
  std::vector<Cut> cuts_;
  std::vector<Wave> waves_;
  std::vector<Item> block_items_, matrix_items_;
  std::vector<size_t> single_tensors_;  // of one block: they are in no wave
  std::vector<int64_t> cost_of_singles_{0};
  std::vector<Stage> stages_;
  Scratch scratch_;
};

// The numbers of a step. Below 0 the first epsilon is that of the dtype of the weight.
FactoredOptions options_at(const AdafactorHyper& hyper, double step, double eps_of_dtype,
                           double grad_factor) {
  const bool is_torchs = hyper.is_torchs != 0;
  const double eps = hyper.eps1 < 0 ? eps_of_dtype : hyper.eps1;
  double size = hyper.lr;
  if (hyper.relative_step != 0) {
    const double bound = is_torchs ? hyper.lr : hyper.max_relative_step;
    size = std::min(hyper.warmup_init != 0 ? 1e-6 * step : bound, std::pow(step, -0.5));
  }
  return {.rate = std::pow(step, hyper.beta2_decay),
          .added = is_torchs ? 0 : eps,
          .least_mean = is_torchs ? eps : 0,
          .most = is_torchs && eps != 0 ? 1 / eps : std::numeric_limits<double>::infinity(),
          .step = size,
          .scaled = hyper.scale_parameter,
          .least_scale = hyper.eps2,
          .threshold = hyper.d,
          .decay = hyper.weight_decay * (is_torchs ? hyper.lr : 1),
          .decays_by_length = is_torchs ? 0.0 : 1.0,
          .beta = hyper.beta1,
          .grad_factor = grad_factor};
}

double eps_of(FactoredFormat format) {
  switch (format) {
    case FactoredFormat::kDouble:
      return std::numeric_limits<double>::epsilon();
    case FactoredFormat::kBFloat16:
      return 0x1p-7;
    case FactoredFormat::kHalf:
      return 0x1p-10;
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

FactoredFormat format_of(const Plan& plan, size_t i, bool averages) {
  switch (plan.format(i)) {
    case Format::kFloat:
      return FactoredFormat::kFloat;
    case Format::kDouble:
      return FactoredFormat::kDouble;
    case Format::kBFloat16Float:
      return FactoredFormat::kBFloat16;
    case Format::kHalfFloat:
      return FactoredFormat::kHalf;
    case Format::kBFloat16:
      if (!averages) return FactoredFormat::kBFloat16;
      break;
    case Format::kHalf:
      if (!averages) return FactoredFormat::kHalf;
      break;
    default:
      break;
  }
  refuse(i, "the first moment must be float32");
}

// An operand of a plan. One of less than two dimensions is a matrix of one row.
Matrices matrices_of(const Plan& plan, size_t i, int operand) {
  void* const data = plan.task(i).data[operand];
  const Dims strides = plan.strides(i, operand);
  const size_t dims = strides.size();
  if (dims < 2) return {data, {}, 0, dims == 1 ? strides[0] : 1};
  return {data, strides.first(dims - 2), strides[dims - 2], strides[dims - 1]};
}

FactoredTensor tensor_of(const Plan& plan, size_t i, bool averages) {
  if (plan.row_index(i) != nullptr) refuse(i, "the gradient is sparse");
  if (plan.task(i).data[kWeight] == plan.task(i).data[kGrad]) {
    refuse(i, "the gradient shares memory with the weight");
  }
  const Dims sizes = plan.sizes(i);
  const size_t dims = sizes.size();
  FactoredTensor tensor{};
  tensor.format = format_of(plan, i, averages);
  tensor.weight = matrices_of(plan, i, kWeight);
  tensor.grad = matrices_of(plan, i, kGrad);
  if (averages) tensor.moment = matrices_of(plan, i, kFirstState);
  tensor.columns = dims == 0 ? 1 : sizes[dims - 1];
  tensor.rows = 1;
  tensor.count = 1;
  if (dims >= 2) {
    tensor.outer = sizes.first(dims - 2);
    tensor.rows = sizes[dims - 2];
    for (const int64_t size : tensor.outer) tensor.count *= size;
    tensor.row_moments = plan.numbers_of(i, 0);
  }
  tensor.column_moments = plan.numbers_of(i, 1);
  return tensor;
}

// A step of the tensors of a plan that have elements.
class PlannedStep final : public PreparedStep {
 public:
  PlannedStep(Plan& plan, std::vector<FactoredTensor> tensors, OptionsOfTensors options, int threads)
      : plan_(plan),
        step_(std::move(tensors), std::move(options), FactoredPart::kWhole, threads, plan.memory().scratch) {}

  void run(const Aside& aside) noexcept override {
    plan_.memory().ran_on = kernels().isa;
    step_.run(aside);
  }

 private:
  Plan& plan_;
  Step step_;
};

// The same on a device.
class PlannedDeviceStep final : public PreparedStep {
 public:
  PlannedDeviceStep(Plan& plan, std::unique_ptr<PreparedStep> step) : plan_(plan), step_(std::move(step)) {}

  void run(const Aside& aside) override {
    step_->run(aside);
    plan_.memory().ran_on = "cuda";
  }
  size_t scratch_bytes() const override { return step_->scratch_bytes(); }
  void use(std::byte* scratch) override { step_->use(scratch); }

 private:
  Plan& plan_;
  std::unique_ptr<PreparedStep> step_;
};

std::unique_ptr<PreparedStep> prepare_adafactor(Plan& plan, const BoundRule& rule, std::span<double> steps,
                                                const StepOptions& step_options, const DeviceInputs& inputs) {
  if (step_options.grads != GradUse::kLeave) {
    throw std::runtime_error("a step with factored moments leaves gradients as they are");
  }
  const auto hyper = rule.hyper_as<AdafactorHyper>();
  const double grad_factor = (step_options.maximize ? -1 : 1) * step_options.grad_factor;
  std::vector<FactoredTensor> tensors;
  tensors.reserve(plan.tensors());
  OptionsOfTensors options;
  std::map<std::pair<uint64_t, FactoredFormat>, uint32_t> known;  // by step count and format
  for (size_t i = 0; i < plan.tensors(); ++i) {
    if (plan.empty(i)) continue;
    const FactoredTensor& tensor = tensors.emplace_back(tensor_of(plan, i, hyper.averages != 0));
    const auto [found, is_new] = known.try_emplace({std::bit_cast<uint64_t>(steps[i]), tensor.format},
                                                   static_cast<uint32_t>(options.options.size()));
    if (is_new) {
      options.options.push_back(options_at(hyper, steps[i], eps_of(tensor.format), grad_factor));
    }
    options.of_tensor.push_back(found->second);
  }
  if (plan.device() != kHost) {
    return std::make_unique<PlannedDeviceStep>(
        plan, new_factored_step(plan.device(), std::move(tensors), options, FactoredPart::kWhole, inputs));
  }
  return std::make_unique<PlannedStep>(plan, std::move(tensors), std::move(options), step_options.threads);
}

}  // namespace

BoundRule bind_adafactor(const AdafactorHyper& hyper) {
  static_assert(std::is_trivially_copyable_v<AdafactorHyper> &&
                sizeof(AdafactorHyper) <= BoundRule::kHyperBytes);
  BoundRule bound{};
  bound.states = hyper.averages != 0 ? 3 : 2;
  bound.roles = std::span(kAdafactorRoles).first(bound.states);
  bound.make_step = prepare_adafactor;
  std::memcpy(bound.hyper, &hyper, sizeof hyper);
  return bound;
}

void factored_step(std::span<const FactoredTensor> tensors, const FactoredOptions& options, FactoredPart part,
                   int threads) {
  static thread_local KeptBytes kept;
  Step step({tensors.begin(), tensors.end()}, {{options}, {}}, part, threads, kept);
  step.run();
}

}  // namespace fusedstep
