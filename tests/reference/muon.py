"""Muon in float64. Matrices may be stacks of them, of the last two dimensions."""

import torch
from torch.linalg import matrix_norm

from reference.orthogonal import iterated

QUINTIC = (3.4445, -4.7750, 2.0315)


def muon(
    weight, gradient, state, *, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True,
    coefficients=(QUINTIC,) * 5, eps=1e-7, adjust="original", cautious=False, beta2=None,
    iterate=iterated,
):  # fmt: skip
    m = state.get("momentum_buffer", torch.zeros_like(weight))
    m = momentum * m + (1 - momentum) * gradient
    update = momentum * m + (1 - momentum) * gradient if nesterov else m
    x = iterate(update, coefficients, eps)
    new, (rows, columns) = {"momentum_buffer": m}, weight.shape[-2:]
    if beta2 is not None:  # NorMuon
        of_rows = x.square().mean(-1, keepdim=True)
        v = new["v"] = beta2 * state.get("v", 0) + (1 - beta2) * of_rows
        y = x / (v.sqrt() + 1e-10)
        x = y * matrix_norm(x, keepdim=True) / (matrix_norm(y, keepdim=True) + 1e-10)
    factor = {"original": max(1, rows / columns) ** 0.5, "rms": 0.2 * max(rows, columns) ** 0.5,
              "spectral": (rows / columns) ** 0.5}  # fmt: skip
    decayed = weight * (x * weight >= 0) if cautious else weight
    return weight - lr * (weight_decay * decayed + factor[adjust] * x), new
