"""Steps of Muon, and of its reference, on the same gradients."""

import torch

from reference.muon import muon
from support.matrices import SHAPES, parameters, step


def trained(make, shapes=SHAPES, dtype=torch.float32, steps=3, **options):
    params = parameters(shapes, dtype)
    optimizer = make(params, **({"lr": 0.02} | options))
    for number in range(steps):
        step(optimizer, params, number)
    return params, optimizer


def by_reference(shapes=SHAPES, steps=3, blocks=lambda w: [w], **options):
    """Weights after steps in float64; ``blocks`` are the matrices of a weight, as views."""
    weights = [p.detach().double() for p in parameters(shapes)]
    states = [[{} for _ in blocks(w)] for w in weights]
    for number in range(steps):
        generator = torch.Generator().manual_seed(100 + number)
        for weight, kept in zip(weights, states, strict=True):
            grad = torch.randn(weight.shape, generator=generator).double()
            for i, (block, g) in enumerate(zip(blocks(weight), blocks(grad), strict=True)):
                new, kept[i] = muon(block, g, kept[i], **({"lr": 0.02} | options))
                block.copy_(new)
    return weights
