"""RMSprop, from the algorithm box of torch.optim.RMSprop; Tieleman and Hinton 2012, Graves 2013."""

import torch


def rmsprop(
    weight, grad, state, step, *, lr=1e-2, alpha=0.99, eps=1e-8, weight_decay=0.0, momentum=0.0,
    centered=False, maximize=False,
):  # fmt: skip
    zeros = torch.zeros_like(weight)
    gradient = -grad if maximize else grad
    gradient = gradient + weight_decay * weight
    v = alpha * state.get("square_avg", zeros) + (1 - alpha) * gradient**2
    new_state = {"square_avg": v}
    if centered:
        mean = alpha * state.get("grad_avg", zeros) + (1 - alpha) * gradient
        new_state["grad_avg"] = mean
        v = v - mean**2 if alpha else zeros
    update = gradient / (v.sqrt() + eps)
    if momentum > 0:
        update = momentum * state.get("momentum_buffer", zeros) + update
        new_state["momentum_buffer"] = update
    return weight - lr * update, new_state
