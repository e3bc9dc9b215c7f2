"""Weights that are matrices, steps of them, and comparisons."""

import torch
from torch.profiler import ProfilerActivity, profile

SHAPES = ((24, 8), (8, 24), (8, 8), (24, 8), (5, 40))


def parameters(shapes=SHAPES, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def step(optimizer, params, number):
    generator = torch.Generator().manual_seed(100 + number)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    return optimizer.step()


def error(found, expected):
    found, expected = found.detach().double(), expected.detach().double()
    return ((found - expected).norm() / expected.norm()).item()


def assert_moved_alike(found, expected, start, bound):
    """Compares moves of weights, relative to their size."""
    for a, b, first in zip(found, expected, start, strict=True):
        first = first.detach().double()
        assert error(a.detach().double() - first, b.detach().double() - first) < bound


def largest_allocation(run):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        run()
    return max(event.self_cpu_memory_usage for event in found.events())
