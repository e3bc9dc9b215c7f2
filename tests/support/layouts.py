"""The layout table: every way in which a weight or a gradient can lie in memory.

A layout is a shape with strides and an offset into a buffer. The buffer is filled with a pattern
first, and `Placed.assert_outside_untouched` proves that no byte outside of the view has changed.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

GUARD = 67
"""Elements of pattern before and after every view: more than one vector, and not a whole number."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_PATTERNS = {size: int.from_bytes(b"\xa5" * size, "little", signed=True) for size in _INTEGERS}


class Placed:
    """A view at given strides in a buffer full of pattern, holding the given values."""

    def __init__(self, values: Tensor, strides: tuple[int, ...], offset: int = 0):
        self._pattern = _PATTERNS[values.element_size()]
        self._outside = _outside(tuple(values.shape), strides, offset)
        self._buffer = torch.full(
            self._outside.shape, self._pattern, dtype=_INTEGERS[values.element_size()]
        )
        floating = self._buffer.view(values.dtype)
        self.view = floating.as_strided(values.shape, strides, GUARD + offset)
        self.refill(values)

    def to(self, device: str) -> Placed:
        """The same on a device, the pattern with it."""
        there = copy.copy(self)
        there._outside, there._buffer = self._outside.to(device), self._buffer.to(device)
        there.view = there._buffer.view(self.view.dtype).as_strided(
            self.view.shape, self.view.stride(), self.view.storage_offset()
        )
        return there

    @property
    def shares_elements(self) -> bool:
        """True if several elements of the view lie at one address."""
        sizes_and_strides = zip(self.view.shape, self.view.stride(), strict=True)
        return any(size > 1 and stride == 0 for size, stride in sizes_and_strides)

    def refill(self, values: Tensor) -> None:
        """New values; where elements share memory they must be equal."""
        with torch.no_grad():
            # copy_ refuses views with shared elements, so these are written one element each.
            self._one_of_each(self.view).copy_(self._one_of_each(values, like=self.view))

    @staticmethod
    def _one_of_each(tensor: Tensor, like: Tensor | None = None) -> Tensor:
        strides = (tensor if like is None else like).stride()
        for dim, stride in enumerate(strides):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
        return tensor

    def assert_outside_untouched(self, what: str) -> None:
        changed = self._buffer.ne(self._pattern).logical_and_(self._outside)
        assert not changed.any(), f"{what}: {changed.sum()} elements outside of the view changed"


@functools.lru_cache(maxsize=256)
def _outside(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
    """Mask of the buffer's elements that are not in the view."""
    span = 0
    if 0 not in shape:
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    outside = torch.ones(GUARD + offset + span + GUARD, dtype=torch.bool)
    outside.as_strided(shape, strides, GUARD + offset).fill_(False)
    return outside


@dataclass(frozen=True)
class Layout:
    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def __str__(self) -> str:
        return self.name

    def place(self, values: Tensor) -> Placed:
        return Placed(values, self.strides, self.offset)


def contiguous_strides(shape) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _reversed_strides(shape) -> tuple[int, ...]:
    return contiguous_strides(shape[::-1])[::-1]


def _channels_last(shape, channels) -> tuple[int, ...]:
    """Strides of a channels-last view of `shape` in memory that has `channels` of them."""
    _, _, *space = shape
    spatial = contiguous_strides(space)
    image = spatial[0] * space[0]
    return (image * channels, 1, *(stride * channels for stride in spatial))


# Two-dimensional views hold more than two chunks, so that seams fall inside of rows.
_MATRIX = (131, 257)
_IMAGES = (4, 6, 35, 37)
_VOLUMES = (3, 5, 7, 11, 13)

WEIGHT_LAYOUTS = (
    Layout("contiguous", _MATRIX, (257, 1)),
    Layout("storage offset", _MATRIX, (257, 1), offset=5),
    Layout("transposed", _MATRIX, (1, 131)),
    Layout("sliced columns", _MATRIX, (300, 1), offset=3),
    Layout("sliced rows", _MATRIX, (257, 1), offset=4 * 257),
    Layout("every second column", _MATRIX, (514, 2)),
    Layout("every third row", _MATRIX, (3 * 257, 1)),
    Layout("transposed slice", _MATRIX, (1, 150)),
    Layout("transposed, every second", _MATRIX, (2, 300)),
    Layout("channels-last", _IMAGES, _channels_last(_IMAGES, 6)),
    Layout("channels-last, sliced", _IMAGES, _channels_last(_IMAGES, 9), offset=2),
    Layout("channels-last 3-D", _VOLUMES, _channels_last(_VOLUMES, 5)),
    Layout("permuted", (29, 31, 37), (31, 1, 29 * 31)),
    Layout("column", (33_000,), (3,)),
    Layout("diagonal", (600,), (601,)),
    Layout("interleaved", (300, 2), (2, 301)),
    Layout("unit dimensions", (1, 300, 1, 40), (7, 40, 99_999, 1)),
    Layout("narrow rows", (400, 3), (7, 1)),
    Layout("eight dimensions", (3, 2, 3, 2, 2, 3, 2, 3), (100, 2200, 4500, 3, 48, 13, 310, 700)),
    Layout("0-dim", (), (), offset=3),
    Layout("one element", (1, 1), (5, 9)),
    Layout("empty", (0, 3), (3, 1)),
    Layout("empty, strided", (3, 0), (7, 5)),
)

GRADIENT_LAYOUTS = {
    "as the weight": lambda weight: weight.strides,
    "contiguous": lambda weight: contiguous_strides(weight.shape),
    "other dimension order": lambda weight: _reversed_strides(weight.shape),
    "every second element": lambda weight: tuple(2 * s for s in contiguous_strides(weight.shape)),
    "expanded": lambda weight: (0,) * len(weight.shape),
    "expanded rows": lambda weight: (0, *contiguous_strides(weight.shape[1:]))[: len(weight.shape)],
    "expanded columns": lambda weight: (*_reversed_strides(weight.shape[:-1]), 0)[
        : len(weight.shape)
    ],
}
