"""Dion2 in float64: rows by a sort of their sums, and Muon's polynomials of singular values."""

import math

import torch
from torch.linalg import matrix_norm

from reference.muon import QUINTIC
from reference.orthogonal import iterated


def dion2(
    weight, gradient, state, *, fraction, lr=1e-3, weight_decay=0.1, momentum=0.95,
    coefficients=(QUINTIC,) * 5, eps=1e-7, adjust="original", cautious=False, beta2=None,
    iterate=iterated,
):  # fmt: skip
    """Dion2 of one matrix, and NorDion2 with a ``beta2``, which chooses rows of every matrix."""
    m = state.get("momentum_buffer", torch.zeros_like(weight)) + gradient
    rows, columns = weight.shape
    of_rows = rows <= columns or beta2 is not None
    lines = m if of_rows else m.T
    norms = [sum(map(abs, line)) for line in lines.tolist()]
    first = sorted(range(len(norms)), key=lambda i: (-norms[i], i))
    some = first[: max(1, math.ceil(fraction * len(norms)))]
    taken = lines[some]
    x = iterate(taken if of_rows else taken.T, coefficients, eps)
    new = {}
    if beta2 is not None:
        v = new["v"] = state.get("v", torch.zeros(rows, 1, dtype=x.dtype)).clone()
        v[some] = beta2 * v[some] + (1 - beta2) * x.square().mean(-1, keepdim=True)
        y = x / (v[some].sqrt() + 1e-10)
        x = y * matrix_norm(x) / (matrix_norm(y) + 1e-10)
    move = torch.zeros_like(weight)
    (move if of_rows else move.T)[some] = x if of_rows else x.T
    m = m.clone()
    (m if of_rows else m.T)[some] = momentum * taken
    factor = {"original": max(1, rows / columns) ** 0.5, "rms": 0.2 * max(rows, columns) ** 0.5,
              "spectral": (rows / columns) ** 0.5}  # fmt: skip
    decayed = weight * (move * weight >= 0) if cautious else weight
    new["momentum_buffer"] = m
    return weight - lr * (weight_decay * decayed + factor[adjust] * move), new
