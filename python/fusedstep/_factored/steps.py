"""A step of weights with factored second moments: by the native operation, and by phases.

Where processes have parts of weights, the phases are sums of squares, moments and factors, norms,
and the step itself. Sums over the processes lie in between: along rows, along columns with those of
the moments of rows, and of norms. Each is one collective for all weights that are cut alike, and
none where no weight is cut so. Nothing has changed before the last phase.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedstep._sharding.dtensor import local, spread_of_sums_along
from fusedstep._step.program import Pass, Sums, run
from fusedstep._step.sums import NORMS, Numbers, SpreadWeights, norm2

#: The parts of a step by the native operation's numbers for them: FactoredPart in C++.
_SUMS, _ROWS, _NORMS, _APPLY = 1, 2, 3, 4


class Call:
    """Weights of a group that one native operation steps, and all that it takes but gradients."""

    def __init__(
        self,
        places: list[int],
        eps: float,
        weights: list[Tensor],
        rows: list[Tensor],
        columns: list[Tensor],
        moments: list[Tensor],
        counts: list[Tensor],
    ) -> None:
        """``places``: of the weights among those of a step. ``counts``: of steps, of each."""
        self.places, self.eps, self.weights, self.counts = places, eps, weights, counts
        self.rows, self.columns, self.moments = rows, columns, moments

    def read_counts(self) -> bool:
        """Notes the number of the next step; returns False if it is not that of all weights."""
        counts = {count.item() for count in self.counts}
        self.step = 1 + max(counts)
        return len(counts) == 1

    @functools.cached_property
    def states(self) -> list[Tensor]:
        """The moments of rows, and behind them those of columns, flat."""
        return [state.view(-1) for state in (*self.rows, *self.columns)]

    @functools.cached_property
    def counts_of_sums(self) -> tuple[list[int], list[int]]:
        """The numbers of a weight's sums: along rows; along columns, and of the moments of rows."""
        parts = map(local, self.weights)
        matrices = [part.shape[:-2].numel() if part.dim() > 1 else 0 for part in parts]
        behind = [
            state.numel() + count for state, count in zip(self.columns, matrices, strict=True)
        ]
        return [state.numel() for state in self.rows], behind

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The rows, columns and elements of each weight, of all processes' parts together."""
        found = (_rows_columns_elements(weight.shape) for weight in self.weights)
        return list(itertools.chain.from_iterable(found))

    def take(self, values: list[Tensor], grads: list[Tensor], numbers: dict[str, Any]) -> None:
        """Steps the weights' values, which may be the weights."""
        states = self.rows, self.columns, self.moments
        torch.ops.fusedstep.factored_step(values, grads, *states, _options_of(numbers))


def _options_of(numbers: dict[str, Any]) -> list[float]:
    return [float(numbers[name]) for name in _names_of_numbers()]


@functools.cache
def _names_of_numbers() -> list[str]:
    return torch.ops.fusedstep.factored_options()


def _rows_columns_elements(shape: torch.Size) -> tuple[int, int, int]:
    rows, columns = shape[-2:] if len(shape) > 1 else (1, shape.numel())
    return rows, columns, shape.numel()


def native_parts(
    call: Call,
    values: list[Tensor],
    grads: list[Tensor],
    numbers: dict[str, Any],
    put: Callable[[Callable[[], None]], None],
) -> Pass:
    """Steps a process's parts of weights of one place by native kernels, phase by phase.

    What kernels make of the moments is put into the states at the end.

    ``put`` calls a function that moves the weights' ``values``, and puts these where they are.
    ``numbers``: of the step, by the names of the native operator. The moments are of one dtype.
    """
    options, weights, rows = _options_of(numbers), call.weights, call.rows
    made = torch.cat(call.states).split([state.numel() for state in call.states])
    moments = made[: len(rows)], made[len(rows) :]
    row_sums, column_sums = (
        list(values[0].new_empty(sum(sizes), dtype=torch.float64).split(sizes))
        for sizes in call.counts_of_sums
    )
    norms2 = values[0].new_empty(len(weights), 2, dtype=torch.float64)

    def take(part: int) -> None:
        sums = row_sums, column_sums, norms2
        operands = values, grads, *moments, call.moments, *sums
        torch.ops.fusedstep.factored_part(*operands, call.sizes, options, part)

    def apply() -> None:
        take(_APPLY)
        torch._foreach_copy_(call.states, list(itertools.chain(*moments)))

    take(_SUMS)
    row_sums = yield Sums([([p], sums) for p, sums in zip(weights, row_sums, strict=True)])
    take(_ROWS)
    column_sums = yield Sums([([p], sums) for p, sums in zip(weights, column_sums, strict=True)])
    take(_NORMS)
    (norms2,) = yield Sums([(weights, norms2)])
    put(apply)


def part_by_torch(
    weight: Tensor,
    widened: Callable[[], Tensor],
    put: Callable[[Tensor], None],
    grad: Tensor,
    moments: list[Tensor],
    average: Tensor | None,
    numbers: dict[str, Any],
) -> Pass:
    """Steps a process's part of one weight in operations of torch, phase by phase.

    ``widened`` returns the value of the weight, in the type of the maths; ``put`` takes it.
    ``moments``: of rows and of columns; of less than two dimensions, those of the elements.
    ``average``: the first moment, if there is one. ``numbers``: by the names of the native
    operator.
    """
    moments, sizes = [local(each) for each in moments], weight.shape  # of all parts together
    dtype, is_matrix = moments[0].dtype, weight.dim() > 1
    grad = local(grad)

    def gradient() -> Tensor:
        wide = grad.to(dtype)
        return -wide if numbers["grad_factor"] < 0 else wide

    def moved(moment: Tensor, sums: Tensor, terms: int) -> Tensor:
        rate, mean = numbers["rate"], sums / terms + numbers["added"]
        return ((1 - rate) * moment.view(sums.shape).double() + rate * mean).to(dtype)

    squares, terms = gradient().square(), 1
    if is_matrix:
        columns, terms = squares.sum(-2, dtype=torch.float64), sizes[-2]
        (sums,) = yield Sums([([weight], squares.sum(-1, dtype=torch.float64))])
        rows = moved(moments[0], sums, sizes[-1])
        of_moments = rows.sum(-1, dtype=torch.float64)
        behind = torch.cat([columns.flatten(), of_moments.flatten()])
    else:
        yield Sums([])
        behind = columns = squares.double()
    del squares
    (behind,) = yield Sums([([weight], behind)])
    sums = behind.flatten()[: columns.numel()].view(columns.shape)
    columns = moved(moments[-1], sums, terms)
    factors = columns.sqrt().reciprocal()
    if is_matrix:
        mean = (behind[columns.numel() :] / terms).clamp(min=numbers["least_mean"])
        mean = mean.to(dtype).view(*rows.shape[:-1], 1)
        row_factors = (rows / mean).sqrt().reciprocal()

    def update() -> Tensor:
        every = row_factors.unsqueeze(-1) * factors.unsqueeze(-2) if is_matrix else factors
        return gradient() * every.clamp(max=numbers["most"])

    norms2 = torch.stack([norm2(local(widened())), norm2(update())]).view(1, 2)
    ((norms2,),) = yield Sums([([weight], norms2)])
    length = torch.full_like(norms2[0], numbers["step"])
    weight_rms, update_rms = (norms2 / max(sizes.numel(), 1)).sqrt()
    if numbers["scaled"]:
        length = length * weight_rms.clamp(min=numbers["least_scale"])
    keep = 1 - numbers["decay"] * (length if numbers["decays_by_length"] else 1)
    length = length / (update_rms / numbers["threshold"]).clamp(min=1)
    move = update().mul_(length.to(dtype))
    if average is not None:
        first, beta = local(average), numbers["beta"]
        move = first.mul_(beta).add_(move.mul_(1 - beta))
    wide = widened()
    local(wide).mul_(keep.to(dtype) if isinstance(keep, Tensor) else keep).sub_(move)
    if is_matrix:
        moments[0].copy_(rows.view_as(moments[0]))
    moments[-1].copy_(columns.view_as(moments[-1]))
    put(wide)


def step_parts(parts: list[Pass], spread: SpreadWeights) -> None:
    """Steps parts of weights; each process calls it, with parts or without."""
    run(parts, [functools.partial(spread.sums, each) for each in (_OF_ROWS, _OF_COLUMNS, NORMS)])


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


_OF_ROWS, _OF_COLUMNS = Numbers(_rows), Numbers(_columns)
