"""Adadelta, from the algorithm box of torch.optim.Adadelta; Zeiler 2012, algorithm 1."""

import torch


def adadelta(
    weight, grad, state, step, *, lr=1.0, rho=0.9, eps=1e-6, weight_decay=0.0, maximize=False
):  # fmt: skip
    gradient = -grad if maximize else grad
    gradient = gradient + weight_decay * weight
    zeros = torch.zeros_like(weight)
    v = rho * state.get("square_avg", zeros) + (1 - rho) * gradient**2
    a = state.get("acc_delta", zeros)
    delta = (a + eps).sqrt() / (v + eps).sqrt() * gradient
    new_state = {"square_avg": v, "acc_delta": rho * a + (1 - rho) * delta**2}
    return weight - lr * delta, new_state
