#include "src/steps/rowwise.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "src/core/reduction.h"
#include "src/plan/operand_checks.h"
#include "src/run/dispatch.h"
#include "src/run/session.h"

namespace fusedstep {
namespace {

// A row costs as much as some elements, beside its own: it is far from the last in memory.
constexpr int64_t kRowCost = 64;

// A tile holds whole groups of lanes.
static_assert(kTileElements % kLanes == 0);

// The dimensions of a row, merged where an operand's and the other's elements lie one behind another.
struct RowDims {
  struct Dim {
    int64_t size, stride[2];  // of the weight and of the gradient, in elements
  };
  std::vector<Dim> dims;  // from the last to the first

  RowDims(Dims sizes, Dims weight, Dims grad) {
    for (size_t d = sizes.size(); d-- > 1;) {
      if (sizes[d] == 1) continue;
      if (!dims.empty()) {
        Dim& last = dims.back();
        if (weight[d] == last.size * last.stride[0] && grad[d] == last.size * last.stride[1]) {
          last.size *= sizes[d];
          continue;
        }
      }
      dims.push_back({sizes[d], {weight[d], grad[d]}});
    }
  }

  bool are_contiguous() const {
    return dims.empty() || (dims.size() == 1 && dims[0].stride[0] == 1 && dims[0].stride[1] == 1);
  }

  // Calls run(offset, k) for elements [first, first + count) of an operand, as k-th.
  template <class Run>
  void for_elements(int operand, int64_t first, int64_t count, Run run) const {
    for (int64_t k = 0; k < count; ++k) {
      int64_t index = first + k, offset = 0;
      for (const Dim& dim : dims) {
        offset += index % dim.size * dim.stride[operand];
        index /= dim.size;
      }
      run(offset, k);
    }
  }
};

template <class Word>
void copy_elements(const RowDims& dims, int operand, int64_t first, int64_t count, void* row, void* tile,
                   bool back) {
  auto *const elements = static_cast<Word*>(row), *const copies = static_cast<Word*>(tile);
  dims.for_elements(operand, first, count, [&](int64_t offset, int64_t k) {
    if (back) {
      elements[offset] = copies[k];
    } else {
      copies[k] = elements[offset];
    }
  });
}

struct Table {
  Format format;
  int element_size;
  int64_t rows, columns;
  std::byte *weight, *grad;
  int64_t weight_bytes, grad_bytes;  // from a row to the next
  const SparseRows* sparse;          // null: the gradient is dense
  RowDims dims;
  void* sums;
  RowwiseScalars scalars;
  const RowKernels* kernels;
  const cpu::SpanKernel* scale;  // of the gradient, in memory; null: it is not scaled there
  double scale_factor, factor;
  bool clear;
};

class RowwiseStep final : public PreparedStep {
 public:
  RowwiseStep(Plan& plan, const RowwiseOptions& rule, std::span<const double> steps,
              const StepOptions& options)
      : plan_(plan), threads_(options.threads) {
    for (size_t i = 0; i < plan.tensors(); ++i) {
      add_table(i, rule, steps[i], options);
      const Table& table = tables_.back();
      if (table.columns == 0) continue;
      const int64_t rows = table.sparse ? table.sparse->count() : table.rows;
      const int64_t each = table.columns + kRowCost, together = std::max<int64_t>(1, kChunkElements / each);
      for (int64_t begin = 0; begin < rows; begin += together) {
        const int64_t end = std::min(begin + together, rows);
        items_.push_back({i, begin, end});
        cost_.push_back(cost_.back() + (end - begin) * each);
      }
    }
    const Stage stage{cost_};
    make_room(threads_, {&stage, 1}, plan.memory().step_balance);
  }

  void run(const Aside& aside) noexcept override {
    plan_.memory().ran_on = kernels().isa;
    run_session(threads_, cost_, *this, aside, &plan_.memory().step_balance);
  }

  void operator()(int64_t first, int64_t last) const {
    for (int64_t i = first; i < last; ++i) {
      const Item& item = items_[i];
      const Table& table = tables_[item.tensor];
      for (int64_t k = item.begin; k < item.end; ++k) {
        if (table.sparse == nullptr) {
          step_row(table, k, table.grad + k * table.grad_bytes);
          continue;
        }
        if (k + kRowsAhead < table.sparse->count()) prefetch(table, k + kRowsAhead);
        step_row(table, table.sparse->at(k, 0), table.sparse->grad(k));
      }
    }
  }

 private:
  static constexpr int64_t kRowsAhead = 6, kMostAhead = 1024, kLine = 64;

  struct Item {
    size_t tensor;
    int64_t begin, end;
  };

  void add_table(size_t i, const RowwiseOptions& rule, double step, const StepOptions& options) {
    const Dims sizes = plan_.sizes(i);
    const TensorTask& task = plan_.task(i);
    const SparseRows* const sparse = plan_.rows(i);
    if (sparse != nullptr && plan_.row_index(i)->dims != 1) {
      refuse(i, "the gradient is sparse in " + std::to_string(plan_.row_index(i)->dims) +
                    " dimensions: a row, which has one moment, would have several entries");
    }
    const bool own = plan_.grad_is_writable(i);
    const bool scale = own && options.grads == GradUse::kScale && options.grad_factor != 1;
    const int size = task.element_size[kWeight];
    const int64_t rows = sizes.empty() ? 1 : sizes[0];
    int64_t columns = 1;
    for (size_t d = 1; d < sizes.size(); ++d) columns *= sizes[d];
    const auto row_bytes = [&](int operand) {
      return sizes.empty() ? 0 : plan_.strides(i, operand)[0] * size;
    };
    tables_.push_back({.format = plan_.format(i),
                       .element_size = size,
                       .rows = rows,
                       .columns = columns,
                       .weight = static_cast<std::byte*>(task.data[kWeight]),
                       .grad = static_cast<std::byte*>(task.data[kGrad]),
                       .weight_bytes = row_bytes(kWeight),
                       .grad_bytes = row_bytes(kGrad),
                       .sparse = sparse,
                       .dims = {sizes, plan_.strides(i, kWeight), plan_.strides(i, kGrad)},
                       .sums = plan_.numbers_of(i, 0),
                       .scalars = {rule, step},
                       .kernels = kernels().rowwise(plan_.format(i)),
                       .scale = scale ? &kernels().grads(plan_.format(i))->scale : nullptr,
                       .scale_factor = options.grad_factor,
                       .factor = (options.maximize ? -1 : 1) * (scale ? 1 : options.grad_factor),
                       .clear = own && options.grads == GradUse::kClear});
  }

  static void prefetch(const Table& table, int64_t k) {
    const int64_t row = table.sparse->at(k, 0);
    const std::byte *const weight = table.weight + row * table.weight_bytes, *const grad =
                                                                                 table.sparse->grad(k);
    const int64_t bytes = std::min(table.columns * table.element_size, kMostAhead);
    for (int64_t at = 0; at < bytes; at += kLine) {
      __builtin_prefetch(weight + at, 1);
      __builtin_prefetch(grad + at);
    }
    const int64_t size = table.format == Format::kDouble ? 8 : 4;
    __builtin_prefetch(static_cast<const std::byte*>(table.sums) + row * size);
  }

  static void step_row(const Table& table, int64_t row, std::byte* grad) {
    std::byte* const weight = table.weight + row * table.weight_bytes;
    if (table.format == Format::kDouble) {
      step_row(table, static_cast<double*>(table.sums)[row], weight, grad);
    } else {
      step_row(table, static_cast<float*>(table.sums)[row], weight, grad);
    }
  }

  template <class T>
  static void step_row(const Table& table, T& sum, std::byte* weight, std::byte* grad) {
    alignas(64) double lanes[kLanes] = {};
    const bool in_place = table.dims.are_contiguous();
    const int64_t at_once = in_place ? table.columns : kTileElements;
    alignas(64) std::byte weights[kTileElements * sizeof(double)], grads[kTileElements * sizeof(double)];
    const auto piece_at = [&](int64_t first) {
      const int64_t count = std::min(at_once, table.columns - first);
      if (in_place) return RowPiece{weight, grad, count, table.factor};
      copy(table, kWeight, first, count, weight, weights, /*back=*/false);
      copy(table, kGrad, first, count, grad, grads, /*back=*/false);
      return RowPiece{weights, grads, count, table.factor};
    };
    for (int64_t first = 0; first < table.columns; first += at_once) {
      const RowPiece piece = piece_at(first);
      if (table.scale != nullptr) {
        scale_in_place(table, piece);
        if (!in_place) copy(table, kGrad, first, piece.count, grad, grads, /*back=*/true);
      }
      table.kernels->add_squares(piece, table.scalars.in_gradient, lanes);
    }
    const double mean = sum_lanes(lanes) / static_cast<double>(table.columns);
    sum = static_cast<T>(static_cast<double>(sum) + mean);
    const RowwiseMove move(table.scalars, sum);
    for (int64_t first = 0; first < table.columns; first += at_once) {
      const RowPiece piece = piece_at(first);
      table.kernels->apply(piece, move);
      if (table.clear) std::memset(in_place ? grad : grads, 0, piece.count * table.element_size);
      if (in_place) continue;
      copy(table, kWeight, first, piece.count, weight, weights, /*back=*/true);
      if (table.clear) copy(table, kGrad, first, piece.count, grad, grads, /*back=*/true);
    }
  }

  static void scale_in_place(const Table& table, const RowPiece& piece) {
    cpu::Span span{};
    span.operand[kGrad] = const_cast<void*>(piece.grad);
    span.count = piece.count;
    span.grad_factor = table.scale_factor;
    table.scale->run(span);
  }

  static void copy(const Table& table, int operand, int64_t first, int64_t count, void* row, void* tile,
                   bool back) {
    switch (table.element_size) {
      case 2:
        return copy_elements<uint16_t>(table.dims, operand, first, count, row, tile, back);
      case 4:
        return copy_elements<uint32_t>(table.dims, operand, first, count, row, tile, back);
      default:
        return copy_elements<uint64_t>(table.dims, operand, first, count, row, tile, back);
    }
  }

  Plan& plan_;
  int threads_;
  std::vector<Table> tables_;
  std::vector<Item> items_;
  std::vector<int64_t> cost_{0};
};

}  // namespace

BoundRule bind_rowwise(const RowwiseOptions& options) {
  static_assert(std::is_trivially_copyable_v<RowwiseOptions> &&
                sizeof(RowwiseOptions) <= BoundRule::kHyperBytes);
  BoundRule bound{};
  bound.states = static_cast<int>(kRowwiseRoles.size());
  bound.roles = kRowwiseRoles;
  bound.make_step = [](Plan& plan, const BoundRule& rule, std::span<double> steps,
                       const StepOptions& step_options,
                       const DeviceInputs&) -> std::unique_ptr<PreparedStep> {
    if (plan.device() != kHost) throw std::runtime_error("there are no kernels of this rule on a device");
    find_aliasing(plan, step_options);
    return std::make_unique<RowwiseStep>(plan, rule.hyper_as<RowwiseOptions>(), steps, step_options);
  };
  std::memcpy(bound.hyper, &options, sizeof options);
  return bound;
}

}  // namespace fusedstep
