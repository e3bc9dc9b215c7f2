"""Projections of gradients to a low rank: which there are, and the shapes of all that is theirs.

The gradient ``G`` [M, N] of a matrix is projected from the left by a basis ``A`` [M, r], from the
right by ``B`` [r, N], or from both sides:

=====  ==================  ==============
side   low-rank gradient   back
=====  ==================  ==============
left   ``A.T @ G`` [r, N]  ``A @ R``
right  ``G @ B.T`` [M, r]  ``R @ B``
both   ``A.T @ G @ B.T``   ``A @ R @ B``
=====  ==================  ==============

A weight of more dimensions is the matrix of its first one and all others together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedstep._options.shared import own_option
from fusedstep._sharding.dtensor import is_dtensor
from fusedstep._sharding.exchange import cut_of, why_not_gathered

#: The states that the bases are, by side.
LEFT, RIGHT = "projector_left", "projector_right"

PROJ_TYPES = ("std", "reverse_std", "right", "left", "full")


def check_one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"{name} must be one of {names}, not {value!r:.40}")


def check_whole_number(name: str, value: Any) -> None:
    """Raises unless an option is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r:.40}")
    if value < 1:
        raise ValueError(f"Invalid {name} value: {value}")


def matrix_shape(weight: Tensor) -> tuple[int, int]:
    """The shape of the matrix that a weight is projected as."""
    return weight.shape[0], weight.shape[1:].numel()


def sides(proj_type: str, rows: int, columns: int) -> tuple[str, ...]:
    """The sides that a gradient is projected from: std keeps the longer side, and so the rows."""
    if proj_type == "full":
        return LEFT, RIGHT
    if proj_type in ("left", "right"):
        return (LEFT,) if proj_type == "left" else (RIGHT,)
    return (RIGHT,) if (rows >= columns) == (proj_type == "std") else (LEFT,)


def sides_of(group: dict[str, Any], shape: torch.Size) -> tuple[str, ...]:
    """The sides that the gradient of a weight of this shape is projected from."""
    return sides(group["proj_type"], shape[0], shape[1:].numel())


def why_not_projected(group: dict[str, Any], weight: Tensor) -> str | None:
    """Returns why a weight cannot be in a group with a rank, or None."""
    if is_dtensor(weight) and (reason := _why_not_sharded(group, weight)):
        return reason
    if weight.is_complex() or not weight.is_floating_point():
        return f"is {weight.dtype}: gradients of real weights are projected"
    if weight.dim() < 2:
        return (
            f"has {weight.dim()} dimensions, and no low rank: put it into a group without a rank "
            "(parameters that FSDP1 has flattened have one dimension)"
        )
    rank, (rows, columns) = group["rank"], matrix_shape(weight)
    if rank > min(rows, columns):
        return (
            f"is a matrix [{rows}, {columns}], whose rank is at most {min(rows, columns)}: "
            f"rank={rank} is over that"
        )
    return None


def _why_not_sharded(group: dict[str, Any], weight: Tensor) -> str | None:
    if isinstance(own_option(group, "state_dtype"), str):
        return (
            f"is a DTensor: low-rank moments of shards are not kept in codes, as "
            f"state_dtype={group['state_dtype']!r} asks"
        )
    if reason := why_not_gathered(weight):
        return reason
    cut = cut_of(weight)
    if cut is not None and weight.dim() > 2 and cut.dim > 0:
        return (
            f"has {weight.dim()} dimensions, and is a DTensor that is cut along dimension "
            f"{cut.dim}: the matrix that it is projected as has shards of rows, Shard(0), alone"
        )
    return None


def low_shape(rank: int, side: tuple[str, ...], rows: int, columns: int) -> torch.Size:
    """The shape of a low-rank gradient."""
    return torch.Size((rank if LEFT in side else rows, rank if RIGHT in side else columns))


def low_shape_of(group: dict[str, Any], shape: torch.Size) -> torch.Size:
    """The shape of the low-rank gradient of a weight of this shape in a group with a rank."""
    return low_shape(group["rank"], sides_of(group, shape), shape[0], shape[1:].numel())


def basis_shapes(
    rank: int, side: tuple[str, ...], rows: int, columns: int
) -> dict[str, torch.Size]:
    shapes = {LEFT: torch.Size((rows, rank)), RIGHT: torch.Size((rank, columns))}
    return {name: shapes[name] for name in side}


def basis_shapes_of(group: dict[str, Any], weight: Tensor) -> dict[str, torch.Size]:
    """The shapes of the bases of a weight in a group with a rank."""
    return basis_shapes(group["rank"], sides_of(group, weight.shape), *matrix_shape(weight))
