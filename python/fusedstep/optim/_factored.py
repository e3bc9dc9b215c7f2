"""A step of weights with factored second moments of which processes have parts.

The phases of it are sums of squares, moments and factors, norms, and the step itself. Sums over the
processes lie in between: along rows, along columns with those of the moments of rows, and of norms.
Each is one collective for all weights that are cut alike, and none where no weight is cut so.
Nothing has changed before the last phase.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedstep.optim._dtensor import local, spread_of_sums_along
from fusedstep.optim._spread import SpreadWeights, norm2, place_of


class Part:
    """A process's part of a weight, of its gradient and of its state, and the numbers of a step."""

    def __init__(
        self,
        weight: Tensor,
        wide: Callable[[], Tensor],
        put: Callable[[Tensor], None],
        grad: Tensor,
        moments: list[Tensor],
        average: Tensor | None,
        numbers: dict[str, Any],
    ) -> None:
        """``wide`` returns the value of the weight, in the type of the maths; ``put`` takes it.

        ``moments``: of rows and of columns; of less than two dimensions, those of the elements.
        ``average``: the first moment, if there is one. ``numbers``: by the names of the native
        operator.
        """
        self.weight, self.wide, self.put, self.numbers = weight, wide, put, numbers
        self.moments, self.average = [local(each) for each in moments], average
        self.dtype = self.moments[0].dtype
        self._grad = local(grad)
        self._sizes = weight.shape  # of all processes' parts together
        self._is_matrix = weight.dim() > 1

    def gradient(self) -> Tensor:
        """The gradient in the type of the maths."""
        grad = self._grad.to(self.dtype)
        return -grad if self.numbers["grad_factor"] < 0 else grad

    def sum_squares(self) -> None:
        squares = self.gradient().square()
        if self._is_matrix:
            self.row_sums = squares.sum(-1, dtype=torch.float64)
            self.column_sums = squares.sum(-2, dtype=torch.float64)
        else:
            self.column_sums = squares.double()

    def take_rows(self, sums: Tensor) -> Tensor:
        """Takes sums over whole rows; returns those of whole columns' parts, and of new moments."""
        if not self._is_matrix:
            return self.column_sums
        rows = self._next(self.moments[0], sums.view(self.row_sums.shape), self._sizes[-1])
        self.rows = rows
        of_moments = rows.sum(-1, dtype=torch.float64)
        return torch.cat([self.column_sums.flatten(), of_moments.flatten()])

    def take_columns(self, sums: Tensor) -> None:
        """Takes sums over whole columns and over the moments of all rows: factors follow."""
        shape, terms = self.column_sums.shape, self._sizes[-2] if self._is_matrix else 1
        columns, of_moments = sums.flatten().split([shape.numel(), sums.numel() - shape.numel()])
        self.columns = self._next(self.moments[-1], columns.view(shape), terms)
        self._column_factors = self.columns.sqrt().reciprocal()
        if self._is_matrix:
            mean = (of_moments / self._sizes[-2]).clamp(min=self.numbers["least_mean"])
            mean = mean.to(self.dtype).view(*self.rows.shape[:-1], 1)
            self._row_factors = (self.rows / mean).sqrt().reciprocal()

    def _next(self, moments: Tensor, sums: Tensor, terms: int) -> Tensor:
        rate, added = self.numbers["rate"], self.numbers["added"]
        mean = sums / terms + added
        return ((1 - rate) * moments.view(sums.shape).double() + rate * mean).to(self.dtype)

    def update(self) -> Tensor:
        factors = self._column_factors
        if self._is_matrix:
            factors = self._row_factors.unsqueeze(-1) * factors.unsqueeze(-2)
        return self.gradient() * factors.clamp(max=self.numbers["most"])

    def norms2(self) -> list[Tensor]:
        return [norm2(local(self.wide())), norm2(self.update())]

    def take_norms2(self, norms2: Tensor) -> None:
        """Takes the step, by the squares of the norms of weight and update."""
        numbers = self.numbers
        length = torch.full_like(norms2[0], numbers["step"])
        weight_rms, update_rms = (norms2 / max(self._sizes.numel(), 1)).sqrt()
        if numbers["scaled"]:
            length = length * weight_rms.clamp(min=numbers["least_scale"])
        keep = 1 - numbers["decay"] * (length if numbers["decays_by_length"] else 1)
        length = length / (update_rms / numbers["threshold"]).clamp(min=1)
        move = self.update().mul_(length.to(self.dtype))
        if self.average is not None:
            average, beta = local(self.average), numbers["beta"]
            move = average.mul_(beta).add_(move.mul_(1 - beta))
        wide = self.wide()
        local(wide).mul_(keep.to(self.dtype) if isinstance(keep, Tensor) else keep).sub_(move)
        if self._is_matrix:
            self.moments[0].copy_(self.rows.view_as(self.moments[0]))
        self.moments[-1].copy_(self.columns.view_as(self.moments[-1]))
        self.put(wide)


def step_parts(parts: list[Part], spread: SpreadWeights) -> None:
    """Steps parts of weights; each process calls it, with parts or without."""
    by_id = {id(part.weight): part for part in parts}
    for part in parts:
        part.sum_squares()
    matrices = {key: part for key, part in by_id.items() if part.weight.dim() > 1}
    sums = spread.lists(_rows, {key: part.row_sums.flatten() for key, part in matrices.items()})
    sums = {key: part.take_rows(sums.get(key)) for key, part in by_id.items()}
    sums = spread.lists(_columns, sums)
    for key, part in by_id.items():
        part.take_columns(sums[key])
    alike: dict[Any, list[Part]] = {}
    for part in parts:
        alike.setdefault(place_of(part.weight), []).append(part)
    for place in dict.fromkeys((*spread.places(native=False), *alike)):
        members = alike.get(place, [])
        norms2 = torch.empty(0, 2, dtype=torch.float64, device=place[0])
        if members:
            norms2 = torch.stack([n for part in members for n in part.norms2()]).view(-1, 2)
        (norms2,) = spread.sums(place, [([part.weight for part in members], norms2)])
        for part, pair in zip(members, norms2.unbind(), strict=True):
            part.take_norms2(pair)


def _rows(weight: Tensor) -> tuple[Any, int] | None:
    """How sums along the rows of a weight are spread, and how many a process has."""
    if weight.dim() < 2 or not (spread := spread_of_sums_along(weight, -1)):
        return None
    return spread, local(weight).shape[:-1].numel()


def _columns(weight: Tensor) -> tuple[Any, int] | None:
    """The same of columns, and of the moments of rows."""
    if weight.dim() < 2 or not (spread := spread_of_sums_along(weight, -2)):
        return None
    sizes = local(weight).shape
    return spread, sizes[:-2].numel() * (sizes[-1] + 1)
