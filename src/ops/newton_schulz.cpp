// newton_schulz: the iteration of Muon on batches of matrices, as chains of products that stay on a device.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "src/ops/native_plan.h"
#include "src/run/backend.h"
#include "src/steps/newton_schulz.h"

namespace fusedstep::ops {
namespace {

constexpr int64_t kAlignment = 256, kWordBytes = 16;

std::string text(const char* what, const char* wrong) { return std::string(what) + " " + wrong; }

// A batch [B, M, N] of 16-bit numbers.
TensorView batch_view(const Tensor& tensor, const char* what) {
  const TensorView known = view(tensor, what);
  check(known.dtype == DType::kBFloat16 || known.dtype == DType::kHalf,
        text(what, "must be bfloat16 or float16"));
  check(known.sizes.size() == 3 && is_in_order(known.sizes, known.strides),
        text(what, "must be contiguous matrices [B, M, N]"));
  check(
      std::ranges::all_of(
          known.sizes, [](int64_t size) { return size > 0 && size <= std::numeric_limits<int>::max() / 2; }),
      text(what, "must have an element at least"));
  return known;
}

// The bytes of one square operand of a chain.
int64_t square_bytes(const ChainBatch& batch) {
  const int64_t bytes = batch.count * batch.side() * batch.square_stride() * int64_t{sizeof(uint16_t)};
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// The steps of a batch: `numbers` are a, b and c of each, `ends` those of all batches.
std::vector<NewtonSchulzStep> steps_of(const std::vector<double>& numbers, const std::vector<int64_t>& ends,
                                       size_t batch) {
  std::vector<NewtonSchulzStep> steps(numbers.size() / 3);
  for (size_t i = 0; i < steps.size(); ++i) {
    steps[i] = {numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2], ends[batch * steps.size() + i] != 0};
  }
  return steps;
}

// Chains over `x`, whose square operands lie in memory one behind another.
struct Chains {
  std::vector<ChainBatch> batches;
  std::vector<std::vector<ChainProduct>> products;
  int64_t bytes = 0;

  Chains(const std::vector<TensorView>& x, const std::vector<double>& steps, const std::vector<int64_t>& ends,
         std::byte* squares) {
    check(steps.size() % 3 == 0, "steps must have three numbers for each step");
    check(ends.size() == x.size() * (steps.size() / 3), "ends must have a number for each step of a batch");
    for (size_t i = 0; i < x.size(); ++i) {
      const auto of_batch = steps_of(steps, ends, i);
      check(of_batch.empty() || of_batch.back().ends, "ends must be true of the last step");
      products.push_back(newton_schulz_chain(of_batch));
      ChainBatch batch{x[i].sizes[0], x[i].sizes[1], x[i].sizes[2], {}, {}};
      const int64_t each = square_bytes(batch);
      int used = 0;
      for (const ChainProduct& product : products.back()) {
        used = std::max(used, static_cast<int>(product.c) - static_cast<int>(ChainOperand::kS0) + 1);
      }
      for (int s = 0; s < used; ++s, bytes += each) {
        batch.operands[static_cast<int>(ChainOperand::kS0) + s] =
            squares == nullptr ? nullptr : squares + bytes;
      }
      batches.push_back(batch);
    }
    for (size_t i = 0; i < x.size(); ++i) batches[i].products = products[i];
  }
};

std::vector<TensorView> batch_views(const Tensors& tensors, const char* what) {
  std::vector<TensorView> found;
  for (const Tensor& tensor : tensors) {
    found.push_back(batch_view(tensor, what));
    check(found.back().device == found[0].device && found.back().dtype == found[0].dtype,
          text(what, "must be of one dtype, on one device"));
  }
  return found;
}

int64_t newton_schulz_workspace(const Tensors& x, const std::vector<double>& steps,
                                const std::vector<int64_t>& ends) {
  return Chains(batch_views(x, "x"), steps, ends, nullptr).bytes;
}

void newton_schulz(const Tensors& x, const Tensors& y, const Tensor& workspace,
                   const std::vector<double>& steps, const std::vector<int64_t>& ends) {
  if (x.empty()) return;
  const std::vector<TensorView> from = batch_views(x, "x"), to = batch_views(y, "y");
  check(from.size() == to.size(), "y must have as many batches as x");
  Chains chains(from, steps, ends, static_cast<std::byte*>(workspace.mutable_data_ptr()));
  const int device = from[0].device;
  check(to[0].device == device && to[0].dtype == from[0].dtype, "y must be of the dtype and device of x");
  check(
      workspace.is_contiguous() && workspace.get_device_index() == device &&
          workspace.numel() >= chains.bytes && workspace.scalar_type() == torch::headeronly::ScalarType::Byte,
      "the workspace must be contiguous bytes, as many as newton_schulz_workspace says, on the device of x");
  for (size_t i = 0; i < from.size(); ++i) {
    check(std::ranges::equal(from[i].sizes, to[i].sizes), "y must have the shapes of x");
    const auto is_in_words = [](const void* data) {
      return reinterpret_cast<uintptr_t>(data) % kWordBytes == 0;
    };
    check(is_in_words(from[i].data) && is_in_words(to[i].data) && from[i].sizes[2] % 8 == 0,
          "x and y must be aligned to 16 bytes, and have a multiple of 8 columns");
    ChainBatch& batch = chains.batches[i];
    batch.operands[static_cast<int>(ChainOperand::kX)] = from[i].data;
    batch.operands[static_cast<int>(ChainOperand::kY)] = to[i].data;
  }
  device_chains().run(device, from[0].dtype == DType::kBFloat16, chains.batches);
}

bool has_chains(int64_t device) { return device_chains().are_taken(static_cast<int>(device)); }

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def(
      "newton_schulz(Tensor(a!)[] x, Tensor(b!)[] y, Tensor(c!) workspace, float[] steps, int[] ends) -> ()");
  m.def("newton_schulz_workspace(Tensor[] x, float[] steps, int[] ends) -> int");
  m.def("has_chains(int device) -> bool");
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
