"""Second moments of the rows and columns of a matrix, in place of one for each of its elements."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedstep._sharding.dtensor import placements_without, spread_of
from fusedstep._state.kinds import State, States, same_shape


def factored_states(
    rows: str,
    columns: str,
    elements: str | None = None,
    *,
    needs: Callable[[dict[str, Any]], bool] | None = None,
    keepdim: bool = False,
    is_spread: bool = False,
) -> States:
    """Returns the records of the moments of the rows and of the columns of matrices.

    ``elements``: the moments of weights of less than two dimensions, if there are any. ``keepdim``:
    whether moments keep the dimension that the mean is taken along. ``is_spread``: whether the
    moments of a DTensor are DTensors.
    """
    records = {}
    for name, dim in ((rows, -1), (columns, -2)):
        records[name] = State(
            of=_is_matrix,
            needs=needs,
            shape=functools.partial(_shape_without, dim, keepdim),
            placements=functools.partial(_placements_without, dim, keepdim) if is_spread else None,
            takes_codes=False,
        )
    if elements is not None:
        records[elements] = State(
            of=_is_vector,
            needs=needs,
            shape=same_shape,
            placements=placements_of_weight if is_spread else None,
            takes_codes=False,
        )
    return records


def _is_matrix(group: dict[str, Any], shape: torch.Size) -> bool:
    return len(shape) > 1


def _is_vector(group: dict[str, Any], shape: torch.Size) -> bool:
    return len(shape) < 2


def _shape_without(dim: int, keepdim: bool, group: Any, shape: torch.Size) -> torch.Size:
    return torch.Size((*shape[:dim], *((1,) if keepdim else ()), *shape[len(shape) + dim + 1 :]))


def _placements_without(dim: int, keepdim: bool, group: Any, weight: Tensor) -> tuple[Any, ...]:
    return placements_without(weight, dim, keepdim)


def placements_of_weight(group: Any, weight: Tensor) -> tuple[Any, ...]:
    return spread_of(weight)[1]


def moved_factor(
    state: dict[str, Tensor],
    names: Sequence[str],
    squares: Tensor,
    rate: float,
    *,
    keepdim: bool = False,
    least: float = 0.0,
) -> Tensor:
    """Takes moments forward; returns one over the root of what they stand for.

    ``names``: of those of rows and of columns in a state, or of those of the elements of less than
    two dimensions. ``least``: a lower bound of the mean of rows.
    """
    if squares.dim() < 2:
        state[names[0]] = _moved(state[names[0]], squares, rate)
        return state[names[0]].rsqrt()
    if squares.numel() == 0:  # no element has a mean
        return squares
    row, column = (
        _moved(state[name], squares.mean(dim, keepdim=keepdim), rate)
        for name, dim in zip(names, (-1, -2), strict=False)
    )
    state[names[0]], state[names[1]] = row, column
    if not keepdim:
        row, column = row.unsqueeze(-1), column.unsqueeze(-2)
    row = row / row.mean(-2, keepdim=True).clamp(min=least)
    return row.rsqrt() * column.rsqrt()


def _moved(moment: Tensor, value: Tensor, rate: float) -> Tensor:
    # A difference rounds by the larger number, which hides a small value that counts for most.
    if rate >= 0.5:
        return (1 - rate) * moment + rate * value
    return moment + rate * (value - moment)


def rms(tensor: Tensor) -> Tensor:
    """The root of the mean of the squares of all elements."""
    return torch.linalg.vector_norm(tensor) / math.sqrt(max(tensor.numel(), 1))
