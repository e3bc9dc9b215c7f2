"""Batches of which the native engine steps all rows together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedstep._matrix.chained import ChainedBatches, Form, updates_dtype
from fusedstep._matrix.moves import Move
from fusedstep._matrix.newton_schulz import Scratch
from fusedstep._matrix.operands import Parts
from fusedstep._matrix.passes import (
    advance_and_move,
    average_into,
    have_passes,
    lie_in_order,
    updates_into,
)
from fusedstep._matrix.step_options import StepOptions


class WholeBatches:
    """The parts of batches, and the memory of their products."""

    subtracts = False

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], forms: Sequence[Sequence[Form]], parts: Parts
    ) -> None:
        """``shapes``: of all parts. ``forms``: the matrices of each, by batch."""
        self._values, self._averages, _ = parts
        self._is_cpu = self._values[0].is_cpu
        self._lie_in_order = lie_in_order([*self._values, *self._averages])
        self._chain = ChainedBatches(shapes, forms, self._values[0].device)
        self._move: Any = None

    def fits(self, options: StepOptions, grads: list[Tensor]) -> bool:
        return self._lie_in_order and have_passes(self._values[:1], [], grads)

    def take(self, options: StepOptions, scratch: Scratch) -> None:
        updates = updates_dtype(self._values[0].dtype, options.group.get("ns_dtype"))
        assert updates is not None
        self._chain.take(scratch, options, updates)
        if not self._is_cpu:
            self._move = Move(options, scratch, self._values, is_native=True)

    def average(self, options: StepOptions, grads: list[Tensor]) -> None:
        """Writes the updates. On a GPU, takes a share of gradients into averages."""
        write = updates_into if self._is_cpu else average_into
        share, updates = 1 - options.momentum, self._chain.updates
        write(self._averages, grads, updates, share, options.lead)

    def orthogonalize(self, options: StepOptions) -> list[Tensor]:
        return self._chain.orthogonalize(options)

    def move(
        self,
        options: StepOptions,
        grads: list[Tensor],
        directions: list[Tensor],
        factors: list[float],
    ) -> None:
        """Decays and moves weights. On a CPU, writes the averages in the same pass."""
        if not self._is_cpu:
            self._move.take(directions, factors)
            return
        share, keep = 1 - options.momentum, 1 - options.decay
        advance_and_move(self._averages, grads, self._values, directions, share, keep, factors)
