"""The stages of weights, of whose matrices processes have parts, in operations of torch.

Each matrix is gathered to one process for the products, and its direction returns from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.arrangement import most_at_once
from fusedstep._matrix.chosen import Chosen, largest, norms_of, side_of, takes_rows
from fusedstep._matrix.moves import Move
from fusedstep._matrix.muon_groups import form_of
from fusedstep._matrix.operands import Moving, Parts, StepsMatrices, operands_of, write_operands
from fusedstep._matrix.rows import advance, orthogonal, orthogonal_chosen, write_updates
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
from fusedstep._step.program import Pass, add_up, run


class _AllRows:
    """The updates of shards, and the directions of matrices that have been gathered."""

    def __init__(self, optimizer: StepsMatrices, options: StepOptions) -> None:
        self._options, self._scratch = options, optimizer._scratch

    def average(
        self, batch: Batch, moving: list[Moving], parts: Parts, updates: list[Tensor]
    ) -> None:
        """Takes gradients into the averages, and writes the updates."""
        advance(self._options, moving)
        write_updates(self._options, parts, updates)

    def direction(self, share: Share, whole: Tensor) -> Tensor:
        """The direction of whole matrices; overwrites their updates."""
        return orthogonal(self._options, self._scratch, whole)


class _ChosenRows(_AllRows):
    """As ``_AllRows``, of the rows or columns that are chosen; directions of all others are 0."""

    def __init__(
        self, optimizer: StepsMatrices, options: StepOptions, places: dict[Unit, Tensor]
    ) -> None:
        """``places``: of the rows or columns of each matrix."""
        super().__init__(optimizer, options)
        self._places = places

    def average(
        self, batch: Batch, moving: list[Moving], parts: Parts, updates: list[Tensor]
    ) -> None:
        """As ``_AllRows``; decays what is chosen in this process's parts of the averages."""
        super().average(batch, moving, parts, updates)
        options = self._options
        for unit, average in zip(batch.units, parts.averages, strict=True):
            of_rows = takes_rows(options.group, *unit.matrix)
            factors = average.new_ones(side_of(options.group, *unit.matrix))
            factors.index_fill_(0, self._places[unit], options.momentum)
            own = batch.part_of_numbers(unit, factors, of_rows)
            average.mul_(own.view(-1, *[1] * (average.ndim - 1)) if of_rows else own)

    def direction(self, share: Share, whole: Tensor) -> Tensor:
        options, scratch, there = self._options, self._scratch, whole.device
        index = torch.stack([self._places[unit] for unit in share.units]).to(there)
        chosen = Chosen.of(index, takes_rows(options.group, *share.matrix))
        direction = scratch.take("direction", whole.shape, whole.dtype, there).zero_()
        (x,) = orthogonal_chosen(options, scratch, [whole], [chosen], whole.dtype)
        return chosen.put(direction, x)


class GatheredStages:
    """The stages of a batch of shards: a transfer goes before the products, and one after."""

    def __init__(self, shards: _Shards, rows: _AllRows, number: int, batch: Batch) -> None:
        """``number``: the place of the batch among those of the shards."""
        self._shards, self._rows, self._number, self._batch = shards, rows, number, batch

    def begin(self) -> list[Moving]:
        self._exchange = self._shards.exchange(self._number, self._batch)
        self._moving, self._parts = self._shards.operands(self._batch)
        return self._moving

    def average(self) -> None:
        self._rows.average(self._batch, self._moving, self._parts, self._exchange.parts)

    def orthogonalize(self) -> Pass:
        yield from self._exchange.gather()
        self._directions = yield from self._exchange.scatter(self._rows.direction)

    def move(self) -> None:
        optimizer, options, values = (
            self._shards.optimizer,
            self._shards.options,
            self._parts.values,
        )
        if values:
            factors = options.factors(optimizer._ratio, [unit.shape for unit in self._batch.units])
            Move(options, optimizer._scratch, values, False).take(self._directions, factors)

    def finish(self) -> None:
        write_operands(self._shards.optimizer, self._shards.options.group, self._moving)


class _Shards:
    """Weights of one dtype whose shards lie alike, with their gradients."""

    def __init__(
        self,
        optimizer: StepsMatrices,
        group: dict[str, Any],
        cut: Cut,
        weights: list[Tensor],
        grads: list[Tensor],
    ) -> None:
        there = transfer_device(cut, weights[0].device)
        self.optimizer, self.options = optimizer, StepOptions(group, there)
        self._cut, self._weights, self._grads = cut, weights, self.options.ascending(grads)
        forms = [form_of(group, p) for p in weights]
        self.batches = batches_over(cut, forms, most_at_once(there))

    def exchange(self, number: int, batch: Batch) -> Exchange:
        """The transfers of a batch. Directions return in the dtype of products, if it is narrow."""
        optimizer, options, first = self.optimizer, self.options, self._weights[0]
        wide = torch.float32 if optimizer._store.has_wide(options.group, first) else first.dtype
        narrow = min(options.products, wide, key=lambda dtype: dtype.itemsize)
        take = optimizer._scratch.take
        return Exchange(self._cut, batch, number, take, first.device, wide, narrow)

    def operands(self, batch: Batch) -> tuple[list[Moving], Parts]:
        """The operands of the weights of a batch, and this process's parts of its matrices."""
        some, own = ([each[i] for i in batch.weights] for each in (self._weights, self._grads))
        moving = operands_of(self.optimizer, self.options.group, some, own)
        by_place = dict(zip(batch.weights, moving, strict=True))
        places = [(unit, by_place[unit.weight]) for unit in batch.units]
        values = [batch.part_of_shard(unit, each.value) for unit, each in places]
        averages = [batch.part_of_shard(unit, each.average) for unit, each in places]
        grads = [batch.part_of_shard(unit, each.grad) for unit, each in places]
        return moving, Parts(values, averages, grads)

    def choose(self) -> dict[Unit, Tensor]:
        """The places of the rows or columns that are chosen of each matrix, in all processes."""
        group, batches = self.options.group, self.batches
        units = [unit for batch in batches for unit in batch.all_units]
        sides = [side_of(group, *unit.matrix) for unit in units]
        flat = torch.zeros(sum(sides), dtype=torch.float64, device=self._weights[0].device)
        norms = dict(zip(units, flat.split(sides), strict=True))
        for batch in batches:
            _, parts = self.operands(batch)
            for unit, average, grad in zip(batch.units, *parts[1:], strict=True):
                of_rows = takes_rows(group, *unit.matrix)
                x = torch.add(average, grad)
                found = norms_of(x.reshape(1, len(x), -1), of_rows)
                to = batch.part_of_numbers(unit, norms[unit], of_rows)
                to.copy_(found.view(to.shape))
        run([add_up([(self._cut, flat)])])
        return {unit: largest(group, each) for unit, each in norms.items()}


def stages_of_shards(
    optimizer: StepsMatrices,
    group: dict[str, Any],
    cut: Cut,
    weights: list[Tensor],
    grads: list[Tensor],
) -> Iterator[GatheredStages]:
    """The stages of weights of one dtype whose shards lie alike, batch by batch."""
    shards = _Shards(optimizer, group, cut, weights, grads)
    rows = _AllRows(optimizer, shards.options)
    if shards.options.has_choice:
        rows = _ChosenRows(optimizer, shards.options, shards.choose())
    for number, batch in enumerate(shards.batches):
        yield GatheredStages(shards, rows, number, batch)
