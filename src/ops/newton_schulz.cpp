// newton_schulz: the iteration of Muon on batches of matrices, as chains of products of a CPU or a GPU.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "src/ops/native_plan.h"
#include "src/plan/placement.h"
#include "src/run/backend.h"
#include "src/run/dispatch.h"
#include "src/steps/newton_schulz.h"
#include "src/steps/packed_chain.h"

namespace fusedstep::ops {
namespace {

constexpr size_t kDims = 3;          // of a batch: matrices, rows, columns
constexpr size_t kCoefficients = 3;  // of a step

std::string text(const char* what, const char* wrong) { return std::string(what) + " " + wrong; }

// Batches [B, M, N] of 16-bit numbers, of one dtype and device.
std::vector<TensorView> batch_views(const Tensors& tensors, const char* what) {
  std::vector<TensorView> found = views(tensors, what);
  for (const TensorView& batch : found) {
    const bool is_narrow = batch.dtype == DType::kBFloat16 || batch.dtype == DType::kHalf;
    check(is_narrow && batch.dtype == found[0].dtype && batch.device == found[0].device,
          text(what, "must be bfloat16 or float16, of one dtype on one device"));
    check(batch.sizes.size() == kDims && is_in_order(batch.sizes, batch.strides),
          text(what, "must be contiguous matrices [B, M, N]"));
    check(std::ranges::all_of(
              batch.sizes,
              [](int64_t size) { return size > 0 && size <= std::numeric_limits<int>::max() / 2; }),
          text(what, "must have an element at least"));
  }
  return found;
}

// The chains of batches, without their memory.
struct Chains {
  std::vector<ChainBatch> batches;
  std::vector<std::vector<ChainProduct>> products;

  // `numbers`: a, b and c of each step. `ends`: a bool for each step of each batch. `is_aol`: whether the
  // iteration begins with rows or columns that are scaled.
  Chains(const std::vector<TensorView>& x, const std::vector<double>& numbers, const std::vector<bool>& ends,
         bool is_aol) {
    const size_t count = numbers.size() / kCoefficients;
    check(numbers.size() % kCoefficients == 0, "steps must be three numbers for each step");
    check(ends.size() == x.size() * count, "ends must be one bool for each step of each batch");
    for (size_t i = 0; i < x.size(); ++i) {
      std::vector<NewtonSchulzStep> steps;
      for (size_t k = 0; k < count; ++k) {
        const double* const of_step = &numbers[kCoefficients * k];
        steps.push_back({of_step[0], of_step[1], of_step[2], ends[i * count + k]});
      }
      check(steps.empty() || steps.back().ends, "the last step of each batch must be one that ends a run");
      batches.push_back({x[i].sizes[0], x[i].sizes[1], x[i].sizes[2], {}, {}});
      products.push_back(newton_schulz_chain(steps, is_aol ? batches.back().side() : 0));
    }
    for (size_t i = 0; i < x.size(); ++i) batches[i].products = products[i];
  }
};

int64_t workspace_bytes(int device, std::span<const ChainBatch> batches) {
  return device == kHost ? packed_chain_bytes(batches) : device_chains().workspace_bytes(batches);
}

int64_t newton_schulz_workspace(const Tensors& x, const std::vector<double>& steps,
                                const std::vector<bool>& ends, bool is_aol) {
  if (x.empty()) return 0;
  const std::vector<TensorView> found = batch_views(x, "x");
  return workspace_bytes(found[0].device, Chains(found, steps, ends, is_aol).batches);
}

// Both kinds of device, once the operands fit together.
void newton_schulz(const Tensors& x, const Tensors& y, const Tensor& workspace,
                   const std::vector<double>& steps, const std::vector<bool>& ends, bool is_aol) {
  if (x.empty()) return;
  const std::vector<TensorView> from = batch_views(x, "x"), to = batch_views(y, "y");
  check(from.size() == to.size(), "y must have as many batches as x");
  Chains chains(from, steps, ends, is_aol);
  const int device = from[0].device;
  check(to[0].device == device && to[0].dtype == from[0].dtype, "y must be of the dtype and device of x");
  for (size_t i = 0; i < from.size(); ++i) {
    check(std::ranges::equal(from[i].sizes, to[i].sizes), "y must have the shapes of x");
    chains.batches[i].operands[index_of(ChainOperand::kX)] = from[i].data;
    chains.batches[i].operands[index_of(ChainOperand::kY)] = to[i].data;
  }
  const int64_t bytes = workspace_bytes(device, chains.batches);
  check(workspace.scalar_type() == torch::headeronly::ScalarType::Byte && workspace.is_contiguous() &&
            workspace.is_cpu() == (device == kHost) &&
            (device == kHost || workspace.get_device_index() == device) && workspace.numel() >= bytes,
        "the workspace must be at least " + std::to_string(bytes) +
            " contiguous bytes (uint8) on the device of x");
  auto* const room = static_cast<std::byte*>(workspace.mutable_data_ptr());
  if (device == kHost) {
    const cpu::ProductKernels* const kernels = product_kernels();
    check(kernels != nullptr && from[0].dtype == DType::kBFloat16,
          "the instruction set in use has no kernels for newton_schulz in this dtype");
    ask_for_huge_pages(room, bytes);
    run_packed_chains(*kernels, num_threads(), chains.batches, room);
  } else {
    device_chains().run(device, from[0].dtype == DType::kBFloat16, chains.batches, room);
  }
}

// Returns whether chains of products are taken on a device, or the host (-1).
bool has_chains(int64_t device) {
  return device == kHost ? product_kernels() != nullptr : device_chains().are_taken(static_cast<int>(device));
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def(
      "newton_schulz(Tensor(a!)[] x, Tensor(b!)[] y, Tensor(c!) workspace, float[] steps, bool[] ends, "
      "bool is_aol) -> ()");
  m.def("newton_schulz_workspace(Tensor[] x, float[] steps, bool[] ends, bool is_aol) -> int");
  m.def("has_chains(int device) -> bool");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) {
  m.impl("newton_schulz", TORCH_BOX(&newton_schulz));
  m.impl("newton_schulz_workspace", TORCH_BOX(&newton_schulz_workspace));
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CUDA, m) {
  m.impl("newton_schulz", TORCH_BOX(&newton_schulz));
  m.impl("newton_schulz_workspace", TORCH_BOX(&newton_schulz_workspace));
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CompositeExplicitAutograd, m) {
  m.impl("has_chains", TORCH_BOX(&has_chains));
}

}  // namespace
}  // namespace fusedstep::ops
