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

from fusedstep._matrix.chained import ChainedBatches, Form, updates_dtype
from fusedstep._matrix.chosen import count_of, side_of, takes_rows
from fusedstep._matrix.newton_schulz import Scratch, fits_engine
from fusedstep._matrix.operands import Parts
from fusedstep._matrix.passes import (
    advance_and_move_chosen,
    choice_memory,
    choose_into,
    chosen_updates_into,
    have_passes,
    lie_in_order,
    move_chosen,
)
from fusedstep._matrix.step_options import StepOptions


class ChosenBatches:
    """The parts of batches, the memory of the choice of their rows or columns, and the products."""

    subtracts = True

    def __init__(self, forms: Sequence[Sequence[Form]], parts: Parts) -> None:
        """``forms``: the matrices of each part, by batch."""
        self._values, self._averages, _ = parts
        self._batches, self._device = forms, self._values[0].device
        operands = [*self._values, *self._averages]
        self._lie_in_order = lie_in_order(operands) and _are_apart(operands)
        self._fraction: float | None = None

    def fits(self, options: StepOptions, grads: list[Tensor]) -> bool:
        if not (self._lie_in_order and have_passes(self._values[:1], [], grads)):
            return False
        if (fraction := float(options.group["rank_fraction"])) != self._fraction:
            self._set(options.group)
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

    def take(self, options: StepOptions, scratch: Scratch) -> None:
        self._memory = scratch.take("choice", (self._size,), torch.float64, self._device)
        updates = updates_dtype(self._values[0].dtype, options.group.get("ns_dtype"))
        assert updates is not None
        self._chain.take(scratch, options, updates)

    def average(self, options: StepOptions, grads: list[Tensor]) -> None:
        """Takes the updates. On a GPU, adds gradients to the averages and decays what is chosen."""
        operands = self._averages, grads, self._chain.flat_updates, self._memory, self._forms
        if self._device.type == "cpu":
            chosen_updates_into(*operands, options.maximizes)
        else:
            choose_into(*operands, options.momentum, options.maximizes)

    def orthogonalize(self, options: StepOptions) -> list[Tensor]:
        """Returns the rows or columns of each part's direction."""
        return self._chain.orthogonalize(options)

    def move(
        self,
        options: StepOptions,
        grads: list[Tensor],
        directions: list[Tensor],
        factors: list[float],
    ) -> None:
        """Decays weights, and moves those rows or columns. On a CPU, writes the averages too."""
        moving = self._values, directions, self._memory, self._forms
        keep = 1 - options.decay
        if self._device.type == "cpu":
            numbers = options.momentum, options.maximizes, keep, factors
            advance_and_move_chosen(self._averages, grads, *moving, *numbers)
        else:
            move_chosen(*moving, keep, factors)


def _are_apart(operands: list[Tensor]) -> bool:
    """Returns whether no operands share memory: passes take elements in any order."""
    sizes = [(x.data_ptr(), x.numel() * x.itemsize) for x in operands]
    ends = sorted((begin, begin + size) for begin, size in sizes)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
