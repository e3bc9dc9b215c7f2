"""A step of weights with factored second moments: by the native operation, and by phases.

Where processes have parts of weights, the phases are sums of squares, moments and factors, norms,
and the step itself. Sums over the processes lie in between: along rows, along columns with those of
the moments of rows, and of norms. Each is one collective for all weights that are cut alike, and
none where no weight is cut so. Nothing has changed before the last phase.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedstep._sharding.dtensor import local, spread_of_sums_along
from fusedstep._step.sums import SpreadWeights, norm2

#: The parts of a step by the native operation's numbers for them: FactoredPart in C++.
_SUMS, _ROWS, _NORMS, _APPLY = 1, 2, 3, 4


class Call:
    """Weights of a group that one native operation steps, and all that it takes but gradients."""

    def __init__(
        self,
        places: list[int],
        eps: float,
        weights: list[Tensor],
        values: list[Tensor],
        rows: list[Tensor],
        columns: list[Tensor],
        moments: list[Tensor],
        counts: list[Tensor],
    ) -> None:
        self.places, self.eps, self.counts = places, eps, counts
        self.weights, self.values = weights, values
        self.operands = [list(map(local, each)) for each in (values, rows, columns, moments)]
        self.forms = self.forms_now()

    @functools.cached_property
    def states(self) -> list[Tensor]:
        """The moments of rows, and behind them those of columns, flat."""
        _, rows, columns, _ = self.operands
        return [state.view(-1) for state in (*rows, *columns)]

    @functools.cached_property
    def counts_of_sums(self) -> tuple[list[int], list[int]]:
        """The numbers of a weight's sums: along rows; along columns, and of the moments of rows."""
        values, rows, columns, _ = self.operands
        matrices = [v.shape[:-2].numel() if v.dim() > 1 else 0 for v in values]
        behind = [state.numel() + count for state, count in zip(columns, matrices, strict=True)]
        return [state.numel() for state in rows], behind

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The rows, columns and elements of each weight, of all processes' parts together."""
        found = (_rows_columns_elements(weight.shape) for weight in self.weights)
        return list(itertools.chain.from_iterable(found))

    def __call__(self, grads: list[Tensor], numbers: dict[str, Any]) -> None:
        values, *states = self.operands
        torch.ops.fusedstep.factored_step(values, grads, *states, _options_of(numbers))

    def forms_now(self) -> list[Any]:
        """Form of each tensor, which the operation checks."""
        tensors = itertools.chain(*self.operands)
        return [(t.dtype, t.shape, t.stride(), t.device) for t in tensors]


def _options_of(numbers: dict[str, Any]) -> list[float]:
    return [float(numbers[name]) for name in _names_of_numbers()]


@functools.cache
def _names_of_numbers() -> list[str]:
    return torch.ops.fusedstep.factored_options()


def _rows_columns_elements(shape: torch.Size) -> tuple[int, int, int]:
    rows, columns = shape[-2:] if len(shape) > 1 else (1, shape.numel())
    return rows, columns, shape.numel()


class NativeParts:
    """A process's parts of weights of one place, which native kernels step phase by phase.

    What kernels make of the moments is put into the states at the end.
    """

    def __init__(
        self,
        call: Call,
        grads: list[Tensor],
        numbers: dict[str, Any],
        put: Callable[[Callable[[], None]], None],
    ) -> None:
        """``put`` calls a function that moves the weights' values, and puts these where they are.

        ``numbers``: of the step, by the names of the native operator. The moments are of one dtype.
        """
        self.call, self.weights, self._grads, self._put = call, call.weights, grads, put
        self._values, rows, _, self._averages = call.operands
        self._options = _options_of(numbers)
        made = torch.cat(call.states).split([state.numel() for state in call.states])
        self._moments = made[: len(rows)], made[len(rows) :]
        self._row_sums, self._column_sums = map(self._room, call.counts_of_sums)
        self._norms2 = self._values[0].new_empty(len(self.weights), 2, dtype=torch.float64)

    def _room(self, sizes: list[int]) -> list[Tensor]:
        room = self._values[0].new_empty(sum(sizes), dtype=torch.float64)
        return list(room.split(sizes))

    def _take(self, part: int) -> None:
        torch.ops.fusedstep.factored_part(
            self._values,
            self._grads,
            *self._moments,
            self._averages,
            self._row_sums,
            self._column_sums,
            self._norms2,
            self.call.sizes,
            self._options,
            part,
        )

    def _by_id(self, sums: list[Tensor]) -> dict[int, Tensor]:
        return {id(weight): each for weight, each in zip(self.weights, sums, strict=True)}

    def sum_squares(self) -> dict[int, Tensor]:
        self._take(_SUMS)
        return self._by_id(self._row_sums)

    def take_rows(self, sums: dict[int, Tensor]) -> dict[int, Tensor]:
        self._row_sums = [sums[id(weight)] for weight in self.weights]
        self._take(_ROWS)
        return self._by_id(self._column_sums)

    def take_columns(self, sums: dict[int, Tensor]) -> None:
        self._column_sums = [sums[id(weight)] for weight in self.weights]

    def norms2(self) -> Tensor:
        self._take(_NORMS)
        return self._norms2

    def take_norms2(self, norms2: Tensor) -> None:
        self._norms2 = norms2
        self._put(self._apply)

    def _apply(self) -> None:
        self._take(_APPLY)
        torch._foreach_copy_(self.call.states, list(itertools.chain(*self._moments)))


class Part:
    """The same of one weight, in operations of torch."""

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
        self.weights, self._id = [weight], id(weight)
        self.wide, self.put, self.numbers = wide, put, numbers
        self.moments, self.average = [local(each) for each in moments], average
        self.dtype = self.moments[0].dtype
        self._grad = local(grad)
        self._sizes = weight.shape  # of all processes' parts together
        self._is_matrix = weight.dim() > 1

    def gradient(self) -> Tensor:
        """The gradient in the type of the maths."""
        grad = self._grad.to(self.dtype)
        return -grad if self.numbers["grad_factor"] < 0 else grad

    def sum_squares(self) -> dict[int, Tensor]:
        """Returns the sums of squares along rows, by the id() of the weight."""
        squares = self.gradient().square()
        if self._is_matrix:
            self.row_sums = squares.sum(-1, dtype=torch.float64)
            self.column_sums = squares.sum(-2, dtype=torch.float64)
            return {self._id: self.row_sums.flatten()}
        self.column_sums = squares.double()
        return {}

    def take_rows(self, sums: dict[int, Tensor]) -> dict[int, Tensor]:
        """Takes sums over whole rows; returns those of whole columns' parts, and of new moments."""
        if not self._is_matrix:
            return {self._id: self.column_sums}
        of_rows = sums[self._id].view(self.row_sums.shape)
        self.rows = self._next(self.moments[0], of_rows, self._sizes[-1])
        of_moments = self.rows.sum(-1, dtype=torch.float64)
        return {self._id: torch.cat([self.column_sums.flatten(), of_moments.flatten()])}

    def take_columns(self, found: dict[int, Tensor]) -> None:
        """Takes sums over whole columns and over the moments of all rows: factors follow."""
        sums = found[self._id]
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

    def norms2(self) -> Tensor:
        """The squares of the norms of weight and update, one row of them."""
        return torch.stack([norm2(local(self.wide())), norm2(self.update())]).view(1, 2)

    def take_norms2(self, norms2: Tensor) -> None:
        """Takes the step, by the same of whole weights."""
        (norms2,), numbers = norms2, self.numbers
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


def step_parts(parts: Sequence[Part | NativeParts], spread: SpreadWeights) -> None:
    """Steps parts of weights; each process calls it, with parts or without."""
    sums: dict[int, Tensor] = {}
    for part in parts:
        sums |= part.sum_squares()
    sums, of_rows = {}, spread.lists(_rows, sums)
    for part in parts:
        sums |= part.take_rows(of_rows)
    sums = spread.lists(_columns, sums)
    for part in parts:
        part.take_columns(sums)
    alike: dict[Any, list[Part | NativeParts]] = {}
    for part in parts:
        alike.setdefault(spread.place(part.weights[0]), []).append(part)
    for place in dict.fromkeys((*spread.places(native=False), *alike)):
        members = alike.get(place, [])
        numbers = [(part.weights, part.norms2()) for part in members]
        nothing = torch.empty(0, 2, dtype=torch.float64, device=place[0])
        found = spread.sums(place, numbers or [([], nothing)])
        for part, norms2 in zip(members, found, strict=bool(members)):
            part.take_norms2(norms2)


def _rows(weight: Tensor) -> tuple[Any, int] | None:
    """Tells how sums along the rows of a weight are spread, and how many a process has."""
    if weight.dim() < 2 or not (spread := spread_of_sums_along(weight, -1)):
        return None
    return spread, local(weight).shape[:-1].numel()


def _columns(weight: Tensor) -> tuple[Any, int] | None:
    """The same of columns, and of the moments of rows."""
    if weight.dim() < 2 or not (spread := spread_of_sums_along(weight, -2)):
        return None
    sizes = local(weight).shape
    return spread, sizes[:-2].numel() * (sizes[-1] + 1)
