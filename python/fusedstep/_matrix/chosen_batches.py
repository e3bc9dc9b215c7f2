"""Batches whose rows or columns native passes choose, and the native engine steps together.

Each pass is one launch for all batches, whatever their shapes. The choice stays on the device, and
nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.chained import ChainedBatches, Form
from fusedstep._matrix.chosen import count_of, side_of, takes_rows
from fusedstep._matrix.newton_schulz import Scratch, Step, fits_engine
from fusedstep._matrix.passes import choice_memory, choose_into, move_chosen


class ChosenBatches:
    """The memory of the choice of rows or columns, and of the products of what is chosen."""

    def __init__(self, batches: Sequence[Sequence[Form]], device: torch.device) -> None:
        """``batches``: the matrices of each part, by batch."""
        self._batches, self._device = batches, device
        self._fraction: float | None = None

    def fits(self, group: dict[str, Any]) -> bool:
        """Returns whether the native engine takes as many rows or columns as a group chooses."""
        if (fraction := float(group["rank_fraction"])) != self._fraction:
            self._set(group)
            self._fraction = fraction
        return self._fits

    def _set(self, group: dict[str, Any]) -> None:
        self._forms: list[int] = []
        chosen: list[list[Form]] = []
        for batch in self._batches:
            chosen.append([])
            for matrices, rows, columns in batch:
                by_rows = takes_rows(group, rows, columns)
                count = count_of(group, side_of(group, rows, columns))
                self._forms += matrices, rows, columns, count, int(by_rows)
                shape = (count, columns) if by_rows else (rows, count)
                chosen[-1].append((matrices, *shape))
        shapes = [form for batch in chosen for form in batch]
        self._fits = all(fits_engine(*shape[1:]) for shape in shapes)
        self._chain = ChainedBatches(shapes, chosen, self._device)
        self._size = choice_memory(self._forms)

    def take(
        self, scratch: Scratch, updates: torch.dtype, products: torch.dtype, steps: Sequence[Step]
    ) -> None:
        """Takes all memory of a step. ``updates``, ``products``: dtypes."""
        self._memory = scratch.take("choice", (self._size,), torch.float64, self._device)
        self._chain.take(scratch, updates, products, steps)

    def choose(
        self, sums: list[Tensor], grads: list[Tensor], momentum: float, maximizes: bool
    ) -> None:
        """Adds gradients to sums, takes the updates, and decays what is chosen."""
        updates = self._chain.updates
        choose_into(sums, grads, updates, self._memory, self._forms, momentum, maximizes)

    def orthogonalize(self, eps: float, adds_eps: bool) -> list[Tensor]:
        """Iterates on the updates. Returns the rows or columns of each part's direction."""
        return self._chain.orthogonalize(eps, adds_eps)

    def move(
        self,
        weights: list[Tensor],
        directions: Sequence[Tensor],
        keep: float,
        factors: list[float],
    ) -> None:
        """Decays weights, and moves those rows or columns along their directions."""
        move_chosen(weights, directions, self._memory, self._forms, keep, factors)
