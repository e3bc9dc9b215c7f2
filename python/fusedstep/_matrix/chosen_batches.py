"""Batches whose rows or columns native passes choose, and the native engine steps together.

Each pass is one launch for all batches, whatever their shapes. The choice stays on the device, and
nothing waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.chained import ChainedBatches, Form
from fusedstep._matrix.chosen import count_of, side_of, takes_rows
from fusedstep._matrix.newton_schulz import Scratch, Step, fits_engine
from fusedstep._matrix.passes import (
    advance_and_move_chosen,
    choice_memory,
    choose_into,
    chosen_updates_into,
    have_passes,
    lie_in_order,
    move_chosen,
)


class ChosenBatches:
    """The memory of the choice of rows or columns, and of the products of what is chosen."""

    def __init__(
        self,
        forms: Sequence[Sequence[Form]],
        weights: list[Tensor],
        averages: list[Tensor],
    ) -> None:
        """``forms``: the matrices of each part, by batch. The operands: the parts of all."""
        self.weights, self._averages = weights, averages
        self._batches, self._device = forms, weights[0].device
        operands = [*weights, *averages]
        self._lie_in_order = lie_in_order(operands) and _are_apart(operands)
        self._fraction: float | None = None

    def fits(self, group: dict[str, Any], grads: list[Tensor]) -> bool:
        """Returns whether passes take gradients, and the engine as much as a group chooses."""
        if not (self._lie_in_order and have_passes(self.weights[:1], [], grads)):
            return False
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
        is_cpu = self._device.type == "cpu"
        self._fits = is_cpu or all(fits_engine(*shape[1:]) for shape in shapes)
        self._chain = ChainedBatches(shapes, chosen, self._device)
        self._size = choice_memory(self._forms)

    def take(
        self,
        scratch: Scratch,
        updates: torch.dtype,
        products: torch.dtype,
        steps: Sequence[Step],
        is_aol: bool,
    ) -> None:
        """Takes all memory of a step. The arguments are those of ``ChainedBatches.take``."""
        self._memory = scratch.take("choice", (self._size,), torch.float64, self._device)
        self._chain.take(scratch, updates, products, steps, is_aol)

    def choose(self, grads: list[Tensor], momentum: float, maximizes: bool) -> None:
        """Takes the updates. On a GPU, adds gradients to the averages and decays what is chosen."""
        operands = self._averages, grads, self._chain.updates, self._memory, self._forms
        if self._device.type == "cpu":
            chosen_updates_into(*operands, maximizes)
        else:
            choose_into(*operands, momentum, maximizes)

    def orthogonalize(self, eps: float, adds_eps: bool) -> list[Tensor]:
        """Iterates on the updates. Returns the rows or columns of each part's direction."""
        return self._chain.orthogonalize(eps, adds_eps)

    def move(
        self,
        grads: list[Tensor],
        directions: list[Tensor],
        momentum: float,
        maximizes: bool,
        keep: float,
        factors: list[float],
    ) -> None:
        """Decays weights, and moves those rows or columns. On a CPU, writes the averages too."""
        moving = self.weights, directions, self._memory, self._forms
        if self._device.type == "cpu":
            options = momentum, maximizes, keep, factors
            advance_and_move_chosen(self._averages, grads, *moving, *options)
        else:
            move_chosen(*moving, keep, factors)


def _are_apart(operands: list[Tensor]) -> bool:
    """Returns whether no operands share memory: passes take elements in any order."""
    sizes = [(x.data_ptr(), x.numel() * x.itemsize) for x in operands]
    ends = sorted((begin, begin + size) for begin, size in sizes)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
