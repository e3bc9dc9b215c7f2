"""Adam and AdamW, from the algorithm boxes of torch.optim.Adam and torch.optim.AdamW.

Kingma and Ba 2015 (Adam), Reddi et al. 2018 (AMSGrad), Loshchilov and Hutter 2019 (AdamW).
"""

import torch


def adam(
    weight, grad, state, step, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    amsgrad=False, maximize=False, decoupled_weight_decay=False,
):  # fmt: skip
    beta1, beta2 = betas
    gradient = -grad if maximize else grad
    if decoupled_weight_decay:
        weight = weight - lr * weight_decay * weight
    else:
        gradient = gradient + weight_decay * weight
    zeros = torch.zeros_like(weight)
    m = beta1 * state.get("exp_avg", zeros) + (1 - beta1) * gradient
    v = beta2 * state.get("exp_avg_sq", zeros) + (1 - beta2) * gradient**2
    new_state = {"exp_avg": m, "exp_avg_sq": v}
    if amsgrad:
        v = torch.maximum(state.get("max_exp_avg_sq", zeros), v)
        new_state["max_exp_avg_sq"] = v
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    return weight - lr * m_hat / (v_hat.sqrt() + eps), new_state


def adamw(weight, grad, state, step, *, weight_decay=1e-2, **options):
    options |= {"weight_decay": weight_decay, "decoupled_weight_decay": True}
    return adam(weight, grad, state, step, **options)
