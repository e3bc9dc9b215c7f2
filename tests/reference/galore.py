"""GaLore with AdamW: Zhao et al. 2024, algorithm 2, and the published galore_torch 1.0 for AdamW.

There eps is added before the bias of the second moment is corrected, and the decay comes last.
But a gradient of zeros has no basis there: it is the first axes.
"""

import torch

from reference.low_rank_bases import side_of, with_bases


def adamw(weight, gradient, state, step, *, lr, betas, eps, correct_bias, back=lambda u: u):
    m = betas[0] * state.get("m", 0) + (1 - betas[0]) * gradient
    v = betas[1] * state.get("v", 0) + (1 - betas[1]) * gradient**2
    bias = ((1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step)) if correct_bias else 1
    return weight - lr * bias * back(m / (v.sqrt() + eps)), state | {"m": m, "v": v}


def galore(
    weight, grad, state, step, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0,
    correct_bias=True, maximize=False, rank=None, update_proj_gap=200, scale=0.25, proj_type="std",
):  # fmt: skip
    g, left, right = -grad if maximize else grad, None, None
    if rank:
        g = g.reshape(grad.shape[0], -1)
        state = with_bases(state, g, step, rank, update_proj_gap)
        side = side_of(proj_type, *g.shape)
        left = state["A"] if side != "right" else torch.eye(g.shape[0], dtype=g.dtype)
        right = state["B"] if side != "left" else torch.eye(g.shape[1], dtype=g.dtype)
        g = left.T @ g @ right.T
    back = (lambda u: (scale * left @ u @ right).view_as(weight)) if rank else (lambda u: u)
    options = {"lr": lr, "betas": betas, "eps": eps, "correct_bias": correct_bias}
    new, state = adamw(weight, g, state, step, **options, back=back)
    return new - lr * weight_decay * new, state
