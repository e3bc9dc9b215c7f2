// The gradients of a step: the factor that clips their norm, and what becomes of them.
#pragma once
#include <ATen/MemoryOverlap.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "fusedstep/grad_use.h"
#include "fusedstep/optim/operators.h"

namespace fusedstep::optim {

// What a step does with the gradients of its weights, once it has taken them: nothing, as torch's; zeroes
// them in place; or sets them to undefined, as zero_grad() does.
enum class ZeroGrad : uint8_t { kNo, kInPlace, kSetToNone };

// What a step does besides. With both it does in two passes over memory what clip_grad_norm_(), step() and
// zero_grad() do in four or more.
struct StepOptions {
  // Clips the gradients, those of all groups together, to this 2-norm first, as
  // torch::nn::utils::clip_grad_norm_ does. `.grad` then holds the clipped gradients, unless zero_grad is
  // given or the step uses it (Lamb). At least 0.
  std::optional<double> max_norm = std::nullopt;
  ZeroGrad zero_grad = ZeroGrad::kNo;
};

namespace detail {

// torch::nn::utils::clip_grad_norm_ adds it to the norm that it divides by.
inline constexpr double kClippingEps = 1e-6;

// A launch that is bound: weights of a group, and what a step of them reads and writes.
struct Bound {
  size_t group;
  int64_t plan;
  Tensors weights, grads, states;
  GradUse use = GradUse::kLeave;
};

// What gradients are multiplied by: one float64 number each, on the device of the weights if all are on one,
// else on the CPU. One that is undefined is 1.
struct Factors {
  torch::Tensor grad;  // of `.grad`
  torch::Tensor clip;  // another one, of the gradients of the step alone
  torch::Tensor norm;  // the norm of `.grad`, if it was asked for

  torch::Tensor product() const {
    if (!clip.defined()) return grad;
    return grad.defined() ? grad * clip : clip;
  }
};

// The 2-norm of all gradients.
inline torch::Tensor grad_norm(const std::vector<Bound>& bound) {
  static const Op add_norm2("fusedstep::plan_add_grad_norm2"), norm_of("fusedstep::plans_grad_norm");
  std::vector<int64_t> on_cpu;
  torch::Tensor norm2;
  for (const Bound& each : bound) {
    const torch::Tensor& weight = each.weights[0];
    if (weight.is_cpu()) {
      on_cpu.push_back(each.plan);
    } else if (norm2.defined() && norm2.device() == weight.device()) {
      add_norm2({each.plan, norm2});
    } else {
      torch::Tensor sum = torch::zeros({}, weight.options().dtype(torch::kFloat64));
      add_norm2({each.plan, sum});
      norm2 = norm2.defined() ? sum + norm2.to(sum.device()) : sum;
    }
  }
  if (norm2.defined() && on_cpu.empty()) return norm2.sqrt();
  const double rest = norm2.defined() ? std::sqrt(norm2.item<double>()) : 0;
  return torch::full({}, std::hypot(rest, on_cpu.empty() ? 0 : norm_of({on_cpu})[0].toDouble()),
                     torch::kFloat64);
}

// limit / norm, where the norm is above the limit, else 1, which is undefined if the host knows it. That of
// NaN is NaN or 1.
inline torch::Tensor clipping(double limit, const torch::Tensor& norm, bool passes_nan) {
  if (!norm.is_cpu()) {
    const torch::Tensor ratio = limit / norm;
    const torch::Tensor is_within = passes_nan ? ratio >= 1 : (norm > limit).logical_not();
    return torch::where(is_within, torch::ones_like(ratio), ratio);
  }
  const auto value = norm.item<double>();
  const double ratio = limit / value;
  const bool is_within = passes_nan ? ratio >= 1 : !(value > limit);
  return is_within ? torch::Tensor() : torch::full({}, ratio, torch::kFloat64);
}

// The factors of a step that clips to `max_norm` and then, for itself, to `own_max_norm`, with `own_eps`
// added to the norm that is divided by.
inline Factors factors_of(const std::vector<Bound>& bound, const std::optional<double>& max_norm,
                          double own_max_norm, double own_eps) {
  Factors found;
  if (!max_norm && !std::isfinite(own_max_norm)) return found;
  found.norm = grad_norm(bound);
  if (max_norm) found.grad = clipping(*max_norm, found.norm + kClippingEps, /*passes_nan=*/true);
  if (std::isfinite(own_max_norm)) {
    const torch::Tensor left = found.grad.defined() ? found.norm * found.grad : found.norm;
    found.clip = clipping(own_max_norm, left + own_eps, /*passes_nan=*/false);
  }
  return found;
}

// The factor as a number for a step on the CPU; another finds it on its device.
inline double take_factor(const Bound& bound, const torch::Tensor& factor) {
  if (!factor.defined()) return 1;
  const torch::Device device = bound.weights[0].device();
  if (device.is_cpu()) return factor.item<double>();
  static const Op inputs("fusedstep::plan_device_inputs");
  inputs({bound.plan, c10::IValue(), factor.to(device), c10::IValue()});
  return 1;
}

// A gradient as kernels read it: one of which the memory holds other values is copied, and lives as long as
// the step.
inline torch::Tensor in_memory(const torch::Tensor& grad) {
  if (grad._is_zerotensor()) return torch::zeros(grad.sizes(), grad.options());
  return grad.is_neg() ? grad.resolve_neg() : grad;
}

// Finds gradients that share memory, over all groups, where a step writes any: what it wrote would be
// another's. Returns pairs of a launch and a place in it.
inline std::vector<int64_t> aliasing_grads(const std::vector<Bound>& bound) {
  static const Op op("fusedstep::plans_aliasing_grads");
  if (std::ranges::all_of(bound, [](const Bound& each) { return each.use == GradUse::kLeave; })) return {};
  std::vector<int64_t> plans;
  for (const Bound& each : bound) plans.push_back(each.plan);
  return op({plans})[0].toIntVector();
}

// The weights whose `.grad` no kernel writes: it shares memory, is read from a copy, or is to be left by the
// kernel.
inline Tensors with_unwritten_grads(const std::vector<Bound>& bound, const std::vector<int64_t>& aliasing) {
  Tensors found;
  for (size_t i = 0; i + 1 < aliasing.size(); i += 2) {
    const Bound& each = bound[static_cast<size_t>(aliasing[i])];
    found.push_back(each.weights[static_cast<size_t>(aliasing[i + 1])]);
  }
  for (const Bound& each : bound) {
    for (size_t i = 0; i < each.weights.size(); ++i) {
      const bool is_copy = !each.grads[i].is_same(each.weights[i].grad());
      if (each.use == GradUse::kLeave || is_copy) found.push_back(each.weights[i]);
    }
  }
  return found;
}

// Multiplies the gradients of weights: in place, and memory that several share once. By 0 they are zeroed.
inline void multiply_grads(const Tensors& weights, const torch::Tensor& factor) {
  std::set<const void*> treated;
  const bool is_zero = factor.is_cpu() && factor.item<double>() == 0;
  for (const torch::Tensor& weight : weights) {
    torch::Tensor& grad = weight.mutable_grad();
    if (grad._is_zerotensor()) continue;  // which nothing may write
    const bool is_dense = grad.layout() == torch::kStrided;
    if (is_dense && at::has_internal_overlap(grad) != at::MemOverlap::No) {
      grad = grad.clone(at::MemoryFormat::Contiguous);
    } else {
      const void* const memory = is_dense ? grad.const_data_ptr() : nullptr;
      if (!treated.insert(memory != nullptr ? memory : grad.unsafeGetTensorImpl()).second) continue;
    }
    if (is_zero) {
      grad.zero_();
    } else if (factor.is_cpu()) {
      grad.mul_(factor.item<double>());
    } else {
      grad.mul_(factor.to(grad.device()));
    }
  }
}

// Takes gradients out of graphs that they are part of, as zero_grad() does.
inline void cut_off_grads(const Tensors& weights) {
  for (const torch::Tensor& weight : weights) {
    torch::Tensor& grad = weight.mutable_grad();
    if (grad.grad_fn() != nullptr) {
      grad.detach_();
    } else {
      grad.requires_grad_(false);
    }
  }
}

}  // namespace detail
}  // namespace fusedstep::optim
