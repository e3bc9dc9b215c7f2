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

// Calls run(launch) for launches that all tensors take part in.
template <class Launch, class Tensor, class Run>
void launch_all(int device, std::span<const Tensor> tensors, Run run) {
  const DeviceGuard guard(device);
  Launch launch{};
  launch.queue.stream = current_stream(device);
  for (size_t first = 0; first < tensors.size(); first += Launch::kMostTensors) {
    const auto some = tensors.subspan(first, std::min<size_t>(Launch::kMostTensors, tensors.size() - first));
    launch.count = static_cast<int>(some.size());
    std::ranges::copy(some, launch.tensors);
    for (size_t i = 0; i < some.size(); ++i) {
      launch.first_block[i + 1] = launch.first_block[i] + blocks_of(some[i]);
    }
    if (launch.first_block[some.size()] > 0) run(launch);
  }
  check(cudaGetLastError(), "launching a pass, or in a kernel before it");
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

[[maybe_unused]] const bool registered = [] {
  register_cuda_passes({average, move, norm_sums, normalize});
  return true;
}();

}  // namespace
}  // namespace fusedstep::cuda
