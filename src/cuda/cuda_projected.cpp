// The step of a rule in the epilogue of the product that projects a gradient.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "cuda_kernels/projected.h"
#include "src/cuda/memory.h"
#include "src/run/backend.h"

namespace fusedstep::cuda {
namespace {

using LaunchOfRule = bool (*)(const ProjectedLaunch&, bool from_left, bool in_two, int device, Stream);

// Null for a rule that projected.cu is not compiled for.
LaunchOfRule launch_of(rules::RuleId id) {
  switch (id) {
#define FUSEDSTEP_CASE(Rule)   \
  case rules::RuleId::k##Rule: \
    return launch_projected<rules::Rule>;
    FUSEDSTEP_PROJECTED_CASES
#undef FUSEDSTEP_CASE
    default:
      return nullptr;
  }
}

void step(int device, const BoundRule& rule, double number, const ProjectedTensor& tensor) {
  const LaunchOfRule launch_rule = launch_of(rule.id);
  if (launch_rule == nullptr || rule.flags != 0 || !rule.numbers.empty()) {
    throw std::runtime_error("no kernel takes this rule, or its options, in the epilogue of a product");
  }
  ProjectedLaunch launch{};
  launch.grad = tensor.grad;
  launch.basis = tensor.basis;
  launch.update = tensor.update;
  std::copy(tensor.states.begin(), tensor.states.end(), std::begin(launch.states));
  launch.grad_stride = tensor.grad_stride;
  launch.along = static_cast<int>(tensor.along);
  launch.rank = static_cast<int>(tensor.rank);
  launch.contracted = static_cast<int>(tensor.contracted);
  launch.grad_factor = tensor.grad_factor;
  static_assert(sizeof launch.scalars.bytes == BoundRule::kScalarsBytes);
  rule.prepare(rule, number, nullptr, /*as_double=*/false, launch.scalars.bytes);
  const DeviceGuard guard(device);
  if (!launch_rule(launch, tensor.from_left, tensor.in_two, device, current_stream(device))) {
    throw std::runtime_error(
        "the kernels with a step in the epilogue of a product are for GPUs of compute "
        "capability 9.0");
  }
  check(cudaGetLastError(), "launching a step, or in a kernel before it");
}

[[maybe_unused]] const bool registered = [] {
  register_cuda_projected(step);
  return true;
}();

}  // namespace
}  // namespace fusedstep::cuda
