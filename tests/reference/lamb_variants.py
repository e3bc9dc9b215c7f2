"""LAMB as other libraries publish it, each in its own order of operations.

`grad_norm` is the norm of all gradients of a step; without it the weight is the model's only one.
"""

import math

import torch


def moments(state, grad, beta1, beta2):
    zeros = torch.zeros_like(grad)
    m = beta1 * state.get("exp_avg", zeros) + (1 - beta1) * grad
    v = beta2 * state.get("exp_avg_sq", zeros) + (1 - beta2) * grad * grad
    return m, v, {"exp_avg": m, "exp_avg_sq": v}


def apex(
    weight, grad, state, step, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01,
    max_grad_norm=1.0, use_nvlamb=False, grad_norm=None,
):  # fmt: skip
    """NVIDIA/apex: csrc/multi_tensor_lamb.cu, apex/optimizers/fused_lamb.py."""
    norm = grad.norm().item() if grad_norm is None else grad_norm
    grad = grad / (norm / max_grad_norm if norm > max_grad_norm else 1.0)
    m, v, new_state = moments(state, grad, *betas)
    correction1, correction2 = (1 - beta**step for beta in betas)
    update = (m / correction1) / ((v / correction2).sqrt() + eps) + weight_decay * weight
    rate = lr
    if use_nvlamb or weight_decay != 0:
        param_norm, update_norm = weight.norm().item(), update.norm().item()
        if param_norm != 0 and update_norm != 0:
            rate = lr * (param_norm / update_norm)
    return weight - rate * update, new_state


def nvlamb(weight, grad, state, step, **options):
    """The same with `use_nvlamb=True`."""
    return apex(weight, grad, state, step, use_nvlamb=True, **options)


def timm(
    weight, grad, state, step, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01,
    max_grad_norm=1.0, max_ratio=math.inf, always_adapt=False, decoupled_decay=False,
    grad_norm=None,
):  # fmt: skip
    """huggingface/pytorch-image-models: timm/optim/lamb.py; `trust_clip` is `max_ratio=1`."""
    norm = grad.norm().item() if grad_norm is None else grad_norm
    m, v, new_state = moments(state, grad / max(norm / max_grad_norm, 1.0), *betas)
    correction1, correction2 = (1 - beta**step for beta in betas)
    update = (m / correction1) / (v.sqrt() / correction2**0.5 + eps)
    if decoupled_decay:
        weight = weight - lr * weight_decay * weight
    else:
        update = update + weight_decay * weight
    if weight_decay != 0 or always_adapt:
        weight_norm, update_norm = weight.norm().item(), update.norm().item()
        ratio = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
        update = update * min(ratio, max_ratio)
    return weight - lr * update, new_state


def deepspeed(
    weight, grad, state, step, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    min_ratio=0.01, max_ratio=10.0,
):  # fmt: skip
    """deepspeedai/DeepSpeed: csrc/lamb/fused_lamb_cuda_kernel.cu; `min_coeff`, `max_coeff`."""
    m, v, new_state = moments(state, grad, *betas)
    correction1, correction2 = (1 - beta**step for beta in betas)
    step_size = lr * math.sqrt(correction2) / correction1
    update = m / (v.sqrt() + eps) + weight_decay * weight
    weight_norm, update_norm = weight.norm().item(), update.norm().item()
    coefficient = 1.0
    if weight_norm != 0 and update_norm != 0:
        coefficient = min(max(weight_norm / update_norm, min_ratio), max_ratio)
    return weight - step_size * coefficient * update, new_state


def cybertron(
    weight, grad, state, step, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0
):  # fmt: skip
    """cybertronai/pytorch-lamb: pytorch_lamb/lamb.py."""
    m, v, new_state = moments(state, grad, *betas)
    weight_norm = min(weight.norm().item(), 10.0)
    adam_step = m / (v.sqrt() + eps) + weight_decay * weight
    adam_norm = adam_step.norm().item()
    trust_ratio = 1.0 if weight_norm == 0 or adam_norm == 0 else weight_norm / adam_norm
    return weight - lr * trust_ratio * adam_step, new_state


PUBLISHED = {each.__name__: each for each in (apex, nvlamb, timm, deepspeed, cybertron)}


def lamb_variant(weight, grad, state, step, *, variant, **options):
    return PUBLISHED[variant](weight, grad, state, step, **options)
