"""A model for steps of buckets, its optimizers, and trainings to compare."""

import torch
from torch import nn

from fusedstep import optim
from support.cases import parameters_of

ALONE, PAIRS, WHOLE = 0, 0.003, 25
"""Sizes of buckets in MiB: of a weight, of a few, and of a group."""


class Net(nn.Module):
    """Has a weight that is used twice, and one that is not used."""

    def __init__(self, dtype=torch.float32, device="cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.unused = nn.Parameter(torch.ones(16, 16))
        self.to(dtype).to(device)

    def forward(self, x):
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(layer(x))
        return x

    def grads(self):
        return [name for name, p in self.named_parameters() if p.grad is not None]


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 16, generator=generator) for _ in range(count)]


def backward(model, batch):
    model(batch.to(model.unused.dtype)).square().sum().backward()


def two_groups(model):
    """Matrices, and the others with another learning rate."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [{"params": matrices}, {"params": others, "lr": 1e-3}]


def of_class(cls, model):
    """An optimizer of matrices."""
    groups = two_groups(model)
    if cls is optim.Muon:
        groups[1]["use_muon"] = False
    if cls is optim.MuSGD:
        groups[0] |= {"use_muon": True, "momentum": 0.9}
    if "rank" in parameters_of(cls):
        groups[0] |= {"rank": 4, "update_proj_gap": 2}
    return cls(groups, lr=1e-2)


def accumulated(model, optimizer, passes):
    """The weights after two steps, each of some passes."""
    for first in (0, passes):
        for batch in batches(2 * passes)[first : first + passes]:
            backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def by_closures(model, optimizer, gradients=backward):
    """The weights after three steps by closures, under a schedule."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for batch in batches(3):

        def closure(batch=batch):
            optimizer.zero_grad()
            gradients(model, batch)
            return 7.0

        assert optimizer.step(closure) == 7.0
        scheduler.step()
    return list(model.parameters())


def assert_same(found, expected):
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
