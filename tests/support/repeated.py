"""Optimizers whose steps repeat, and their gradients."""

import torch
from torch.nn import Parameter

from support.stepping import TEAM

SHAPES = ((33, 31), (7,), (TEAM + 5,), (), (0, 3))


def build(case, **options):
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.1}]
    return case.build(groups, lr=0.01, **options), params


def set_grads(params, seed, *, move=False):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if p.grad is None or move or p.grad.shape != p.shape:
            p.grad = grad
        else:
            p.grad.copy_(grad)


def move(name, value):
    value.data = value.data + 1
