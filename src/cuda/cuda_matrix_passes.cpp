// Launches of the passes around the matrix products of a step.
#include <algorithm>

#include "cuda_kernels/chosen_channels.h"
#include "cuda_kernels/matrix_passes.h"
#include "src/cuda/memory.h"
#include "src/run/backend.h"

namespace fusedstep::cuda {
namespace {

uint32_t blocks_of(const PassTensor& tensor) {
  return static_cast<uint32_t>((tensor.count + kPassElements - 1) / kPassElements);
}
uint32_t blocks_of(const NormTensor& tensor) {
  return static_cast<uint32_t>(tensor.matrices * ((tensor.size + kNormElements - 1) / kNormElements));
}

uint32_t blocks_of(const SquaresTensor& tensor) {
  const int64_t blocks =
      tensor.channels == Channels::kColumns
          ? pieces_of(tensor.columns, kColumnsTogether) * pieces_of(tensor.rows, kColumnSegment)
          : pieces_of(tensor.rows, kSquaresRows) * pieces_of(tensor.columns, kRowSegment);
  return static_cast<uint32_t>(blocks);
}
uint32_t blocks_of(const ScaleTensor&) { return 1; }
uint32_t blocks_of(const MoveTensor& tensor) {
  return static_cast<uint32_t>(pieces_of(tensor.rows, kMoveRows) *
                               pieces_of(tensor.columns, kColumnsTogether));
}
uint32_t blocks_of_fold(const SquaresTensor& tensor) {
  return has_partials(tensor) ? static_cast<uint32_t>(pieces_of(channels_of(tensor), kFoldChannels)) : 0;
}

uint32_t blocks_of_sum(const ChosenTensor& tensor) {
  const int64_t segments = segments_of(tensor), matrices = tensor.matrices;
  const int64_t blocks = has_rows(tensor) ? pieces_of(matrices * tensor.rows, kSquaresRows) * segments
                                          : matrices * pieces_of(tensor.columns, kColumnsTogether) * segments;
  return static_cast<uint32_t>(blocks);
}
uint32_t blocks_of_fold(const ChosenTensor& tensor) {
  const int64_t channels = tensor.matrices * channels_of(tensor);
  return partials_of(tensor) > 0 ? static_cast<uint32_t>(pieces_of(channels, kFoldChannels)) : 0;
}
uint32_t blocks_of_choice(const ChosenTensor& tensor) { return static_cast<uint32_t>(tensor.matrices); }
uint32_t blocks_of_tiles(int64_t matrices, int64_t height, int64_t width) {
  return static_cast<uint32_t>(matrices * pieces_of(height, kMoveRows) * pieces_of(width, kColumnsTogether));
}
uint32_t blocks_of_take(const ChosenTensor& tensor) {
  return has_rows(tensor) ? blocks_of_tiles(tensor.matrices, tensor.chosen, tensor.columns)
                          : blocks_of_tiles(tensor.matrices, tensor.rows, tensor.chosen);
}
uint32_t blocks_of_move(const ChosenTensor& tensor) {
  return blocks_of_tiles(tensor.matrices, tensor.rows, tensor.columns);
}

// Calls run(launch) for launches that all tensors take part in, each with so many blocks.
template <class Launch, class Tensor, class Run, class Blocks>
void launch_all(int device, std::span<const Tensor> tensors, Run run, Blocks blocks) {
  const DeviceGuard guard(device);
  Launch launch{};
  launch.queue.stream = current_stream(device);
  for (size_t first = 0; first < tensors.size(); first += Launch::kMostTensors) {
    const auto some = tensors.subspan(first, std::min<size_t>(Launch::kMostTensors, tensors.size() - first));
    launch.count = static_cast<int>(some.size());
    std::ranges::copy(some, launch.tensors);
    for (size_t i = 0; i < some.size(); ++i) {
      launch.first_block[i + 1] = launch.first_block[i] + blocks(some[i]);
    }
    if (launch.first_block[some.size()] > 0) run(launch);
  }
  check(cudaGetLastError(), "launching a pass, or in a kernel before it");
}
template <class Launch, class Tensor, class Run>
void launch_all(int device, std::span<const Tensor> tensors, Run run) {
  launch_all<Launch>(device, tensors, run, [](const Tensor& tensor) { return blocks_of(tensor); });
}

void average(int device, PassFormat format, std::span<const PassTensor> tensors,
             const AverageOptions& options) {
  launch_all<PassLaunch>(device, tensors,
                         [&](const PassLaunch& launch) { matrix_passes(format).average(launch, options); });
}

void move(int device, PassFormat format, std::span<const PassTensor> tensors, double keep) {
  launch_all<PassLaunch>(device, tensors,
                         [&](const PassLaunch& launch) { matrix_passes(format).move(launch, keep); });
}

size_t norm_sums(std::span<const NormTensor> tensors) {
  size_t blocks = 0;
  for (const NormTensor& tensor : tensors) blocks += blocks_of(tensor);
  return blocks;
}

void normalize(int device, NormFormat format, std::span<const NormTensor> tensors, const NormOptions& options,
               float* sums) {
  launch_all<NormLaunch>(device, tensors, [&](NormLaunch& launch) {
    launch.sums = sums;
    normalize_kernel(format)(launch, options);
    sums += launch.first_block[launch.count];
  });
}

void sum_squares(int device, SquaresFormat format, std::span<const SquaresTensor> tensors) {
  const SquaresPasses& passes = squares_passes(format);
  launch_all<SquaresLaunch>(device, tensors, passes.sum);
  launch_all<SquaresLaunch>(device, tensors, passes.fold,
                            [](const SquaresTensor& tensor) { return blocks_of_fold(tensor); });
}

void scale(int device, bool is_double, std::span<const ScaleTensor> tensors, const ScaleOptions& options) {
  launch_all<ScaleLaunch>(device, tensors,
                          [&](const ScaleLaunch& launch) { scale_weights(is_double, launch, options); });
}

void limit(int device, bool is_double, std::span<const ScaleTensor> tensors, const LimitOptions& options) {
  launch_all<ScaleLaunch>(device, tensors,
                          [&](const ScaleLaunch& launch) { limit_weights(is_double, launch, options); });
}

void move_channels(int device, PassFormat format, std::span<const MoveTensor> tensors, double keep) {
  launch_all<MoveLaunch>(
      device, tensors, [&](const MoveLaunch& launch) { matrix_passes(format).move_channels(launch, keep); });
}

void choose(int device, PassFormat format, std::span<const ChosenTensor> tensors, const ChoiceMemory& memory,
            const ChoiceOptions& options) {
  const ChosenPasses& passes = chosen_passes(format);
  const auto launch_pass = [&](auto blocks, auto run) {
    launch_all<ChosenLaunch>(
        device, tensors,
        [&](ChosenLaunch& launch) {
          launch.memory = memory;
          run(launch);
        },
        blocks);
  };
  launch_pass(blocks_of_sum, [&](const ChosenLaunch& launch) { passes.sum(launch, options.maximizes); });
  launch_pass([](const ChosenTensor& tensor) { return blocks_of_fold(tensor); },
              [&](const ChosenLaunch& launch) { passes.fold(launch); });
  launch_pass(blocks_of_choice, [&](const ChosenLaunch& launch) { passes.choose(launch); });
  launch_pass(blocks_of_take, [&](const ChosenLaunch& launch) { passes.take(launch, options.momentum); });
}

void move_chosen(int device, PassFormat format, std::span<const ChosenTensor> tensors,
                 const ChoiceMemory& memory, double keep) {
  launch_all<ChosenLaunch>(
      device, tensors,
      [&](ChosenLaunch& launch) {
        launch.memory = memory;
        chosen_passes(format).move(launch, keep);
      },
      blocks_of_move);
}

[[maybe_unused]] const bool registered = [] {
  register_cuda_passes(
      {average, move, norm_sums, normalize, sum_squares, scale, limit, move_channels, choose, move_chosen});
  return true;
}();

}  // namespace
}  // namespace fusedstep::cuda
