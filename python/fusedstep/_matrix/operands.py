"""The operands of weights, whose matrices a step takes through products."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._sharding.dtensor import is_dtensor, local
from fusedstep._state.counts import count_steps
from fusedstep._state.storage import seed_of
from fusedstep._step.owner import Owner
from fusedstep._torch_ops.imperative import widened, write_back


class Moving(NamedTuple):
    """A weight in the middle of its step, and what this process has of it."""

    weight: Tensor
    kept: dict[str, Tensor]
    state: dict[str, Tensor]
    """The states of ``kept``, with numbers in place of codes."""
    wide: Tensor
    """The tensor that is updated for the weight."""
    value: Tensor
    """This process's part of that."""
    average: Tensor
    grad: Tensor


class Parts(NamedTuple):
    """Parts of weights that are matrices: what a step moves, and by what."""

    values: list[Tensor]
    averages: list[Tensor]
    grads: list[Tensor]


def operands_of(
    optimizer: Owner, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
) -> list[Moving]:
    """The operands of what this process has of weights of one dtype."""
    moving = []
    for p, grad in zip(weights, grads, strict=True):
        kept = optimizer._store.with_count(group, p)
        state = optimizer._store.decoded(group, p, kept)
        wide = widened(optimizer, group, p, state)
        value, average = local(wide), local(state["momentum_buffer"])
        moving.append(Moving(p, kept, state, wide, value, average, grad.to(wide.dtype)))
    return moving


def with_grads(known: list[Moving], grads: list[Tensor]) -> list[Moving]:
    """Operands that are the same as at an earlier step but for the gradients."""
    return [Moving(*each[:-1], grad) for each, grad in zip(known, grads, strict=True)]


def write_operands(optimizer: Owner, group: dict[str, Any], moving: list[Moving]) -> None:
    """Puts moved values, and averages, where weights and states keep them."""
    for each in moving:
        if seed_of(group, each.weight) is not None:
            count_steps([each.state["step"]])
        write_back(optimizer, group, each.weight, each.wide, each.state)
        optimizer._store.encode(group, each.weight, each.kept, each.state)
    if any(is_dtensor(each.weight) for each in moving):  # by way of their shards
        increment_version([each.weight for each in moving])
