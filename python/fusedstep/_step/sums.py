"""Weights that are spread over processes, and sums over all of their elements.

The collectives of a step, and their shapes, follow from the weights of an optimizer alone. Were
they to follow from those that have a gradient in this process, one that another process lacks would
leave a process waiting, or add up numbers of different weights. Each collective also counts the
processes that have a gradient of each weight: a step of some of them only is an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fusedstep._sharding.dtensor import local, spread_of_sums, total
from fusedstep._state.checks import name_of
from fusedstep._step.plan import same

#: A device, and how sums over the processes' elements are spread.
Place = tuple[torch.device, Any]


class SpreadWeights:
    """The sharded weights of an optimizer, grouped by device and mesh.

    ``asked[i]``: whether the options of group ``i`` require or allow native kernels. ``native[i]``:
    whether native kernels step group ``i``.
    """

    __slots__ = ("_asked", "_groups", "_lists", "_members", "_of", "_params", "_places", "rows")

    def __init__(self, groups: list[dict[str, Any]], asked: list[bool], native: list[bool]) -> None:
        self._groups, self._asked = groups, asked
        self._params = [list(group["params"]) for group in groups]
        self.rows: dict[Place, dict[int, int]] = {}
        """Places, and the numbers of their weights there, by id()."""
        self._of: dict[int, Place] = {}
        self._places: dict[bool, dict[Place, None]] = {True: {}, False: {}}
        self._lists: dict[Any, dict[Place, dict[int, int]]] = {}
        self._members: dict[Place, list[Tensor]] = {}  # in the order of their rows
        for params, is_native in zip(self._params, native, strict=True):
            for weight in params:
                if place := place_of(weight):
                    self._of[id(weight)] = place
                    rows = self.rows.setdefault(place, {})
                    if id(weight) not in rows:
                        rows[id(weight)] = len(rows)
                        self._members.setdefault(place, []).append(weight)
                    self._places[is_native][place] = None

    def is_of(self, groups: list[dict[str, Any]], asked: list[bool]) -> bool:
        """Returns whether these are the same groups, with the same weights."""
        return (
            self._groups is groups
            and self._asked == asked
            and all(
                same(list(group["params"]), params)
                for group, params in zip(groups, self._params, strict=True)
            )
        )

    def is_among(self, weights: set[int]) -> bool:
        """Returns whether all weights are among these, by id()."""
        return all(id(weight) in weights for params in self._params for weight in params)

    def place(self, weight: Tensor) -> Place | None:
        """As place_of() says of one of these weights, without asking anew."""
        return self._of.get(id(weight))

    def places(self, native: bool) -> Iterable[Place]:
        """The places of weights that native kernels step, or of the others."""
        return self._places[native]

    def sums(self, place: Place, parts: list[tuple[list[Tensor], Tensor]]) -> list[Tensor]:
        """Sums over the processes of numbers of weights.

        ``parts``: weights that have a gradient here, and a row of numbers for each.
        """
        rows, (device, spread) = self.rows[place], place
        weights = list(itertools.chain.from_iterable(weights for weights, _ in parts))
        numbers = [part for _, part in parts]
        together = numbers[0] if len(numbers) == 1 else torch.cat(numbers)
        own = torch.nn.functional.pad(together, (0, 1), value=1.0)
        has_all = same(weights, self._members[place])
        if not has_all:
            order = [rows[id(weight)] for weight in weights]
            given, own = own, own.new_zeros(len(rows), own.shape[1])
            own[order] = given
        found = total(own, spread).to(device)
        self._check(spread, found[:, -1], list(rows))
        found = found[:, :-1] if has_all else found[order, :-1]
        return [part.contiguous() for part in found.split([len(weights) for weights, _ in parts])]

    def sum(self, place: Place, add: Callable[[Tensor], object], weights: list[Tensor]) -> Tensor:
        """The sum over the processes of one number, to which the gradients of weights belong.

        ``add`` adds this process's to one that is 0.
        """
        rows, (device, spread) = self.rows[place], place
        own = torch.ones(1 + len(rows), dtype=torch.float64, device=device)
        if len(weights) != len(rows):
            own.zero_()
            own[[1 + rows[id(weight)] for weight in weights]] = 1
        add(own[0].zero_())
        found = total(own, spread).to(device)
        self._check(spread, found[1:], list(rows))
        return found[0]

    def lists(
        self, size_of: Callable[[Tensor], tuple[Any, int] | None], parts: dict[int, Tensor]
    ) -> dict[int, Tensor]:
        """Sums over the processes of lists of numbers, by one collective for all that go alike.

        ``size_of`` returns how the sums of a weight are spread, and how many there are; None where
        each process has all terms. ``parts``: the numbers of weights that have a gradient here, by
        id(), in float64. Those that are no sums are returned as they are.
        """
        if size_of not in self._lists:
            lists = self._lists[size_of] = {}
            for weight in dict.fromkeys(itertools.chain.from_iterable(self._params)):
                if size := size_of(weight):
                    lists.setdefault((weight.device, size[0]), {})[id(weight)] = size[1]
        sums = dict(parts)
        for (device, spread), sizes in self._lists[size_of].items():
            counts = [float(key in parts) for key in sizes]
            numbers = [torch.tensor(counts, dtype=torch.float64, device=device)]
            for key, count in sizes.items():
                numbers.append(parts[key] if key in parts else numbers[0].new_zeros(count))
            found = total(torch.cat(numbers), spread).to(device)
            counted, *summed = found.split([len(sizes), *sizes.values()])
            self._check(spread, counted, list(sizes))
            sums |= {key: each for key, each in zip(sizes, summed, strict=True) if key in parts}
        return sums

    def check_gradients(self, weights: list[Tensor]) -> None:
        """Raises if other processes have gradients of other weights than these.

        By one collective for all in one place. Not of weights that native kernels step.
        """
        alike: dict[Place, list[Tensor]] = {place: [] for place in self.places(native=False)}
        for weight in weights:
            if place := place_of(weight):
                alike.setdefault(place, []).append(weight)
        for place, some in alike.items():
            nothing = torch.empty(len(some), 0, dtype=torch.float64, device=place[0])
            self.sums(place, [(some, nothing)])

    def norms(
        self, weights: list[Tensor], pairs: list[tuple[Tensor, Tensor]]
    ) -> list[tuple[float, float]]:
        """The 2-norms of two tensors of each weight, by one collective for all in one place.

        Not of weights that native kernels step.
        """
        found = [(0.0, 0.0)] * len(weights)
        alike: dict[Place | None, list[int]] = {}
        for index, weight in enumerate(weights):
            alike.setdefault(place_of(weight), []).append(index)
        for place in dict.fromkeys((*self.places(native=False), *alike)):
            indices = alike.get(place, [])
            parts = [norm2(local(tensor)) for index in indices for tensor in pairs[index]]
            device = place[0] if place else None
            norms2 = torch.empty(0, 2, dtype=torch.float64, device=device)
            if parts:
                norms2 = torch.stack(parts).view(-1, 2)
            if place:
                (norms2,) = self.sums(place, [([weights[index] for index in indices], norms2)])
            for index, (first, second) in zip(indices, norms2.sqrt().tolist(), strict=True):
                found[index] = first, second
        return found

    def _check(self, spread: Any, counts: Tensor, keys: list[int]) -> None:
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
            raise RuntimeError(f"{self._name(keys[row])} {text} ({int(counts[row])})")

    def _name(self, key: int) -> str:
        return next(
            name_of(group, index, position)
            for index, (group, params) in enumerate(zip(self._groups, self._params, strict=True))
            for position, weight in enumerate(params)
            if id(weight) == key
        )


def place_of(weight: Tensor) -> Place | None:
    """The place of a weight; None if no other process has another part of it."""
    spread = spread_of_sums(weight)
    if spread is None:
        return None
    return (weight.device, spread) if any(each.is_partial() for each in spread[1]) else None


def norm2(shard: Tensor) -> Tensor:
    """The square of the 2-norm of what one process has."""
    return torch.linalg.vector_norm(in_real_numbers(shard), dtype=torch.float64).square()


def in_real_numbers(tensor: Tensor) -> Tensor:
    """A tensor with the real and the imaginary parts as numbers, if it has complex ones."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
