// Launches of the passes around the matrix products of a step.
#include <algorithm>

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
  launch_all<SquaresLaunch>(device, tensors, passes.fold, blocks_of_fold);
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

[[maybe_unused]] const bool registered = [] {
  register_cuda_passes({average, move, norm_sums, normalize, sum_squares, scale, limit, move_channels});
  return true;
}();

}  // namespace
}  // namespace fusedstep::cuda
