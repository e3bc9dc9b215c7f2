#include "src/factored.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <vector>

#include "src/dispatch.h"
#include "src/session.h"

namespace fusedstep {
namespace {

// A thread takes blocks together that have so many elements. The stages of a step go over so many for each
// thread before the next ones: later stages then find the wave's weights and gradients in the caches.
constexpr int64_t kItemElements = int64_t{1} << 15, kWaveElements = int64_t{1} << 18;

constexpr int64_t parts(int64_t count, int64_t each) { return (count + each - 1) / each; }

// Bytes of an element.
int size_of_maths(FactoredFormat format) { return format == FactoredFormat::kDouble ? 8 : 4; }
int size_of_weight(FactoredFormat format) {
  return format == FactoredFormat::kBFloat16 || format == FactoredFormat::kHalf ? 2 : size_of_maths(format);
}
int size_of_grad(FactoredFormat format) {
  return format == FactoredFormat::kFloat ? 4 : format == FactoredFormat::kDouble ? 8 : 2;
}

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
  // What has been reserved so far is not needed any more when what comes next is.
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

// How a tensor is cut into blocks, and where in the scratch memory its sums and factors are.
struct Cut {
  int64_t row_parts, column_parts, blocks, block_rows;
  size_t row_sums, column_sums, row_factors, column_factors;
  size_t first_item, items;
};

// Blocks of a tensor, or its matrices where these are reduced.
struct Item {
  size_t tensor;
  int64_t begin, end;
};

class Step {
 public:
  Step(std::span<const FactoredTensor> tensors, const FactoredOptions& options, int threads)
      : tensors_(tensors), options_(options), threads_(threads) {
    for (const FactoredTensor& tensor : tensors) cuts_.push_back(cut_of(tensor));
    make_items();
    norms_.resize(2 * block_items_.size());
    scratch_.allocate();
  }

  void run() { run_stages(threads_, stages_, *this); }

  void operator()(size_t stage, Pieces& pieces) const {
    const Wave& wave = waves_[stage / kStages];
    for (int64_t begin, end; pieces.next(begin, end);) {
      for (int64_t i = begin; i < end; ++i) {
        switch (stage % kStages) {
          case 0:
            run_blocks<kSums>(wave.first_blocks + i);
            break;
          case 1:
            reduce(matrix_items_[wave.first_matrices + i]);
            break;
          case 2:
            run_blocks<kNorms>(wave.first_blocks + i);
            break;
          default:
            run_blocks<kApply>(wave.first_blocks + i);
        }
      }
    }
  }

 private:
  // Blocks of wide matrices have fewer rows, but not so few that their column sums need much memory.
  static Cut cut_of(const FactoredTensor& tensor) {
    Cut cut{};
    cut.block_rows =
        std::clamp(2 * kItemElements / std::min(tensor.columns, kBlockColumns), kBlockRows / 8, kBlockRows);
    cut.row_parts = parts(tensor.rows, cut.block_rows);
    cut.column_parts = parts(tensor.columns, kBlockColumns);
    cut.blocks = tensor.count * cut.row_parts * cut.column_parts;
    return cut;
  }

  void reserve(const FactoredTensor& tensor, Cut& cut) {
    const int size = size_of_maths(tensor.format);
    cut.row_sums = scratch_.reserve<double>(tensor.count * cut.column_parts * tensor.rows);
    cut.column_sums = scratch_.reserve(tensor.count * cut.row_parts * tensor.columns * size);
    cut.row_factors = scratch_.reserve(tensor.count * tensor.rows * size);
    // Sums of one part are read before the factors are written.
    cut.column_factors =
        cut.row_parts == 1 ? cut.column_sums : scratch_.reserve(tensor.count * tensor.columns * size);
  }

  static constexpr size_t kStages = 4;  // sums, their reduction, norms, application

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
      cut.first_item = block_items_.size();
      add_items(t, cut.blocks, each, all / cut.blocks + 1, block_items_, wave.cost_of_blocks);
      cut.items = block_items_.size() - cut.first_item;
      const int64_t sums = cut.column_parts * tensor.rows + cut.row_parts * tensor.columns;
      const int64_t together = std::max<int64_t>(1, kItemElements / (8 * sums));
      add_items(t, tensor.count, together, 8 * sums, matrix_items_, wave.cost_of_matrices);
      elements += all;
    }
    for (const Wave& wave : waves_) {
      stages_.push_back({wave.cost_of_blocks, !stages_.empty()});  // memory of the wave before is reused
      stages_.push_back({wave.cost_of_matrices, true});
      stages_.push_back({wave.cost_of_blocks, true, true});
      stages_.push_back({wave.cost_of_blocks, true});
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
  void run_blocks(size_t item_index) const {
    const Item& item = block_items_[item_index];
    const FactoredTensor& tensor = tensors_[item.tensor];
    const Cut& cut = cuts_[item.tensor];
    double* const norms = norms_.data() + 2 * item_index;
    FactoredBlock block{};
    block.grad_factor = options_.grad_factor;
    block.most = options_.most;
    block.beta = options_.beta;
    block.norms = norms;
    if constexpr (kPhase == kNorms) norms[0] = norms[1] = 0;
    if constexpr (kPhase == kApply) set_lengths(tensor, cut, block);
    const auto run = kernels().factored(tensor.format)->phase[kPhase];
    const int maths = size_of_maths(tensor.format);
    const int weight_size = size_of_weight(tensor.format), grad_size = size_of_grad(tensor.format);
    for (int64_t b = item.begin; b < item.end; ++b) {
      const int64_t column_part = b % cut.column_parts, row_part = b / cut.column_parts % cut.row_parts,
                    matrix = b / (cut.column_parts * cut.row_parts);
      const int64_t row = row_part * cut.block_rows, column = column_part * kBlockColumns;
      block.rows = std::min(cut.block_rows, tensor.rows - row);
      block.columns = std::min(kBlockColumns, tensor.columns - column);
      block.weight = part_of(tensor.weight, tensor.outer, matrix, row, column, weight_size);
      block.grad = part_of(tensor.grad, tensor.outer, matrix, row, column, grad_size);
      block.moment = part_of(tensor.moment, tensor.outer, matrix, row, column, maths);
      block.row_sums =
          scratch_.at<double>(cut.row_sums) + (matrix * cut.column_parts + column_part) * tensor.rows + row;
      block.column_sums = scratch_.at<std::byte>(cut.column_sums) +
                          ((matrix * cut.row_parts + row_part) * tensor.columns + column) * maths;
      block.row_factors = tensor.row_moments == nullptr ? nullptr
                                                        : scratch_.at<std::byte>(cut.row_factors) +
                                                              (matrix * tensor.rows + row) * maths;
      block.column_factors =
          scratch_.at<std::byte>(cut.column_factors) + (matrix * tensor.columns + column) * maths;
      run(block);
    }
  }

  // Sets what a block multiplies weights and updates by.
  void set_lengths(const FactoredTensor& tensor, const Cut& cut, FactoredBlock& block) const {
    double of_weight = 0, of_update = 0;
    const double* norms = norms_.data() + 2 * cut.first_item;
    for (size_t i = 0; i < cut.items; ++i) {
      of_weight += norms[2 * i];
      of_update += norms[2 * i + 1];
    }
    const auto elements = static_cast<double>(tensor.count * tensor.rows * tensor.columns);
    const double excess = std::sqrt(of_update / elements) / options_.threshold;
    double length = options_.step;
    if (options_.scaled != 0) length *= std::max(std::sqrt(of_weight / elements), options_.least_scale);
    block.step = excess <= 1 ? length : length / excess;  // NaN goes on
    block.keep = 1 - options_.decay * (options_.decays_by_length != 0 ? length : 1);
  }

  void reduce(const Item& item) const {
    if (tensors_[item.tensor].format == FactoredFormat::kDouble) {
      reduce_matrices<double>(item);
    } else {
      reduce_matrices<float>(item);
    }
  }

  // Takes the second moments of matrices forward, and computes the factors of the update.
  template <class T>
  void reduce_matrices(const Item& item) const {
    const FactoredTensor& tensor = tensors_[item.tensor];
    const Cut& cut = cuts_[item.tensor];
    const int64_t rows = tensor.rows, columns = tensor.columns;
    for (int64_t m = item.begin; m < item.end; ++m) {
      if (tensor.row_moments != nullptr) {
        T* const moments = static_cast<T*>(tensor.row_moments) + m * rows;
        const double* const sums = scratch_.at<double>(cut.row_sums) + m * cut.column_parts * rows;
        average(moments, sums, cut.column_parts, rows, columns);
        double total = 0;
        for (int64_t r = 0; r < rows; ++r) total += static_cast<double>(moments[r]);
        const double mean = std::max(total / static_cast<double>(rows), options_.least_mean);
        inverse_roots(moments, static_cast<T>(mean), rows, scratch_.at<T>(cut.row_factors) + m * rows);
      }
      T* const moments = static_cast<T*>(tensor.column_moments) + m * columns;
      const T* const sums = scratch_.at<T>(cut.column_sums) + m * cut.row_parts * columns;
      average(moments, sums, cut.row_parts, columns, rows);
      inverse_roots(moments, T{1}, columns, scratch_.at<T>(cut.column_factors) + m * columns);
    }
  }

  // Takes the mean of `terms` squares into each moment. Their sum is in `parts` arrays, one behind the other.
  template <class T, class Sum>
  void average(T* __restrict moments, const Sum* __restrict sums, int64_t parts, int64_t count,
               int64_t terms) const {
    constexpr int64_t kTile = 512;
    double tile[kTile];
    for (int64_t begin = 0; begin < count; begin += kTile) {
      const int64_t size = std::min(kTile, count - begin);
      std::fill_n(tile, size, 0.0);
      for (int64_t part = 0; part < parts; ++part) {
        const Sum* const from = sums + part * count + begin;
        for (int64_t i = 0; i < size; ++i) tile[i] += static_cast<double>(from[i]);
      }
      const double old = 1 - options_.rate, rate = options_.rate;
      for (int64_t i = 0; i < size; ++i) {
        const double mean = tile[i] / static_cast<double>(terms) + options_.added;
        moments[begin + i] = static_cast<T>(old * static_cast<double>(moments[begin + i]) + rate * mean);
      }
    }
  }

  template <class T>
  static void inverse_roots(const T* __restrict moments, T mean, int64_t count, T* __restrict factors) {
    for (int64_t i = 0; i < count; ++i) factors[i] = 1 / std::sqrt(moments[i] / mean);
  }

  std::span<const FactoredTensor> tensors_;
  FactoredOptions options_;
  int threads_;
  std::vector<Cut> cuts_;
  std::vector<Wave> waves_;
  std::vector<Item> block_items_, matrix_items_;
  std::vector<Stage> stages_;
  mutable std::vector<double> norms_;  // of each item, the squares of weight and update
  Scratch scratch_;
};

}  // namespace

void factored_step(std::span<const FactoredTensor> tensors, const FactoredOptions& options, int threads) {
  Step step(tensors, options, threads);
  step.run();
}

}  // namespace fusedstep
