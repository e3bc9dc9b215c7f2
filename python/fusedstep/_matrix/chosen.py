"""The rows or columns of matrices that an update of a fraction of the rank has: Dion2's choice.

Of the shorter side those with the largest L1 norms are chosen; of equal ones the first. Norms are
summed in float64 and rounded to float32: then neither the device nor the number of processes, which
sum in other orders, changes the choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


def has_choice(group: dict[str, Any]) -> bool:
    return group.get("rank_fraction") is not None


def takes_rows(group: dict[str, Any], rows: int, columns: int) -> bool:
    """Returns whether rows are chosen, or columns. NorMuon's averages are of rows."""
    return rows <= columns or bool(group.get("normuon"))


def side_of(group: dict[str, Any], rows: int, columns: int) -> int:
    """The number of the rows or columns of which some are chosen."""
    return rows if takes_rows(group, rows, columns) else columns


def count_of(group: dict[str, Any], side: int) -> int:
    """The number of the rows or columns that are chosen of so many."""
    return min(max(1, math.ceil(float(group["rank_fraction"]) * side)), side)


def norms_of(x: Tensor, of_rows: bool) -> Tensor:
    """The L1 norms of the rows or columns of matrices [count, rows, columns]."""
    dim = -1 if of_rows else -2
    parts = x.split(1) if x.is_cpu else [x]  # a CPU makes a copy in float64 of what it sums
    found = [torch.linalg.vector_norm(each, 1, dim, dtype=torch.float64) for each in parts]
    return torch.cat(found) if x.is_cpu else found[0]


def largest(group: dict[str, Any], norms: Tensor) -> Tensor:
    """The places of the largest norms, [..., k] of [..., n], in their order."""
    count = count_of(group, norms.shape[-1])
    order = norms.float().sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


class Chosen(NamedTuple):
    """The rows or columns that are chosen of matrices [count, rows, columns]."""

    places: Tensor
    """[count, k]."""
    dim: int
    """1 for rows, 2 for columns."""

    @classmethod
    def of(cls, places: Tensor, of_rows: bool) -> Chosen:
        return cls(places, 1 if of_rows else 2)

    @classmethod
    def among(cls, group: dict[str, Any], x: Tensor) -> Chosen:
        """Those of matrices that this process has as a whole."""
        of_rows = takes_rows(group, *x.shape[1:])
        return cls.of(largest(group, norms_of(x, of_rows)), of_rows)

    def shape(self, of: Sequence[int]) -> tuple[int, int, int]:
        """The shape that the chosen rows or columns of matrices have."""
        count, rows, columns = of
        chosen = self.places.shape[1]
        return (count, chosen, columns) if self.dim == 1 else (count, rows, chosen)

    def take(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.gather(x, self.dim, self._index(x), out=out)

    def put(self, x: Tensor, values: Tensor) -> Tensor:
        """Writes values to the rows or columns of ``x``."""
        return x.scatter_(self.dim, self._index(x), values)

    def _index(self, x: Tensor) -> Tensor:
        return self.places.unsqueeze(3 - self.dim).expand(self.shape(x.shape))
