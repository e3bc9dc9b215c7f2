"""Adamax, from the algorithm box of torch.optim.Adamax; Kingma and Ba 2015, algorithm 2."""

import torch


def adamax(
    weight, grad, state, step, *, lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    maximize=False,
):  # fmt: skip
    beta1, beta2 = betas
    gradient = -grad if maximize else grad
    gradient = gradient + weight_decay * weight
    zeros = torch.zeros_like(weight)
    m = beta1 * state.get("exp_avg", zeros) + (1 - beta1) * gradient
    u = torch.maximum(beta2 * state.get("exp_inf", zeros), gradient.abs() + eps)
    return weight - lr / (1 - beta1**step) * m / u, {"exp_avg": m, "exp_inf": u}
