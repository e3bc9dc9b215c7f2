"""The stages of weights, of whose matrices processes have parts, in operations of torch.

Each matrix is gathered to one process for the products, and its direction returns from there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedstep._matrix.arrangement import most_at_once
from fusedstep._matrix.chosen import Chosen, largest, norms_of, side_of, takes_rows
from fusedstep._matrix.moves import Move
from fusedstep._matrix.muon_groups import form_of
from fusedstep._matrix.muon_step import Stages
from fusedstep._matrix.newton_schulz import Scratch
from fusedstep._matrix.operands import Moving, Parts, operands_of, write_operands
from fusedstep._matrix.rows import advance, directions_of_chosen, orthogonal, write_updates
from fusedstep._matrix.step_options import StepOptions
from fusedstep._sharding.exchange import (
    Batch,
    Cut,
    Exchange,
    Share,
    Unit,
    batches_over,
    transfer_device,
)
from fusedstep._step.owner import Owner
from fusedstep._step.program import Pass, add_up, run


class Shards:
    """Weights of one dtype whose shards lie alike, with their gradients."""

    def __init__(
        self,
        optimizer: Owner,
        options: StepOptions,
        scratch: Scratch,
        cut: Cut,
        weights: list[Tensor],
        grads: list[Tensor],
    ) -> None:
        self.optimizer, self.options, self.scratch, self.cut = optimizer, options, scratch, cut
        self.weights, self._grads = weights, self.options.ascending(grads)
        forms = [form_of(options.group, p) for p in weights]
        there = transfer_device(cut, weights[0].device)
        self.batches = batches_over(cut, forms, most_at_once(there))
        self.choice = self._choose() if self.options.has_choice else {}
        """The places of the rows or columns that are chosen of each matrix, in all processes."""

    def stages(self) -> list[GatheredStages]:
        """The stages of each batch."""
        return [GatheredStages(self, *each) for each in enumerate(self.batches)]

    def operands(self, batch: Batch) -> tuple[list[Moving], Parts]:
        """The operands of the weights of a batch, and this process's parts of its matrices."""
        some, own = ([each[i] for i in batch.weights] for each in (self.weights, self._grads))
        moving = operands_of(self.optimizer, self.options.group, some, own)
        by_place = dict(zip(batch.weights, moving, strict=True))
        units = [(unit, by_place[unit.weight]) for unit in batch.units]
        names = "value", "average", "grad"
        found = ([batch.part_of_shard(u, getattr(x, name)) for u, x in units] for name in names)
        return moving, Parts(*found)

    def _choose(self) -> dict[Unit, Tensor]:
        group, device = self.options.group, self.weights[0].device
        units = [unit for batch in self.batches for unit in batch.all_units]
        sides = [side_of(group, *unit.matrix) for unit in units]
        flat = torch.zeros(sum(sides), dtype=torch.float64, device=device)
        norms = dict(zip(units, flat.split(sides), strict=True))
        for batch in self.batches:
            _, parts = self.operands(batch)
            for unit, average, grad in zip(batch.units, *parts[1:], strict=True):
                of_rows = takes_rows(group, *unit.matrix)
                x = torch.add(average, grad)
                found = norms_of(x.reshape(1, len(x), -1), of_rows)
                to = batch.part_of_numbers(unit, norms[unit], of_rows)
                to.copy_(found.view(to.shape))
        run([add_up([(self.cut, flat)])])
        return {unit: largest(group, each) for unit, each in norms.items()}


class GatheredStages(Stages):
    """The stages of a batch of shards: a transfer goes before the products, and one after."""

    def __init__(self, shards: Shards, number: int, batch: Batch) -> None:
        """``number``: the place of the batch among the batches of the shards."""
        self._shards, self._number, self._batch = shards, number, batch
        self._options, self._scratch = shards.options, shards.scratch

    def begin(self) -> list[Moving]:
        options, first = self._options, self._shards.weights[0]
        has_wide = self._shards.optimizer._store.has_wide(options.group, first)
        wide = torch.float32 if has_wide else first.dtype
        narrow = min(wide, options.products, key=lambda dtype: dtype.itemsize)
        memory = self._scratch.take, first.device, wide, narrow
        self._exchange = Exchange(self._shards.cut, self._batch, self._number, *memory)
        self._moving, self._parts = self._shards.operands(self._batch)
        return self._moving

    def average(self) -> None:
        advance(self._options, self._moving)
        write_updates(self._options, self._parts, self._exchange.parts)
        if self._options.has_choice:
            for unit, average in zip(self._batch.units, self._parts.averages, strict=True):
                self._decay_chosen(unit, average)

    def _decay_chosen(self, unit: Unit, average: Tensor) -> None:
        """Decays the rows or columns that are chosen of a matrix in this process's part of it."""
        group, places = self._options.group, self._shards.choice[unit]
        of_rows, side = takes_rows(group, *unit.matrix), side_of(group, *unit.matrix)
        factors = average.new_ones(side).index_fill_(0, places, self._options.momentum)
        own = self._batch.part_of_numbers(unit, factors, of_rows)
        average.mul_(own.view(-1, *[1] * (average.ndim - 1)) if of_rows else own)

    def orthogonalize(self) -> Pass:
        yield from self._exchange.gather()
        self._directions = yield from self._exchange.scatter(self._direction)

    def _direction(self, share: Share, whole: Tensor) -> Tensor:
        """The direction of whole matrices; overwrites their updates."""
        options, scratch, choice = self._options, self._scratch, self._shards.choice
        if not options.has_choice:
            return orthogonal(options, scratch, whole)
        places = torch.stack([choice[unit] for unit in share.units]).to(whole.device)
        chosen = Chosen.of(places, takes_rows(options.group, *share.matrix))
        return directions_of_chosen(options, scratch, [whole], [chosen], whole.dtype)[0]

    def move(self) -> None:
        options, values = self._options, self._parts.values
        if values:
            factors = options.factors(unit.shape for unit in self._batch.units)
            Move(options, self._scratch, values, is_native=False).take(self._directions, factors)

    def finish(self) -> None:
        write_operands(self._shards.optimizer, self._options.group, self._moving)
