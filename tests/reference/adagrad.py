"""Adagrad, from the algorithm box of torch.optim.Adagrad; Duchi, Hazan and Singer 2011."""

import torch


def adagrad(
    weight, grad, state, step, *, lr=1e-2, lr_decay=0.0, weight_decay=0.0,
    initial_accumulator_value=0.0, eps=1e-10, maximize=False,
):  # fmt: skip
    gradient = -grad if maximize else grad
    gradient = gradient + weight_decay * weight
    decayed_lr = lr / (1 + (step - 1) * lr_decay)
    total = state.get("sum", torch.full_like(weight, initial_accumulator_value)) + gradient**2
    return weight - decayed_lr * gradient / (total.sqrt() + eps), {"sum": total}
