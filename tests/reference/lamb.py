"""LAMB: Algorithm 2 of You et al. 2020, "Large Batch Optimization for Deep Learning".

The scaling function is the identity, so the trust ratio is the norm of the weight over the norm of
the update, and 1 where either is zero.
"""

import torch


def lamb_update(weight, grad, state, step, betas, eps, weight_decay):
    beta1, beta2 = betas
    zeros = torch.zeros_like(weight)
    m = beta1 * state.get("exp_avg", zeros) + (1 - beta1) * grad
    v = beta2 * state.get("exp_avg_sq", zeros) + (1 - beta2) * grad**2
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    update = m_hat / (v_hat.sqrt() + eps) + weight_decay * weight
    return update, {"exp_avg": m, "exp_avg_sq": v}


def trust_ratio(weight, update):
    weight_norm, update_norm = weight.norm().item(), update.norm().item()
    return weight_norm / update_norm if weight_norm != 0 and update_norm != 0 else 1.0


def lamb(
    weight, grad, state, step, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    maximize=False,
):  # fmt: skip
    gradient = -grad if maximize else grad
    update, new_state = lamb_update(weight, gradient, state, step, betas, eps, weight_decay)
    return weight - lr * trust_ratio(weight, update) * update, new_state
