"""Muon in float64: polynomials of the singular values in place of products of matrices.

Matrices may be stacks of them, of the last two dimensions.
"""

import math

import torch
from torch.linalg import matrix_norm

QUINTIC = (3.4445, -4.7750, 2.0315)


def iterated(matrix, coefficients, eps):
    """The matrix whose singular values are those of the given one after all steps."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt().clamp(min=eps)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u * s[..., None, :] @ v


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


def dion2(
    weight, gradient, state, *, fraction, lr=1e-3, weight_decay=0.1, momentum=0.95,
    coefficients=(QUINTIC,) * 5, eps=1e-7, adjust="original", cautious=False, beta2=None,
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
    x = iterated(taken if of_rows else taken.T, coefficients, eps)
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
