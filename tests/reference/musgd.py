"""MuSGD in float64: the polynomials of the singular values of Muon, and then SGD's formula."""

import torch

from reference.muon import QUINTIC
from reference.orthogonal import iterated
from reference.sgd import sgd


def musgd(
    weight, gradient, state, *, lr=1e-3, momentum=0.0, weight_decay=0.0, nesterov=False,
    use_muon=False, muon=0.5, sgd_factor=0.5, sizes=None, iterate=iterated,
):  # fmt: skip
    options = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    if not use_muon:
        return sgd(weight, gradient, state, 1, lr=lr, **options)
    m = momentum * state.get("momentum_buffer", 0) + (1 - momentum) * gradient
    update = momentum * m + (1 - momentum) * gradient if nesterov else m
    moves = []
    for part in update.split(sizes or len(update)):
        matrix = part.reshape(len(part), -1)
        # The norm is below 1 then, which is what an eps of 1 divides by.
        x = iterate(matrix / (matrix.norm() + 1e-7), [QUINTIC] * 5, 1.0)
        height, width = part.shape[-2:]
        moves.append(max(1, height / width) ** 0.5 * x.view(part.shape))
    weight = weight - lr * muon * torch.cat(moves)
    name = "momentum_buffer_SGD"
    buffer = {"momentum_buffer": state[name]} if name in state else {}
    weight, new = sgd(weight, gradient, buffer, 1, lr=lr * sgd_factor, **options)
    return weight, {"momentum_buffer": m} | ({name: new["momentum_buffer"]} if new else {})
