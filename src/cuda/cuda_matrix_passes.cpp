// Launches of the passes around the matrix products of a step.
#include <algorithm>

#include "cuda_kernels/matrix_passes.h"
#include "src/cuda/memory.h"
#include "src/run/backend.h"

namespace fusedstep::cuda {
namespace {

// Calls run(launch) for launches that all tensors take part in.
template <class Run>
void launch_all(int device, std::span<const PassTensor> tensors, Run run) {
  const DeviceGuard guard(device);
  PassLaunch launch{};
  launch.queue.stream = current_stream(device);
  for (size_t first = 0; first < tensors.size(); first += PassLaunch::kMostTensors) {
    const auto some =
        tensors.subspan(first, std::min<size_t>(PassLaunch::kMostTensors, tensors.size() - first));
    launch.count = static_cast<int>(some.size());
    std::ranges::copy(some, launch.tensors);
    for (size_t i = 0; i < some.size(); ++i) {
      const auto blocks = static_cast<uint32_t>((some[i].count + kPassElements - 1) / kPassElements);
      launch.first_block[i + 1] = launch.first_block[i] + blocks;
    }
    if (launch.first_block[some.size()] > 0) run(launch);
  }
  check(cudaGetLastError(), "launching a pass, or in a kernel before it");
}

void average(int device, PassFormat format, std::span<const PassTensor> tensors,
             const AverageOptions& options) {
  launch_all(device, tensors,
             [&](const PassLaunch& launch) { matrix_passes(format).average(launch, options); });
}

void move(int device, PassFormat format, std::span<const PassTensor> tensors, double keep) {
  launch_all(device, tensors, [&](const PassLaunch& launch) { matrix_passes(format).move(launch, keep); });
}

[[maybe_unused]] const bool registered = [] {
  register_cuda_passes({average, move});
  return true;
}();

}  // namespace
}  // namespace fusedstep::cuda
