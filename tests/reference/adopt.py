"""ADOPT, from algorithm 2 of Taniguchi et al. 2024, ADOPT: Modified Adam Can Converge with Any β2.

The paper's steps are counted from 0: it makes v of g_0 before them, and bounds step t by t^(1/4).
"""

import torch


def adopt(
    weight, grad, state, step, *, lr=1e-3, betas=(0.9, 0.9999), eps=1e-6, weight_decay=0.0,
    clip_exp=0.25, decoupled_weight_decay=False, maximize=False,
):  # fmt: skip
    beta1, beta2 = betas
    gradient = -grad if maximize else grad
    if not decoupled_weight_decay:
        gradient = gradient + weight_decay * weight
    if step == 1:
        return weight, {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": gradient**2}
    v = state["exp_avg_sq"]
    ratio = gradient / v.sqrt().clamp(min=eps)
    if clip_exp is not None:
        bound = (step - 1) ** clip_exp
        ratio = -(-ratio.clamp(min=-bound)).clamp(min=-bound)
    m = beta1 * state["exp_avg"] + (1 - beta1) * ratio
    if decoupled_weight_decay:
        weight = weight - lr * weight_decay * weight
    return weight - lr * m, {"exp_avg": m, "exp_avg_sq": beta2 * v + (1 - beta2) * gradient**2}
