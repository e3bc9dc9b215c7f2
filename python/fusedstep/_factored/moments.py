"""Second moments of the rows and columns of a matrix, in place of one for each of its elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def sizes_of(shape: torch.Size, *, keepdim: bool = False) -> tuple[torch.Size, torch.Size]:
    """The shapes of the moments of rows and of columns; ``keepdim``: with a dimension of one."""
    one = (1,) if keepdim else ()
    return torch.Size((*shape[:-1], *one)), torch.Size((*shape[:-2], *one, *shape[-1:]))


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
