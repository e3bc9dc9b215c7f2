"""Averaged SGD, from torch.optim.ASGD's documentation; Polyak and Juditsky 1992, Bottou 2010.

As in torch, eta and mu are float32 numbers, which a step computes for the next one.
"""

import torch


def asgd(
    weight, grad, state, step, *, lr=1e-2, lambd=1e-4, alpha=0.75, t0=1e6, weight_decay=0.0,
    maximize=False,
):  # fmt: skip
    gradient = (-grad if maximize else grad) + weight_decay * weight
    eta = float(state["eta"] if "eta" in state else torch.tensor(lr))
    mu = float(state["mu"]) if "mu" in state else 1.0
    weight = (1 - lambd * eta) * weight - eta * gradient
    mean = weight if mu == 1 else (1 - mu) * state["ax"] + mu * weight
    new_eta = torch.tensor(lr / (1 + lambd * lr * step) ** alpha)
    return weight, {"ax": mean, "eta": new_eta, "mu": torch.tensor(1 / max(1.0, step - t0))}
