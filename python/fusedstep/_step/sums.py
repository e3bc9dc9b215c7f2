"""Weights that are spread over processes, and sums over all of their elements.

The collectives of a step, and their shapes, follow from the weights of an optimizer alone. Were
they to follow from those that have a gradient in this process, one that another process lacks would
leave a process waiting, or add up numbers of different weights. Each collective also counts the
processes that have a gradient of each weight: a step of some of them only is an error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedstep._sharding.dtensor import spread_of_sums, total
from fusedstep._state.checks import name_of
from fusedstep._step.plan import same

#: A device, and how sums over the processes' elements are spread.
Place = tuple[torch.device, Any]

#: Weights that have a gradient here, and a row of numbers for each, in float64.
Part = tuple[list[Tensor], Tensor]


class Numbers(NamedTuple):
    """Numbers of weights that processes add up."""

    of: Callable[[Tensor], tuple[Any, int] | None]
    """Returns how the sums of a weight are spread, and how many there are.

    None where each process has all terms.
    """
    everywhere: bool = False
    """Whether groups have them whose steps exchange nothing."""


class _Members:
    """Weights whose numbers go over the same processes, in the order of one collective.

    Behind a count of each weight are the numbers of all.
    """

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.rows: dict[int, int] = {}
        """The places of the weights in the list, by id()."""
        self._sizes: list[int] = []

    def add(self, weight: Tensor, count: int) -> None:
        if id(weight) not in self.rows:
            self.rows[id(weight)] = len(self.rows)
            self.weights.append(weight)
            self._sizes.append(count)

    @functools.cached_property
    def _sizes_and_ends(self) -> tuple[Tensor, Tensor]:
        """The number of each weight's numbers, and where these end, when all weights are there."""
        sizes = torch.tensor(self._sizes, dtype=torch.int64, device=self.weights[0].device)
        return sizes, sizes.cumsum(0) + len(self.weights)

    @property
    def size(self) -> int:
        return len(self.weights) + sum(self._sizes)

    def places_of(self, weights: list[Tensor], count: int) -> Tensor:
        """The places of the counts of some of the weights, and of their ``count`` numbers."""
        rows = [self.rows[id(weight)] for weight in weights]
        sizes, ends = self._sizes_and_ends
        places = torch.tensor(rows, dtype=torch.int64, device=sizes.device)
        sizes, ends = sizes[places], ends[places]
        # From the places of these numbers among themselves to those among all.
        moves = torch.repeat_interleave(ends - sizes.cumsum(0), sizes, output_size=count)
        numbers = torch.arange(count, dtype=torch.int64, device=sizes.device)
        return torch.cat([places, moves + numbers])


class SpreadWeights:
    """The sharded weights of an optimizer, grouped by device and mesh.

    ``exchanging[i]``: whether steps of group ``i`` add up numbers over the processes.
    """

    __slots__ = ("_exchanging", "_groups", "_params", "_tables", "places")

    def __init__(self, groups: list[dict[str, Any]], exchanging: list[bool]) -> None:
        self._groups, self._exchanging = groups, exchanging
        self._params = [list(group["params"]) for group in groups]
        self._tables: dict[Numbers, dict[Place, _Members]] = {}
        self.places = self._table(of_each(0, everywhere=True))
        """The places of all weights of which other processes have parts."""

    def is_of(self, groups: list[dict[str, Any]], exchanging: list[bool]) -> bool:
        """Returns whether these are the same groups, with the same weights."""
        return (
            self._groups is groups
            and self._exchanging == exchanging
            and all(
                same(list(group["params"]), params)
                for group, params in zip(groups, self._params, strict=True)
            )
        )

    def is_among(self, weights: set[int]) -> bool:
        """Returns whether all weights are among these, by id()."""
        return all(id(weight) in weights for params in self._params for weight in params)

    def _table(self, numbers: Numbers) -> dict[Place, _Members]:
        """The collectives of numbers: the same in all processes."""
        if numbers not in self._tables:
            table = self._tables[numbers] = {}
            for params, exchanges in zip(self._params, self._exchanging, strict=True):
                for weight in params if exchanges or numbers.everywhere else ():
                    if found := numbers.of(weight):
                        spread, count = found
                        table.setdefault((weight.device, spread), _Members()).add(weight, count)
        return self._tables[numbers]

    def sums(self, numbers: Numbers, parts: list[Part]) -> list[Tensor]:
        """Sums over the processes, by one collective for all weights that are spread alike.

        All processes take part in each collective, though they may have no gradient there. Sums of
        the weights of one part go over the same processes, or none of these goes over any.
        """
        found = [part for _, part in parts]
        for (device, spread), members in self._table(numbers).items():
            own = [i for i, (some, _) in enumerate(parts) if some and id(some[0]) in members.rows]
            weights = [weight for index in own for weight in parts[index][0]]
            # A number for each weight with a gradient counts the processes that have it.
            counts = torch.ones(len(weights), dtype=torch.float64, device=device)
            together = torch.cat([counts, *(found[index].flatten() for index in own)])
            places = None
            if not same(weights, members.weights):
                places = members.places_of(weights, len(together) - len(weights))
                together = together.new_zeros(members.size).index_copy_(0, places, together)
            together = total(together, spread).to(device)
            self._check(spread, together[: len(members.weights)], members.weights)
            together = together if places is None else together[places]
            sizes = [len(weights), *(found[index].numel() for index in own)]
            for index, each in zip(own, together.split(sizes)[1:], strict=True):
                found[index] = each.view(found[index].shape)
        return found

    def sums_of_rows(
        self, numbers: Numbers, weights: list[Tensor], rows: list[list[float]]
    ) -> list[list[float]]:
        """The same of rows that the host has, of which it gets the sums."""
        alike: dict[Place, list[int]] = {}
        for index, weight in enumerate(weights):
            if place := place_of(weight):
                alike.setdefault(place, []).append(index)
        parts = []
        for (device, _), indices in alike.items():
            here = torch.tensor([rows[i] for i in indices], dtype=torch.float64, device="cpu")
            parts.append(([weights[i] for i in indices], here.to(device)))
        found = list(rows)
        for indices, sums in zip(alike.values(), self.sums(numbers, parts), strict=True):
            for index, row in zip(indices, sums.tolist(), strict=True):
                found[index] = row
        return found

    def totals(
        self,
        here: dict[Place, list[Tensor]],
        add: Callable[[Place, Tensor], object],
        *,
        everywhere: bool = False,
    ) -> list[Tensor]:
        """Sums over the processes of one number for each place, to which gradients belong.

        ``here``: the weights that have these. ``add`` adds this process's number to one that is 0.
        ``everywhere``: as of ``Numbers``.
        """
        found = []
        for place, members in self._table(of_each(0, everywhere=everywhere)).items():
            (device, spread), weights = place, here.get(place, [])
            own = torch.ones(1 + len(members.rows), dtype=torch.float64, device=device)
            if len(weights) != len(members.rows):
                own.zero_()
                own[[1 + members.rows[id(weight)] for weight in weights]] = 1
            add(place, own[0].zero_())
            both = total(own, spread).to(device)
            self._check(spread, both[1:], members.weights)
            found.append(both[0])
        return found

    def _check(self, spread: Any, counts: Tensor, weights: list[Tensor]) -> None:
        """Raises if some processes have a gradient of a weight, and others have not."""
        mesh, placements = spread
        sizes = [mesh.size(i) for i, each in enumerate(placements) if each.is_partial()]
        processes = math.prod(sizes)
        partly = counts % processes
        text = "has a gradient in some processes only: a norm over all of them takes all or none"
        if not counts.is_cpu:  # without waiting for the device
            torch._assert_async(partly.sum() == 0, f"a weight {text}")
            return
        for row in partly.nonzero().flatten().tolist()[:1]:
            raise RuntimeError(f"{self._name(weights[row])} {text} ({int(counts[row])})")

    def _name(self, weight: Tensor) -> str:
        return next(
            name_of(group, index, position)
            for index, (group, params) in enumerate(zip(self._groups, self._params, strict=True))
            for position, each in enumerate(params)
            if each is weight
        )


def place_of(weight: Tensor) -> Place | None:
    """The place of a weight; None if no other process has another part of it."""
    spread = spread_of_sums(weight)
    if spread is None:
        return None
    return (weight.device, spread) if any(each.is_partial() for each in spread[1]) else None


@functools.cache
def of_each(count: int, *, everywhere: bool = False) -> Numbers:
    """So many numbers of each weight of which other processes have parts."""

    def of(weight: Tensor) -> tuple[Any, int] | None:
        place = place_of(weight)
        return (place[1], count) if place else None

    return Numbers(of, everywhere)


#: The squares of the norms of a weight and of its update.
NORMS = of_each(2)


def norm2(shard: Tensor) -> Tensor:
    """The square of the 2-norm of what one process has."""
    return torch.linalg.vector_norm(in_real_numbers(shard), dtype=torch.float64).square()


def in_real_numbers(tensor: Tensor) -> Tensor:
    """A tensor with the real and the imaginary parts as numbers, if it has complex ones."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
