"""RAdam, from the algorithm box of torch.optim.RAdam; Liu et al. 2020, algorithm 2."""

import torch


def radam(
    weight, grad, state, step, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    decoupled_weight_decay=False, maximize=False,
):  # fmt: skip
    beta1, beta2 = betas
    zeros = torch.zeros_like(weight)
    gradient = -grad if maximize else grad
    if decoupled_weight_decay:
        weight = weight - lr * weight_decay * weight
    else:
        gradient = gradient + weight_decay * weight
    m = beta1 * state.get("exp_avg", zeros) + (1 - beta1) * gradient
    v = beta2 * state.get("exp_avg_sq", zeros) + (1 - beta2) * gradient**2
    new_state = {"exp_avg": m, "exp_avg_sq": v}
    m_hat = m / (1 - beta1**step)
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * step * beta2**step / (1 - beta2**step)
    if rho <= 5:
        return weight - lr * m_hat, new_state
    r = ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5
    return weight - lr * r * m_hat * (1 - beta2**step) ** 0.5 / (v.sqrt() + eps), new_state
