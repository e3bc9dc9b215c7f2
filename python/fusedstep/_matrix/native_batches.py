"""Batches that native passes and the native engine step together, and the stages of their step.

Each pass over weights, and each level of the products, is one launch for all batches, whatever
their shapes. A choice of rows or columns stays on the device, and nothing waits for it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._matrix.chained import ChainedBatches, Form
from fusedstep._matrix.chosen import count_of, has_choice, side_of, takes_rows
from fusedstep._matrix.moves import Move
from fusedstep._matrix.muon_step import Stages
from fusedstep._matrix.newton_schulz import Scratch, fits_engine
from fusedstep._matrix.operands import Moving, with_grads
from fusedstep._matrix.passes import average_into, have_passes, in_order, lie_in_order
from fusedstep._matrix.step_options import StepOptions
from fusedstep._matrix.together import Together, parts_of_batches
from fusedstep._step.program import Pass


class NativeBatches:
    """Batches with their operands, and the memory of their products."""

    def __init__(self, group: dict[str, Any], batches: list[Together]) -> None:
        self.batches, self.device = batches, batches[0].weights[0].device
        shares = [share for batch in batches for share in batch.shares]
        shapes = [part.shape for share in shares for _, part in share.parts]
        self._forms = [[part.form for _, part in share.parts] for share in shares]
        parts = [batch.parts_of(batch.moving) for batch in batches]
        self.values = [value for each in parts for value in each.values]
        self.averages = [average for each in parts for average in each.averages]
        operands = [*self.values, *self.averages]
        self._lie_in_order = lie_in_order(operands)
        self._lie_in_order &= not has_choice(group) or _are_apart(operands)
        self.chain, self._fits = ChainedBatches(shapes, self._forms, self.device), True
        self._fraction = None

    def fits(self, options: StepOptions, grads: list[Tensor]) -> bool:
        """Returns whether passes take gradients, and the engine as much as a group chooses."""
        if not (self._lie_in_order and have_passes(self.values[:1], [], grads)):
            return False
        if (fraction := options.group.get("rank_fraction")) != self._fraction:
            self._choose(options.group)
            self._fraction = fraction
        return self._fits

    def _choose(self, group: dict[str, Any]) -> None:
        """Has the products be those of the rows or columns that a group chooses."""
        self.choice: list[int] = []
        """Five numbers for each part: its matrices, their rows and columns, how many rows or
        columns are chosen of each, and whether rows are."""
        chosen: list[list[Form]] = []
        for batch in self._forms:
            chosen.append([])
            for matrices, rows, columns in batch:
                by_rows = takes_rows(group, rows, columns)
                count = count_of(group, side_of(group, rows, columns))
                self.choice += matrices, rows, columns, count, int(by_rows)
                shape = (count, columns) if by_rows else (rows, count)
                chosen[-1].append((matrices, *shape))
        shapes = [form for batch in chosen for form in batch]
        is_cpu = self.device.type == "cpu"
        self._fits = is_cpu or all(fits_engine(*shape[1:]) for shape in shapes)
        self.chain = ChainedBatches(shapes, chosen, self.device)
        self.choice_size = torch.ops.fusedstep.choice_memory.default(self.choice)
        """The numbers of float64 in which passes keep the choice."""


class NativeStages(Stages):
    """The stages of native batches. On a CPU the last pass writes averages and weights.

    It is one call, which finds all of its memory before it writes.
    """

    def __init__(
        self, options: StepOptions, scratch: Scratch, native: NativeBatches, grads: list[Tensor]
    ) -> None:
        """``grads``: of the weights of the batches."""
        self._options, self._scratch = options, scratch
        self._native, self._grads = native, grads
        self._is_cpu = native.device.type == "cpu"

    def begin(self) -> list[Moving]:
        options, native, grads = self._options, self._native, in_order(self._grads)
        if not options.has_choice:  # else passes subtract gradients where a step maximizes
            grads = options.ascending(grads)
        self._parts = parts_of_batches(native.batches, grads)
        self._find_memory()
        return with_grads([each for batch in native.batches for each in batch.moving], grads)

    def _find_memory(self) -> None:
        values = self._native.values
        self._native.chain.take(self._scratch, self._options, values[0].dtype)
        if not self._is_cpu:
            self._move = Move(self._options, self._scratch, values, is_native=True)

    def average(self) -> None:
        native, lead, share = self._native, self._options.lead, 1 - self._options.momentum
        operands = native.averages, self._parts, native.chain.updates
        if self._is_cpu:
            torch.ops.fusedstep.updates_into.default(*operands, share, lead, lead != 1)
        else:
            average_into(*operands, share, lead)

    def orthogonalize(self) -> Pass:
        self._directions = self._native.chain.orthogonalize(self._options)
        shapes = (batch.shapes for batch in self._native.batches)
        self._factors = self._options.factors(itertools.chain.from_iterable(shapes))
        yield from ()

    def move(self) -> None:
        native, share, keep = self._native, 1 - self._options.momentum, 1 - self._options.decay
        if not self._is_cpu:
            self._move.take(self._directions, self._factors)
            return
        moving = native.averages, self._parts, native.values, self._directions
        torch.ops.fusedstep.advance_and_move.default(*moving, share, keep, self._factors)
        increment_version(native.averages)
        increment_version(native.values)


class ChosenStages(NativeStages):
    """As ``NativeStages``, of the rows or columns with the largest norms."""

    def _find_memory(self) -> None:
        native, scratch = self._native, self._scratch
        size = (native.choice_size,)
        self._choice = scratch.take("choice", size, torch.float64, native.device), native.choice
        native.chain.take(scratch, self._options, native.values[0].dtype)

    def average(self) -> None:
        """Writes the updates. On a GPU, adds gradients to the averages and decays what is chosen.

        The choice is kept for ``move``.
        """
        native, options = self._native, self._options
        operands = native.averages, self._parts, native.chain.flat_updates, *self._choice
        if self._is_cpu:
            torch.ops.fusedstep.chosen_updates_into.default(*operands, options.maximizes)
            return
        torch.ops.fusedstep.choose_into.default(*operands, options.momentum, options.maximizes)
        increment_version(native.averages)

    def move(self) -> None:
        native, options, passes = self._native, self._options, torch.ops.fusedstep
        moving = native.values, self._directions, *self._choice
        numbers = 1 - options.decay, self._factors
        if self._is_cpu:
            averaging = options.momentum, options.maximizes
            run = passes.advance_and_move_chosen.default
            run(native.averages, self._parts, *moving, *averaging, *numbers)
            increment_version(native.averages)
        else:
            passes.move_chosen.default(*moving, *numbers)
        increment_version(native.values)


def _are_apart(operands: list[Tensor]) -> bool:
    """Returns whether no operands share memory: passes take elements in any order."""
    sizes = [(x.data_ptr(), x.numel() * x.itemsize) for x in operands]
    ends = sorted((begin, begin + size) for begin, size in sizes)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
