"""The operands of weights whose matrices a step takes through products, and their optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._matrix.newton_schulz import Scratch
from fusedstep._sharding.dtensor import is_dtensor, local
from fusedstep._state.checks import CheckedOperands
from fusedstep._state.counts import count_steps
from fusedstep._state.states import StateStore
from fusedstep._state.storage import seed_of
from fusedstep._step.program import StepsWork
from fusedstep._step.sums import SpreadWeights
from fusedstep._step.undo import Progress


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


class StepsMatrices(StepsWork, Protocol):
    """An optimizer of matrices, as their step knows it."""

    _store: StateStore
    _memory: dict[Tensor, CheckedOperands | None]
    _progress: Progress

    @property
    def _scratch(self) -> Scratch: ...

    @property
    def _passed(self) -> dict[int, list[Any]]: ...

    def _spread_weights(self) -> SpreadWeights: ...

    def _widened(
        self, group: dict[str, Any], weight: Tensor, state: dict[str, Tensor]
    ) -> Tensor: ...

    def _write_back(
        self, group: dict[str, Any], weight: Tensor, wide: Tensor, state: dict[str, Tensor]
    ) -> None: ...

    def _as_muon(self, group: dict[str, Any]) -> dict[str, Any]: ...

    def _takes_batches(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> bool: ...

    def _ratio(self, group: dict[str, Any], shape: Sequence[int]) -> float: ...

    def _second_step(self, group: dict[str, Any], moving: list[Moving]) -> Callable[[], None]: ...


def operands_of(
    optimizer: StepsMatrices, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
) -> list[Moving]:
    """The operands of what this process has of weights of one dtype."""
    moving = []
    for p, grad in zip(weights, grads, strict=True):
        kept = optimizer._store.with_count(group, p)
        state = optimizer._store.decoded(group, p, kept)
        wide = optimizer._widened(group, p, state)
        value, average = local(wide), local(state["momentum_buffer"])
        moving.append(Moving(p, kept, state, wide, value, average, grad.to(wide.dtype)))
    return moving


def with_grads(known: list[Moving], grads: list[Tensor]) -> list[Moving]:
    """Operands that are the same as at an earlier step but for the gradients."""
    return [Moving(*each[:-1], grad) for each, grad in zip(known, grads, strict=True)]


def write_operands(optimizer: StepsMatrices, group: dict[str, Any], moving: list[Moving]) -> None:
    """Puts moved values, and averages, where weights and states keep them."""
    for each in moving:
        if seed_of(group, each.weight) is not None:
            count_steps([each.state["step"]])
        optimizer._write_back(group, each.weight, each.wide, each.state)
        optimizer._store.encode(group, each.weight, each.kept, each.state)
    if any(is_dtensor(each.weight) for each in moving):  # by way of their shards
        increment_version([each.weight for each in moving])
