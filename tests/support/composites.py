"""Optimizers that have no row of the case table: by rows, columns, matrices, projections."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from fusedstep import optim

SHAPE = (12, 8)


class Composite(NamedTuple):
    """An optimizer with the options of its groups, and the form of its gradients."""

    optimizer: type[torch.optim.Optimizer]
    of_group: dict[str, Any]
    counts: bool = True
    makes_whole: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone
    rate: str = "lr"
    variant: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.optimizer.__name__, self.variant)))

    def build(self, params, **options):
        return self.optimizer([{"params": list(params)} | self.of_group], **options)

    def grad(self, values):
        return self.makes_whole(values)


def as_sparse(values):
    rows = torch.arange(len(values))[None]
    return torch.sparse_coo_tensor(rows, values, values.shape, check_invariants=True)


ROWS = (
    Composite(optim.Adafactor, {}),
    Composite(optim.CAME, {}),
    Composite(optim.Muon, {}, counts=False),
    Composite(optim.Muon, {"rank_fraction": 0.25}, counts=False, variant="of chosen rows"),
    Composite(optim.MuSGD, {"use_muon": True, "momentum": 0.9, "nesterov": True}, counts=False),
    Composite(optim.GaLoreAdamW, {"rank": 3, "update_proj_gap": 3}),
    Composite(optim.GaLoreAdafactor, {"rank": 3, "update_proj_gap": 3}, rate="max_relative_step"),
    Composite(optim.APOLLOAdamW, {"rank": 3, "update_proj_gap": 3}),
    Composite(optim.RowWiseAdagrad, {}),
    Composite(optim.SparseAdam, {}, makes_whole=as_sparse),
)


DENSE = [row for row in ROWS if row.optimizer is not optim.SparseAdam]
#: Rows without a native plan, which tells of a second thread.
WITHOUT_PLAN = [row for row in DENSE if row.optimizer is not optim.RowWiseAdagrad]
MODES = pytest.mark.parametrize("fused", [None, True, False])


def values_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SHAPE, generator=generator)


def stepped(row, steps=2, count=2, **options):
    """Weights and an optimizer after some steps, with the gradients of the next."""
    params = [torch.nn.Parameter(values_of(100 + i)) for i in range(count)]
    optimizer = row.build(params, **options)
    for step in range(steps + 1):
        for param in params:
            param.grad = row.grad(values_of(step))
        if step < steps:
            optimizer.step()
    return params, optimizer
