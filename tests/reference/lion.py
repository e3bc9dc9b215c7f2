"""Lion, from algorithm 2 of Chen et al. 2023, Symbolic Discovery of Optimization Algorithms."""

import torch


def lion(
    weight, grad, state, step, *, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False
):  # fmt: skip
    beta1, beta2 = betas
    gradient = -grad if maximize else grad
    m = state.get("exp_avg", torch.zeros_like(weight))
    c = beta1 * m + (1 - beta1) * gradient
    new_weight = weight - lr * (c.sign() + weight_decay * weight)
    return new_weight, {"exp_avg": beta2 * m + (1 - beta2) * gradient}
