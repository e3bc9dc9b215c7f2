"""Near shapes: matrices that go through one product together, with zeros up to the largest sides.

Zeros in rows and columns stay zeros under Newton–Schulz, and leave the other elements what they are
but for the rounding of sums. They cost operations, and save the calls of a batch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

Shape = tuple[int, int]


class _Joined(NamedTuple):
    shapes: list[Shape]
    padded: Shape
    matrices: int
    """The number of all of them."""


def joined(
    counts: Mapping[Shape, int],
    most: int,
    saved: int,
    operations: Callable[[Shape], int],
    form: Callable[[Shape], bool],
) -> list[list[Shape]]:
    """Returns which shapes go through products together. It depends on the shapes alone.

    Args:
        counts: matrices of each shape, rows and columns
        most: elements that joined shapes have at most, with their zeros
        saved: operations that take as long as the calls of one batch
        operations: those of a matrix of a shape
        form: tells the form of the iteration that a shape is given: joined ones have the same
    """
    groups: list[_Joined] = []
    for shape in sorted(counts, key=lambda shape: (-operations(shape), shape)):
        alone = _Joined([shape], shape, counts[shape])
        best, least = None, saved
        for index, group in enumerate(groups):
            both = _both(group, alone)
            kinds = {(x[0] > x[1], form(x)) for x in (shape, group.padded, both.padded)}
            added = _cost(both, operations) - sum(_cost(x, operations) for x in (group, alone))
            rows, columns = both.padded
            if len(kinds) == 1 and rows * columns * both.matrices <= most and added < least:
                best, least = index, added
        if best is None:
            groups.append(alone)
        else:
            groups[best] = _both(groups[best], alone)
    return [group.shapes for group in groups]


def _both(group: _Joined, other: _Joined) -> _Joined:
    (rows, columns), (others, other_columns) = group.padded, other.padded
    padded = max(rows, others), max(columns, other_columns)
    return _Joined(group.shapes + other.shapes, padded, group.matrices + other.matrices)


def _cost(group: _Joined, operations: Callable[[Shape], int]) -> int:
    return operations(group.padded) * group.matrices


def newton_schulz_operations(shape: Shape, steps: int) -> int:
    """Counts the operations of some steps in the usual form: two for a product and its sum."""
    short, long = sorted(shape)
    return 2 * steps * short * short * (2 * long + short)
