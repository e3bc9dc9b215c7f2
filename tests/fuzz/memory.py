"""Tensors at any strides in memory that nobody else may touch, and the numbers in them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from support.layouts import GUARD, contiguous_strides

DTYPES = {str(each).removeprefix("torch."): each for each in (
    torch.float32, torch.float64, torch.bfloat16, torch.float16)}  # fmt: skip

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_PATTERNS = {size: int.from_bytes(b"\xa5" * size, "little", signed=True) for size in _INTEGERS}
_POWERS = torch.tensor([2.0**exponent for exponent in range(-12, 13)], dtype=torch.float64)


class Area:
    """A view in a buffer that is full of pattern elsewhere.

    Unlike `layouts.Placed` it holds any numbers where elements share memory in any way.
    """

    def __init__(self, dtype: torch.dtype, shape, strides=None, offset: int = 0):
        strides = contiguous_strides(shape) if strides is None else strides
        self._inside = _inside(tuple(shape), tuple(strides), offset)
        self._pattern = _PATTERNS[dtype.itemsize]
        self._buffer = torch.full(
            self._inside.shape, self._pattern, dtype=_INTEGERS[dtype.itemsize]
        )
        self._numbers = self._buffer.view(dtype)
        self.view = self._numbers.as_strided(shape, strides, GUARD + offset)

    def write(self, kind: str, seed: int) -> None:
        """New numbers, one for each place in memory."""
        count = int(self._inside.sum())
        self._numbers[self._inside] = numbers(kind, seed, count, self._numbers.dtype)

    def touched_outside(self) -> int:
        """Number of elements outside of the view that have changed."""
        return int(((self._buffer != self._pattern) & ~self._inside).sum())


@functools.lru_cache(maxsize=256)
def _inside(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
    span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    inside = torch.zeros(GUARD + offset + span + GUARD, dtype=torch.bool)
    inside.as_strided(shape, strides, GUARD + offset).fill_(True)
    return inside


def numbers(kind: str, seed: int, count: int, dtype: torch.dtype) -> Tensor:
    """Random numbers, the same for any number of threads: only operations that are exact."""
    generator = torch.Generator().manual_seed(seed)
    values = 2 * torch.rand(count, generator=generator, dtype=torch.float64) - 1
    if kind == "wide":
        reach = 4 if dtype is torch.float16 else 12
        values *= _POWERS[torch.randint(12 - reach, 13 + reach, (count,), generator=generator)]
    elif kind == "holes":
        values[torch.rand(count, generator=generator) < 0.7] = 0.0
    elif kind == "zero":
        values.zero_()
    elif kind == "equal":
        values.fill_(0.75)
    return values.to(dtype)


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if two elements share memory; looks at each."""
    if 0 in shape:
        return False
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(shape, strides, strict=True):
        offsets = offsets.unsqueeze(-1) + stride * torch.arange(size)
    return offsets.unique().numel() != offsets.numel()
