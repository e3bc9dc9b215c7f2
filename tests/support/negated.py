"""Gradients and states with the negative bit set, and the ways to step them."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusedstep._native import ops


def negated(values):
    """A view of the given values over memory that holds them negated."""
    return torch.complex(torch.zeros_like(values), -values).conj().imag


@contextlib.contextmanager
def without_binding():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "bind", None)
        yield


def step_scaled(optimizer):
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


def step_under_a_mode(optimizer):
    with Seen():
        optimizer.step()


def step_without_binding(optimizer):
    with without_binding():
        optimizer.step()


WAYS = {
    "repeated": lambda optimizer: optimizer.step(),
    "with an argument": lambda optimizer: optimizer.step(None),
    "clipped": lambda optimizer: optimizer.step(max_norm=1e9),
    "clearing": lambda optimizer: optimizer.step(zero_grad=True),
    "scaled": step_scaled,
    "under a mode": step_under_a_mode,
    "without binding": step_without_binding,
}


def negated_at_once(values):
    """A view of the given values over memory without gaps that holds them negated."""
    return torch._neg_view(-values)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
