// The passes around the matrix products of a step, for tensors whose elements lie in one order: average_into,
// normalize_into and decay_and_add on a device; updates_into, normalize_into and advance_and_move on the CPU,
// where the products may lack memory, and nothing is written before they are done.
#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "src/ops/native_plan.h"
#include "src/ops/pass_operands.h"
#include "src/run/backend.h"
#include "src/steps/matrix_passes.h"

namespace fusedstep::ops {
namespace {

// Both kinds of device: on the CPU the averages stay as they are.
void updates_into(const Tensors& averages, const Tensors& grads, const Tensors& updates, double share,
                  double lead, bool leads) {
  if (averages.empty()) return;
  const TensorView first = view(averages[0], "the average");
  const PassOperands average(averages, "the average", first), grad(grads, "the gradient", first),
      update(updates, "the update", first);
  grad.check_is_of(average);
  update.check_is_of(average);
  check(grad.dtype() == average.dtype(), "gradients and averages must have one dtype");
  std::vector<PassTensor> tensors;
  for (size_t i = 0; i < averages.size(); ++i) {
    tensors.push_back({average.data(i), grad.data(i), update.data(i), average.counts()[i], 0});
  }
  const PassFormat format = format_of(average.dtype(), update.dtype());
  const AverageOptions options{share, lead, leads};
  if (first.device == kHost) {
    check_range(average.dtype(), std::array{share, lead});
    return write_updates(format, tensors, options, num_threads());
  }
  device_passes().average(first.device, format, tensors, options);
}

void decay_and_add(const Tensors& weights, const Tensors& directions, double keep,
                   const std::vector<double>& factors) {
  if (weights.empty()) return;
  check(factors.size() == weights.size(), "there must be a factor for each weight");
  const TensorView first = view(weights[0], "the weight");
  const PassOperands weight(weights, "the weight", first), direction(directions, "the direction", first);
  direction.check_is_of(weight);
  std::vector<PassTensor> tensors;
  for (size_t i = 0; i < weights.size(); ++i) {
    tensors.push_back({weight.data(i), nullptr, direction.data(i), weight.counts()[i], factors[i]});
  }
  device_passes().move(first.device, format_of(weight.dtype(), direction.dtype()), tensors, keep);
}

void advance_and_move(const Tensors& averages, const Tensors& grads, const Tensors& weights,
                      const Tensors& directions, double share, double keep,
                      const std::vector<double>& factors) {
  if (weights.empty()) return;
  check(factors.size() == weights.size(), "there must be a factor for each weight");
  const TensorView first = view(weights[0], "the weight");
  const PassOperands weight(weights, "the weight", first), average(averages, "the average", first),
      grad(grads, "the gradient", first), direction(directions, "the direction", first);
  for (const PassOperands* each : {&average, &grad, &direction}) each->check_is_of(weight);
  check(average.dtype() == weight.dtype() && grad.dtype() == weight.dtype(),
        "weights, averages and gradients must have one dtype");
  check_range(weight.dtype(), std::array{share, keep});
  check_range(weight.dtype(), factors);
  std::vector<AdvanceTensor> tensors;
  for (size_t i = 0; i < weights.size(); ++i) {
    tensors.push_back(
        {average.data(i), weight.data(i), grad.data(i), direction.data(i), weight.counts()[i], factors[i]});
  }
  advance_tensors(format_of(weight.dtype(), direction.dtype()), tensors, {share, keep}, num_threads());
}

NormFormat norm_format_of(DType from, DType to) {
  if (from == DType::kFloat && to == DType::kHalf) return NormFormat::kFloatHalf;
  if (from == DType::kBFloat16 && to == DType::kBFloat16) return NormFormat::kBFloat16;
  if (from == DType::kBFloat16 && to == DType::kHalf) return NormFormat::kBFloat16Half;
  if (from == DType::kHalf && to == DType::kHalf) return NormFormat::kHalf;
  throw std::runtime_error(std::string("no pass divides ") + name_of(from) + " into " + name_of(to));
}

// Batches [B, M, N] as the matrices of a pass.
std::vector<NormTensor> norm_tensors(const Tensors& x) {
  std::vector<NormTensor> tensors;
  for (const Tensor& tensor : x) {
    const TensorView found = view(tensor, "x");
    check(found.sizes.size() == 3, "x must be batches of matrices [B, M, N]");
    if (const int64_t count = elements_of(found.sizes); count > 0) {
      tensors.push_back({found.data, nullptr, found.sizes[0], count / found.sizes[0]});
    }
  }
  return tensors;
}

int64_t sums_of(int device, std::span<const NormTensor> tensors) {
  const size_t sums = device == kHost ? norm_sums(tensors) : device_passes().norm_sums(tensors);
  return static_cast<int64_t>(sums);
}

int64_t normalize_sums(const Tensors& x) {
  return x.empty() ? 0 : sums_of(view(x[0], "x").device, norm_tensors(x));
}

void normalize_into(const Tensors& x, const Tensors& to, const Tensor& sums, double eps, bool adds_eps) {
  if (x.empty()) return;
  const TensorView first = view(x[0], "x"), room = view(sums, "sums");
  const PassOperands from(x, "x", first), into(to, "the quotients", first);
  into.check_is_of(from);
  std::vector<NormTensor> tensors = norm_tensors(x);
  check(room.device == first.device && room.dtype == DType::kFloat && is_in_order(room.sizes, room.strides) &&
            elements_of(room.sizes) >= sums_of(first.device, tensors),
        "sums must be contiguous float32, as many as normalize_sums says, on the device of x");
  size_t at = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (from.counts()[i] > 0) tensors[at++].to = into.data(i);
  }
  const NormFormat format = norm_format_of(from.dtype(), into.dtype());
  const NormOptions options{eps, adds_eps};
  auto* const numbers = static_cast<float*>(room.data);
  if (first.device == kHost) return normalize_matrices(format, tensors, options, numbers, num_threads());
  device_passes().normalize(first.device, format, tensors, options, numbers);
}

STABLE_TORCH_LIBRARY_FRAGMENT(fusedstep, m) {
  m.def(
      "average_into(Tensor(a!)[] averages, Tensor[] grads, Tensor(b!)[] updates, float share, float lead, "
      "bool leads) -> ()");
  m.def(
      "updates_into(Tensor[] averages, Tensor[] grads, Tensor(a!)[] updates, float share, float lead, "
      "bool leads) -> ()");
  m.def(
      "advance_and_move(Tensor(a!)[] averages, Tensor[] grads, Tensor(b!)[] weights, Tensor[] directions, "
      "float share, float keep, float[] factors) -> ()");
  m.def("normalize_sums(Tensor[] x) -> int");
  m.def("normalize_into(Tensor[] x, Tensor(a!)[] to, Tensor(b!) sums, float eps, bool adds_eps) -> ()");
  m.def("decay_and_add(Tensor(a!)[] weights, Tensor[] directions, float keep, float[] factors) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CPU, m) {
  m.impl("updates_into", TORCH_BOX(&updates_into));
  m.impl("normalize_sums", TORCH_BOX(&normalize_sums));
  m.impl("normalize_into", TORCH_BOX(&normalize_into));
  m.impl("advance_and_move", TORCH_BOX(&advance_and_move));
}
STABLE_TORCH_LIBRARY_IMPL(fusedstep, CUDA, m) {
  m.impl("average_into", TORCH_BOX(&updates_into));
  m.impl("normalize_sums", TORCH_BOX(&normalize_sums));
  m.impl("normalize_into", TORCH_BOX(&normalize_into));
  m.impl("decay_and_add", TORCH_BOX(&decay_and_add));
}

}  // namespace
}  // namespace fusedstep::ops
