"""Rprop, from the algorithm box of torch.optim.Rprop; Riedmiller and Braun 1993."""

import torch


def rprop(
    weight, grad, state, step, *, lr=1e-2, etas=(0.5, 1.2), step_sizes=(1e-6, 50), maximize=False
):
    gradient = -grad if maximize else grad
    product = gradient * state.get("prev", torch.zeros_like(weight))
    size = state.get("step_size", torch.full_like(weight, lr))
    size = torch.where(torch.gt(product, 0), size * etas[1], size)
    size = torch.where(torch.lt(product, 0), size * etas[0], size)
    size = torch.minimum(torch.maximum(size, torch.full_like(weight, step_sizes[0])),
                         torch.full_like(weight, step_sizes[1]))  # fmt: skip
    gradient = torch.where(torch.lt(product, 0), torch.zeros_like(weight), gradient)
    return weight - size * gradient.sign(), {"prev": gradient, "step_size": size}
