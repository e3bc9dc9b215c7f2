#include "src/steps/channel_moves.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "src/run/backend.h"
#include "src/run/dispatch.h"
#include "src/run/session.h"

namespace fusedstep {
namespace {

// Elements of a part.
constexpr int64_t kPartElements = 16384;

SquaresFormat squares_format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return SquaresFormat::kFloat;
    case DType::kDouble:
      return SquaresFormat::kDouble;
    case DType::kBFloat16:
      return SquaresFormat::kBFloat16;
    case DType::kHalf:
      return SquaresFormat::kHalf;
    default:
      throw std::runtime_error(std::string("no pass adds up squares of ") + name_of(dtype));
  }
}

PassFormat move_format_of(DType weight, DType grad) {
  if (weight == grad) {
    switch (weight) {
      case DType::kFloat:
        return PassFormat::kFloat;
      case DType::kDouble:
        return PassFormat::kDouble;
      case DType::kBFloat16:
        return PassFormat::kBFloat16;
      case DType::kHalf:
        return PassFormat::kHalf;
      default:
        break;
    }
  }
  if (weight == DType::kFloat && grad == DType::kBFloat16) return PassFormat::kFloatBFloat16;
  if (weight == DType::kFloat && grad == DType::kHalf) return PassFormat::kFloatHalf;
  throw std::runtime_error(std::string("no pass moves ") + name_of(weight) + " along " + name_of(grad));
}

// Rows are what lies further apart in memory.
bool is_turned(Dims strides) { return std::abs(strides[0]) < std::abs(strides[1]); }

Channels turned(Channels channels) {
  if (channels == Channels::kWhole) return channels;
  return channels == Channels::kRows ? Channels::kColumns : Channels::kRows;
}

SquaresTensor squares_of(const TensorView& matrix, Channels channels) {
  SquaresTensor found{};
  found.data = matrix.data;
  const auto row = static_cast<size_t>(is_turned(matrix.strides)), column = 1 - row;
  found.rows = matrix.sizes[row];
  found.columns = matrix.sizes[column];
  found.row_stride = matrix.strides[row];
  found.column_stride = matrix.strides[column];
  found.channels = row == 0 ? channels : turned(channels);
  if (channels == Channels::kWhole && found.column_stride == 1 && found.row_stride == found.columns) {
    found.columns *= std::exchange(found.rows, 1);  // one long row
  }
  return found;
}

// The doubles that so many numbers of the maths take.
int64_t doubles_of(int64_t numbers, bool is_double) { return is_double ? numbers : pieces_of(numbers, 2); }

// The rows of a part, for rows that are cut at kRowSegment.
int64_t rows_together(int64_t columns) {
  return std::max<int64_t>(1, kPartElements / std::clamp<int64_t>(columns, 1, kRowSegment));
}

void fold(const SquaresTensor& tensor) {
  const int64_t partials = partials_of(tensor);
  if (tensor.channels == Channels::kWhole) {
    tensor.sums[0] = std::accumulate(tensor.partials, tensor.partials + partials, 0.0);
    return;
  }
  const int64_t channels = channels_of(tensor);
  std::fill_n(tensor.sums, channels, 0.0);
  for (int64_t first = 0; first < partials; first += channels) {
    for (int64_t c = 0; c < channels; ++c) tensor.sums[c] += tensor.partials[first + c];
  }
}

template <class T>
void scale_weight(const ScaleTensor& tensor, const ScaleOptions& options) {
  auto* const factors = static_cast<T*>(tensor.factors);
  double norm2 = 0;
  for (int64_t c = 0; c < tensor.channels; ++c) {
    const double scale = scale_of(tensor, c, options);
    factors[c] = static_cast<T>(scale);
    norm2 += scale * scale * tensor.grad[c];
  }
  *tensor.norm2 = norm2;
}

template <class T>
void limit_weight(const ScaleTensor& tensor, const LimitOptions& options) {
  auto *const factors = static_cast<T*>(tensor.factors), *const last = static_cast<T*>(tensor.last);
  double norm = *last;
  const double times = limited(*tensor.norm2, tensor.length, options, norm);
  *last = static_cast<T>(norm);
  for (int64_t c = 0; c < tensor.channels; ++c) factors[c] = static_cast<T>(factors[c] * times);
}

}  // namespace

void ChannelMoves::Parts::cut(int64_t rows, int64_t columns, int64_t rows_of_part, int64_t columns_of_part) {
  const size_t tensor = first.size() - 1;
  for (int64_t row = 0; row < rows; row += rows_of_part) {
    const int64_t row_end = std::min(row + rows_of_part, rows);
    for (int64_t column = 0; column < columns; column += columns_of_part) {
      const int64_t column_end = std::min(column + columns_of_part, columns);
      all.push_back({tensor, {row, row_end, column, column_end}});
      cost.push_back(cost.back() + (row_end - row) * (column_end - column));
    }
  }
  first.push_back(static_cast<int64_t>(all.size()));
}

int64_t ChannelMoves::Sums::partials() const {
  int64_t all = 0;
  for (const SquaresTensor& tensor : tensors) all += has_partials(tensor) ? partials_of(tensor) : 0;
  return all;
}

ChannelMoves::ChannelMoves(std::span<const TensorView> lows, std::span<const TensorView> updates,
                           std::vector<Channels> channels)
    : device_(lows[0].device), is_double_(lows[0].dtype == DType::kDouble), channels_(std::move(channels)) {
  lows_ = sums_of(lows);
  updates_ = sums_of(updates);
  for (const SquaresTensor& low : lows_.tensors) {
    first_channel_.push_back(first_channel_.back() + channels_of(low));
  }
}

ChannelMoves::Sums ChannelMoves::sums_of(std::span<const TensorView> matrices) const {
  Sums sums;
  sums.format = squares_format_of(matrices[0].dtype);
  for (const TensorView& matrix : matrices) {
    const SquaresTensor tensor = squares_of(matrix, channels_[sums.tensors.size()]);
    sums.tensors.push_back(tensor);
    if (device_ != kHost) continue;
    const bool by_columns = tensor.channels == Channels::kColumns;
    sums.parts.cut(tensor.rows, tensor.columns, by_columns ? kColumnSegment : rows_together(tensor.columns),
                   by_columns ? cpu::kTileColumns : kRowSegment);
    const int64_t fold = has_partials(tensor) ? partials_of(tensor) + channels_of(tensor) : 1;
    sums.cost_of_folds.push_back(sums.cost_of_folds.back() + fold);
  }
  return sums;
}

int64_t ChannelMoves::bind(std::span<const TensorView> grads, std::span<const TensorView> lasts,
                           std::span<const double> lengths, int threads) {
  threads_ = threads;
  moves_.clear();
  grads_ = sums_of(grads);
  dtype_of_grads_ = grads[0].dtype;
  bound_grads_.clear();
  scales_.clear();
  for (size_t i = 0; i < weights(); ++i) {
    bound_grads_.push_back({grads[i].data, grads[i].strides[0], grads[i].strides[1]});
    ScaleTensor scale{};
    scale.channels = first_channel_[i + 1] - first_channel_[i];
    scale.last = lasts[i].data;
    scale.length = lengths[i];
    scales_.push_back(scale);
  }
  if (device_ == kHost) {
    for (Sums* const sums : {&lows_, &grads_, &updates_}) {
      const Stage stages[] = {{sums->parts.cost}, {sums->cost_of_folds, true}};
      make_room(threads_, stages, sums->parts.balance);
    }
    const Stage of_scales{first_channel_};
    make_room(threads_, {&of_scales, 1}, balance_of_scales_);
  }
  const int64_t channels = first_channel_.back();
  memory_ = 3 * channels + static_cast<int64_t>(weights()) + doubles_of(channels, is_double_) +
            std::max({lows_.partials(), grads_.partials(), updates_.partials()});
  return memory_;
}

void ChannelMoves::bind_weights(std::span<const TensorView> weights) {
  format_ = move_format_of(weights[0].dtype, dtype_of_grads_);
  moves_.clear();
  for (const TensorView& weight : weights) moves_.push_back(move_of(moves_.size(), weight));
  if (device_ != kHost) return;
  parts_of_moves_ = parts_of(moves_);
  const Stage stage{parts_of_moves_.cost};
  make_room(threads_, {&stage, 1}, parts_of_moves_.balance);
}

bool ChannelMoves::fits(size_t index, Dims sizes) const {
  if (sizes.size() != 2) return false;
  if (channels_[index] == Channels::kWhole) return true;
  return sizes[channels_[index] == Channels::kRows ? 0 : 1] ==
         first_channel_[index + 1] - first_channel_[index];
}

void ChannelMoves::place(Sums& sums, double* found, double* partials) const {
  for (size_t i = 0; i < weights(); ++i) {
    SquaresTensor& tensor = sums.tensors[i];
    tensor.sums = tensor.partials = found + first_channel_[i];
    if (!has_partials(tensor)) continue;
    tensor.partials = partials;
    partials += partials_of(tensor);
  }
}

void ChannelMoves::use(double* memory) {
  const int64_t channels = first_channel_.back();
  double *const low = memory, *const grad = low + channels, *const update = grad + channels,
                *const norms2 = update + channels, *const factors = norms2 + weights(),
                *const partials = factors + doubles_of(channels, is_double_);
  place(lows_, low, partials);
  place(grads_, grad, partials);
  place(updates_, update, partials);
  for (size_t i = 0; i < weights(); ++i) {
    const int64_t first = first_channel_[i];
    scales_[i].low = low + first;
    scales_[i].grad = grad + first;
    scales_[i].update = update + first;
    scales_[i].norm2 = norms2 + i;
    scales_[i].factors =
        is_double_ ? static_cast<void*>(factors + first) : reinterpret_cast<float*>(factors) + first;
    if (has_weights()) moves_[i].factors = scales_[i].factors;
  }
}

void ChannelMoves::sum(Sums& sums) const {
  if (device_ != kHost) return device_passes().sum_squares(device_, sums.format, sums.tensors);
  const cpu::SquaresKernels& run = pass_kernels().squares[static_cast<int>(sums.format)];
  const auto sum_part = [&](const Parts::Part& part) {
    const SquaresTensor& tensor = sums.tensors[part.tensor];
    const cpu::Tile& tile = part.tile;
    if (tensor.channels == Channels::kColumns) {
      const int64_t segment = tile.row / kColumnSegment;
      run.of_columns(tensor, tile, tensor.partials + segment * tensor.columns + tile.column);
    } else {
      const int64_t segment = tile.column / kRowSegment;
      run.of_rows(tensor, tile, tensor.partials + segment * tensor.rows + tile.row);
    }
  };
  const Stage stages[] = {{sums.parts.cost}, {sums.cost_of_folds, true}};
  auto run_stage = [&](size_t stage, Pieces& mine) {
    for (int64_t begin, end; mine.next(begin, end);) {
      for (int64_t i = begin; i < end; ++i) {
        if (stage == 0) {
          sum_part(sums.parts.all[i]);
        } else if (has_partials(sums.tensors[i])) {
          fold(sums.tensors[i]);
        }
      }
    }
  };
  run_stages(threads_, stages, run_stage, {}, &sums.parts.balance);
}

void ChannelMoves::sum_gradients() {
  sum(lows_);
  sum(grads_);
}

void ChannelMoves::sum_updates() { sum(updates_); }

template <class Run>
void ChannelMoves::run_weights(Run run) {
  auto run_some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(scales_[i]);
  };
  run_session(threads_, first_channel_, run_some, {}, &balance_of_scales_);
}

void ChannelMoves::scale(const ScaleOptions& options) {
  if (device_ != kHost) return device_passes().scale(device_, is_double_, scales_, options);
  const auto run = is_double_ ? scale_weight<double> : scale_weight<float>;
  run_weights([&](const ScaleTensor& tensor) { run(tensor, options); });
}

void ChannelMoves::limit(const LimitOptions& options) {
  if (device_ != kHost) return device_passes().limit(device_, is_double_, scales_, options);
  const auto run = is_double_ ? limit_weight<double> : limit_weight<float>;
  run_weights([&](const ScaleTensor& tensor) { run(tensor, options); });
}

MoveTensor ChannelMoves::move_of(size_t index, const TensorView& weight) const {
  const Grad& grad = bound_grads_[index];
  const bool turn = is_turned(weight.strides);
  const size_t row = turn ? 1 : 0, column = 1 - row;
  MoveTensor move{};
  move.weight = weight.data;
  move.grad = grad.data;
  move.factors = scales_[index].factors;
  move.rows = weight.sizes[row];
  move.columns = weight.sizes[column];
  move.row_stride = weight.strides[row];
  move.column_stride = weight.strides[column];
  move.grad_row_stride = turn ? grad.column_stride : grad.row_stride;
  move.grad_column_stride = turn ? grad.row_stride : grad.column_stride;
  move.channels = turn ? turned(channels_[index]) : channels_[index];
  return move;
}

ChannelMoves::Parts ChannelMoves::parts_of(std::span<const MoveTensor> moves) const {
  Parts parts;
  for (const MoveTensor& move : moves) {
    parts.cut(move.rows, move.columns, rows_together(move.columns), kRowSegment);
  }
  return parts;
}

void ChannelMoves::run_moves(PassFormat format, std::span<const MoveTensor> moves, double keep, Parts& parts,
                             size_t first, size_t count) const {
  const auto run = pass_kernels().passes[static_cast<int>(format)].move;
  const int64_t first_part = parts.first[first], last = parts.first[first + count];
  auto run_some = [&](int64_t begin, int64_t end) {
    for (int64_t i = first_part + begin; i < first_part + end; ++i) {
      run(moves[parts.all[i].tensor], keep, parts.all[i].tile);
    }
  };
  run_session(threads_, std::span(parts.cost).subspan(first_part, last - first_part + 1), run_some, {},
              &parts.balance);
}

void ChannelMoves::move(size_t first, size_t count, double keep) {
  if (device_ == kHost) return run_moves(format_, moves_, keep, parts_of_moves_, first, count);
  device_passes().move_channels(device_, format_, std::span(moves_).subspan(first, count), keep);
}

void ChannelMoves::move_onto(size_t index, const TensorView& weight, double keep) {
  const MoveTensor move = move_of(index, weight);
  const PassFormat format = move_format_of(weight.dtype, dtype_of_grads_);
  if (device_ != kHost) return device_passes().move_channels(device_, format, {&move, 1}, keep);
  Parts parts = parts_of({&move, 1});
  const Stage stage{parts.cost};
  make_room(threads_, {&stage, 1}, parts.balance);
  run_moves(format, {&move, 1}, keep, parts, 0, 1);
}

}  // namespace fusedstep
