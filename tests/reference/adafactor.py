"""Adafactor: algorithm 5 of Shazeer and Stern 2018, and the box of torch.optim.Adafactor."""

import torch


def rms(x):
    return x.square().mean().sqrt()


def adafactor(
    weight, grad, state, step, *, torchs, lr=1e-2, decay=-0.8, eps1=1e-30, eps2=1e-3, d=1.0,
    weight_decay=0.0, beta1=None, scale=True, relative=True, warmup=False, bound=1e-2,
    maximize=False,
):  # fmt: skip
    """`state`: row, column and first moments; a weight of less than two dimensions has no rows."""
    gradient = -grad if maximize else grad
    rate, zero = step**decay, torch.zeros(())
    squares = gradient**2 if torchs else gradient**2 + eps1
    new = {}
    if weight.dim() >= 2:
        new["row"] = (1 - rate) * state.get("row", zero) + rate * squares.mean(-1)
        new["column"] = (1 - rate) * state.get("column", zero) + rate * squares.mean(-2)
        mean = new["row"].mean(-1)[..., None, None]
        mean = mean.clamp(min=eps1) if torchs else mean
        v = new["row"][..., :, None] * new["column"][..., None, :] / mean
    else:
        v = new["column"] = (1 - rate) * state.get("column", zero) + rate * squares
    update = gradient / (v.clamp(min=eps1**2) if torchs else v).sqrt()
    update = update / (rms(update) / d).clamp(min=1.0)
    size = lr
    if relative:
        bound = 1e-6 * step if warmup else lr if torchs else bound
        size = min(bound, step**-0.5)
    alpha = (max(eps2, rms(weight)) if scale else 1.0) * size
    move = alpha * update
    if beta1 is not None:
        move = new["moment"] = beta1 * state.get("moment", zero) + (1 - beta1) * move
    return weight * (1 - weight_decay * (lr if torchs else alpha)) - move, new
