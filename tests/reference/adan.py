"""Adan: Algorithm 1 of Xie et al. 2022, "Adan: Adaptive Nesterov Momentum Algorithm".

The paper's betas are one minus these, and it has g_0 = g_1: the first difference is zero. Each
average is divided by the sum of its weights so far, as in the authors' code. Their last line is
a proximal step, or with no_prox AdamW's decay.
"""

import torch


def adan(
    weight, grad, state, step, *, lr=1e-3, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.0,
    no_prox=False, maximize=False,
):  # fmt: skip
    beta1, beta2, beta3 = betas
    zeros = torch.zeros_like(weight)
    gradient = -grad if maximize else grad
    previous = -state["neg_pre_grad"] if step > 1 else gradient
    change = gradient - previous
    m = (1 - beta1) * gradient + beta1 * state.get("exp_avg", zeros)
    v = (1 - beta2) * change + beta2 * state.get("exp_avg_diff", zeros)
    n = (1 - beta3) * (gradient + beta2 * change) ** 2 + beta3 * state.get("exp_avg_sq", zeros)
    m_hat, v_hat, n_hat = (
        average / (1 - beta**step) for average, beta in ((m, beta1), (v, beta2), (n, beta3))
    )
    update = (m_hat + beta2 * v_hat) / (n_hat.sqrt() + eps)
    if no_prox:
        weight = (1 - lr * weight_decay) * weight - lr * update
    else:
        weight = (weight - lr * update) / (1 + lr * weight_decay)
    return weight, {"exp_avg": m, "exp_avg_sq": n, "exp_avg_diff": v, "neg_pre_grad": -gradient}
