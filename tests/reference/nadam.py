"""NAdam, from the algorithm box of torch.optim.NAdam; Dozat 2016, algorithm 2.

As in torch the product of the momenta is a float32 number.
"""

import torch


def nadam(
    weight, grad, state, step, *, lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    momentum_decay=4e-3, decoupled_weight_decay=False, maximize=False,
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
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay)) for t in (step, step + 1))
    product = state["mu_product"].float() if "mu_product" in state else torch.ones(())
    product = product * mu
    q = product.item()
    u = mu_next * m / (1 - q * mu_next) + (1 - mu) * gradient / (1 - q)
    new_state = {"exp_avg": m, "exp_avg_sq": v, "mu_product": product}
    return weight - lr * u / ((v / (1 - beta2**step)).sqrt() + eps), new_state
