"""A step of a matrix with factored moments, block by block: its scratch is two blocks.

Passes over the blocks take sums of squares, the norm of the update, sums of its residuals, and the
step itself, which computes the update anew where it was not kept. Nothing has changed before the
last pass, which allocates nothing.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedstep._step.undo import numbers_first

#: A part of a matrix, or of a stack of matrices: by all of their dimensions but the last.
Block = tuple[slice, ...]

#: Elements of a block: 4 MiB of float32 on a CPU. Other devices need work for all of their cores in
#: each launch.
_ELEMENTS = {"cpu": 1 << 20}
_ELEMENTS_ELSEWHERE = 1 << 24


class Numbers(NamedTuple):
    """The numbers of a step, as CAME's paper has them."""

    lr: float
    betas: list[float]
    """Decays of the update's average, of the squares and of the residuals."""
    eps: tuple[float, float]
    """Added to the squares, and to the squares of the residuals."""
    threshold: float
    decay: float
    """The part of a weight that a step takes away."""


class FactoredMoments:
    """Moments of rows and of columns of squares, and what divides by the root of their product."""

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        """``rows`` and ``columns``: those of the last step; they stay until put() is called."""
        self._kept = rows, columns
        self._rows, self._columns = torch.empty_like(rows), torch.zeros_like(columns)

    def add(self, block: Block, squares: Tensor) -> None:
        """Takes the squares of a block; no row is in two."""
        self._rows[block] = squares.sum(-1)
        self._columns[block[:-1]] += squares.sum(-2)

    def move(self, beta: float, added: float) -> None:
        """Takes moments forward, when all squares are there; each has a number added to it."""
        sizes = self._columns.shape[-1], self._rows.shape[-1]
        for sums, kept, terms in zip((self._rows, self._columns), self._kept, sizes, strict=True):
            sums.div_(terms).add_(added).mul_(1 - beta).add_(kept, alpha=beta)
        rows = self._rows / self._rows.mean(-1, keepdim=True)
        self._row_factors = rows.rsqrt_().unsqueeze(-1)
        self._column_factors = self._columns.rsqrt().unsqueeze(-2)

    def divide(self, block: Block, values: Tensor, out: Tensor) -> None:
        """Writes the values of a block divided by the roots; allocates nothing."""
        torch.mul(values, self._row_factors[block], out=out)
        out.mul_(self._column_factors[block[:-1]])

    def put(self) -> None:
        """Writes the moments to where those of the last step are."""
        for new, kept in zip((self._rows, self._columns), self._kept, strict=True):
            kept.copy_(new)


def step_in_blocks(
    weight: Tensor,
    grad: Tensor,
    average: Tensor,
    moments: FactoredMoments,
    residuals: FactoredMoments,
    numbers: Numbers,
    most: int | None = None,
) -> None:
    """Steps a weight of two or more dimensions, with elements, and its average and moments.

    ``moments`` and ``residuals`` are new. ``most``: elements of a block, if it is said.
    """
    if most is None:
        most = _ELEMENTS.get(weight.device.type, _ELEMENTS_ELSEWHERE)
    blocks, share = blocks_of(weight.shape, most), 1 - numbers.betas[0]
    largest = max(weight[block].numel() for block in blocks)
    scratch = torch.empty(2, largest, dtype=weight.dtype, device=weight.device)

    def room(of: int, block: Block) -> Tensor:
        shape = weight[block].shape
        return scratch[of, : shape.numel()].view(shape)

    for block in blocks:
        squares = torch.mul(grad[block], grad[block], out=room(0, block))
        moments.add(block, squares)
    moments.move(numbers.betas[1], numbers.eps[0])

    norms = []
    for block in blocks:
        update = room(0, block)
        moments.divide(block, grad[block], out=update)
        norms.append(torch.linalg.vector_norm(update))
    rms = torch.linalg.vector_norm(torch.stack(norms)) / math.sqrt(weight.numel())
    clip = (rms / numbers.threshold).clamp_(min=1).reciprocal_()

    def write_average(block: Block) -> tuple[Tensor, Tensor]:
        update, new = room(0, block), room(1, block)
        if len(blocks) > 1:  # else it is there
            moments.divide(block, grad[block], out=update)
        update.mul_(clip)
        return update, torch.lerp(average[block], update, share, out=new)

    for block in blocks:
        update, new = write_average(block)
        update.sub_(new)
        residuals.add(block, torch.mul(update, update, out=update))
    residuals.move(numbers.betas[2], numbers.eps[1])

    (keep,) = numbers_first(weight, 1 - numbers.decay)
    moments.put()
    residuals.put()
    for block in blocks:
        new = room(1, block) if len(blocks) == 1 else write_average(block)[1]
        average[block].copy_(new)
        residuals.divide(block, new, out=new)
        if numbers.decay:
            weight[block].mul_(keep)
        weight[block].add_(new, alpha=-numbers.lr)


def blocks_of(shape: torch.Size, most: int) -> list[Block]:
    """Blocks of whole rows that have no more than so many elements, or one row."""
    sizes = [shape[dim + 1 :].numel() for dim in range(len(shape) - 1)]  # at one index of each
    cut = next((dim for dim, size in enumerate(sizes) if size <= most), len(sizes) - 1)
    count = max(most // sizes[cut], 1)
    ranges = [[slice(i, i + 1) for i in range(size)] for size in shape[:cut]]
    ranges.append([slice(i, i + count) for i in range(0, shape[cut], count)])
    whole = (slice(None),) * (len(sizes) - 1 - cut)
    return [(*begin, *whole) for begin in itertools.product(*ranges)]
