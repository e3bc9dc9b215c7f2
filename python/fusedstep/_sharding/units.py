"""Tensors with one number for a unit of elements of a weight: packed codes, absmax of blocks.

Their shape is ``[rows, units of a row]``, or ``[units]`` where a row is no multiple of a unit. Of a
DTensor weight they are DTensors with its placements: DCP and ``full_tensor()`` then find each
number beside its elements, however many processes there are.

That takes borders of shards that lie between two units. Where one lies inside of a unit, each
process has units of its own, which begin at the first element of its shard. They are then a DTensor
of the shape ``[processes of the first dimension of the mesh, ..., 1, most units + 1]``, in which a
process has one row. No other number of processes has this shape, and the last element keeps it from
being that of a whole weight's: a checkpoint of such units is an error elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedstep._sharding.dtensor import is_dtensor, local, spread_as, spread_of


def sizes_in_units(sizes: Sequence[int], unit: int) -> list[int]:
    """The shape of units of a whole tensor, as the native library has it."""
    row = math.prod(sizes[1:])
    if len(sizes) > 1 and row % unit == 0:
        return [sizes[0], row // unit]
    return [-(-math.prod(sizes) // unit)]


def shape_of_units(weight: Tensor, unit: int) -> list[int]:
    """The shape of units of a weight, which may be spread over processes."""
    return _form(weight, unit)[0]


def spread_units(weight: Tensor, part: Tensor, unit: int) -> Tensor:
    """Units spread over processes as their weight is, of which this process has ``part``."""
    if not is_dtensor(weight):
        return part
    shape, placements = _form(weight, unit)
    if len(shape) > 2:
        own = part.new_zeros(shape[-1])
        own[: part.numel()] = part.flatten()
        part = own.view([1] * (len(shape) - 1) + shape[-1:])
    return spread_as(weight, part, shape, placements)


def part_of_units(weight: Tensor, units: Tensor, unit: int) -> Tensor:
    """This process's part of units."""
    part, sizes = local(units), sizes_in_units(local(weight).shape, unit)
    if list(part.shape) == sizes:
        return part
    return part.view(-1)[: math.prod(sizes)].view(sizes)


def _form(weight: Tensor, unit: int) -> tuple[list[int], tuple[Any, ...]]:
    """The shape of all units, and their placements."""
    whole = sizes_in_units(weight.shape, unit)
    if not is_dtensor(weight):
        return whole, ()
    mesh, placements = spread_of(weight)
    if _has_borders_between(weight.shape, mesh, placements, whole, unit):
        return whole, placements
    from torch.distributed.tensor import Replicate, Shard

    is_cut = [not placement.is_replicate() for placement in placements]
    most = list(weight.shape)
    for index, placement in enumerate(placements):
        if is_cut[index]:
            most[placement.dim] = -(-most[placement.dim] // mesh.size(index))
    shape = [mesh.size(index) if cut else 1 for index, cut in enumerate(is_cut)]
    own = tuple(Shard(index) if cut else Replicate() for index, cut in enumerate(is_cut))
    return [*shape, 1, -(-math.prod(most) // unit) + 1], own


def _has_borders_between(
    sizes: Sequence[int], mesh: Any, placements: tuple[Any, ...], whole: list[int], unit: int
) -> bool:
    """Returns whether shards of units are the units of shards.

    A tensor is cut in pieces of one length, but for the last ones: those of its units are too.
    """
    cuts: dict[int, list[int]] = {}
    for index, placement in enumerate(placements):
        if not placement.is_replicate():
            cuts.setdefault(placement.dim, []).append(index)
    if not cuts:
        return True
    if len(whole) == 2:
        columns = cuts.get(1, [])
        if cuts.keys() <= {0}:
            return True
        if not cuts.keys() <= {0, 1} or len(sizes) != 2 or len(columns) > 1:
            return False
        is_in_pieces = placements[columns[0]].is_shard()
        return is_in_pieces and -(-sizes[1] // mesh.size(columns[0])) % unit == 0
    if cuts.keys() != {0} or len(cuts[0]) > 1 or not placements[cuts[0][0]].is_shard():
        return False
    count = mesh.size(cuts[0][0])
    elements = -(-sizes[0] // count) * math.prod(sizes[1:])
    return elements == -(-whole[0] // count) * unit
