"""Low-rank gradients of matrices of which the processes of a mesh have shards.

A shard is a block of rows or of columns. With ``k`` processes, of rows cut (columns are alike)::

    left    A.T @ G = A_1.T @ G_1 + ... + A_k.T @ G_k     a sum over the processes
    right   G @ B.T = [G_1 @ B.T; ...; G_k @ B.T]         each process has its rows
    both    the sum of A_i.T @ G_i @ B.T

So a low-rank gradient is *summed*, and then all processes have all of it and of its moments, where
the dimension that is cut is projected. Elsewhere it is cut as the weight is. The way back needs
nothing of others. All processes have whole bases, and take the rows or columns that are theirs.

Whole gradients are needed for new bases alone: each is gathered to one process, its owner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.projection import LEFT, RIGHT
from fusedstep._sharding.dtensor import local, spread_of
from fusedstep._sharding.exchange import (
    Batch,
    Cut,
    Exchange,
    Form,
    batches_of,
    cut_of,
    order_of,
    part_of,
    transfer_device,
)
from fusedstep._step.program import Pass, run

#: Elements of gradients that a process gathers at once, about.
_AT_ONCE = 1 << 24


def is_summed(cut: Cut, sides: Iterable[str]) -> bool:
    """Returns whether low-rank gradients are sums over the processes; else they have parts."""
    return (LEFT, RIGHT)[cut.dim] in sides


def basis_part(basis: Tensor, side: str, cut: Cut | None) -> Tensor:
    """The rows or columns of a whole basis that belong to this process's part of a weight."""
    return part_of(basis, cut) if cut is not None and side == (LEFT, RIGHT)[cut.dim] else basis


def low_placements(weight: Tensor, sides: Iterable[str]) -> tuple[Any, ...]:
    """The placements of the low-rank gradient of a DTensor."""
    from torch.distributed.tensor import Replicate, Shard

    cut, found = cut_of(weight), copies_of(weight)
    if cut is None or is_summed(cut, sides):
        return found
    return *found[: cut.axis], Shard(cut.dim), *[Replicate()] * (len(found) - cut.axis - 1)


def copies_of(weight: Tensor) -> tuple[Any, ...]:
    """The placements of what all processes have of a DTensor's mesh."""
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() for _ in spread_of(weight)[1])


def sum_parts(parts: Sequence[tuple[Cut, Tensor]]) -> None:
    """Writes sums over the processes into tensors of which each has a term.

    One collective takes all that go over the same processes; sums of 16-bit terms are float32.
    """
    alike: dict[Any, list[Tensor]] = {}
    for cut, part in parts:
        there = transfer_device(cut, part.device)
        key = cut.mesh, cut.axis, there, _wide(part.dtype)
        alike.setdefault(key, []).append(part)
    for (mesh, axis, there, wide), terms in alike.items():
        flat = torch.cat([term.reshape(-1).to(there, wide) for term in terms])
        torch.distributed.all_reduce(flat, group=mesh.get_group(axis))
        for term, total in zip(terms, torch.split(flat, [t.numel() for t in terms]), strict=True):
            term.copy_(total.view(term.shape))


def sum_norms(parts: Sequence[tuple[Cut, Tensor]]) -> None:
    """Makes norms of parts those of the whole, in place."""
    squares = [(cut, norm.double().square()) for cut, norm in parts]
    sum_parts(squares)
    for (_, norm), (_, square) in zip(parts, squares, strict=True):
        norm.copy_(square.sqrt_())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize == 2 else dtype


#: Makes tensors by name of a whole gradient, at its owner. It gets the place of its weight.
Make = Callable[[int, Tensor], dict[str, Tensor]]


def made_by_owners(
    grads: Sequence[Tensor],
    shapes: Sequence[dict[str, torch.Size]],
    wide: Sequence[torch.dtype],
    make: Make,
    raise_failed: Callable[[int], None],
) -> list[dict[str, Tensor]]:
    """Gathers each of DTensor gradients to a process, which makes tensors of it for all.

    Args:
        grads: cut gradients; all processes call this with theirs of the same weights
        shapes: those of the tensors that are made of each, by name
        wide: the dtypes of these
        make: makes them of a whole gradient, as a matrix
        raise_failed: called with the place of a gradient for which another process has failed
    """
    found: list[dict[str, Tensor]] = [{} for _ in grads]
    alike: dict[Any, list[int]] = {}
    for place, grad in enumerate(grads):
        cut = cut_of(grad)
        assert cut is not None
        alike.setdefault((cut, grad.device, grad.dtype, wide[place]), []).append(place)
    for (cut, device, dtype, made_in), places in alike.items():
        made, owners = _gather(cut, device, dtype, [grads[i] for i in places], places, make)
        there = transfer_device(cut, device)
        group = cut.mesh.get_group(cut.axis)
        # One that fails would leave the others waiting.
        own = next((i for i, each in made.items() if isinstance(each, Exception)), None)
        failed = torch.tensor(-1 if own is None else own, dtype=torch.int64, device=there)
        torch.distributed.all_reduce(failed, torch.distributed.ReduceOp.MAX, group=group)
        if own is not None:
            raise made[own]
        if (place := int(failed)) >= 0:
            raise_failed(place)
        for owner in sorted(set(owners.values())):
            mine = [i for i in places if owners[i] == owner]
            sizes = [shape.numel() for i in mine for shape in shapes[i].values()]
            flat = torch.empty(sum(sizes), dtype=made_in, device=there)
            if mine[0] in made:
                parts = [made[i][name].reshape(-1) for i in mine for name in shapes[i]]
                torch.cat([part.to(there, made_in) for part in parts], out=flat)
            torch.distributed.broadcast(flat, group=group, group_src=owner)
            pieces = iter(torch.split(flat.to(device), sizes))
            for i in mine:
                found[i] = {
                    name: next(pieces).view(shape).clone() for name, shape in shapes[i].items()
                }
    return found


def _gather(
    cut: Cut,
    device: torch.device,
    dtype: torch.dtype,
    grads: list[Tensor],
    places: list[int],
    make: Make,
) -> tuple[dict[int, Any], dict[int, int]]:
    """The bases that this process makes, or its errors, and the owners of all, by place."""
    order = order_of(cut.mesh, cut.axis)
    number = cut.mesh.get_local_rank(cut.axis)
    forms = tuple(Form(tuple(grad.shape), 0, 1) for grad in grads)
    batches = batches_of(forms, cut.dim, order, order.index(number), _AT_ONCE)
    shards = [local(grad) for grad in grads]
    made: dict[int, Any] = {}

    memory: dict[Any, Tensor] = {}

    def room(use: str, shape: Sequence[int], of: torch.dtype, on: torch.device) -> Tensor:
        key = use, of, on
        if key not in memory or memory[key].numel() < math.prod(shape):
            memory[key] = torch.empty(math.prod(shape), dtype=of, device=on)
        return memory[key][: math.prod(shape)].view(*shape)

    def make_all(number: int, batch: Batch) -> Pass:
        exchange = Exchange(cut, batch, number, room, device, dtype, dtype)
        own = [batch.part_of_shard(unit, shards[unit.weight]) for unit in batch.units]
        own = [part.reshape(to.shape) for part, to in zip(own, exchange.parts, strict=True)]
        if own:
            torch._foreach_copy_(exchange.parts, own)
        yield from exchange.gather()
        for share, whole in exchange.wholes():
            for unit, matrix in zip(share.units, whole, strict=True):
                place = places[unit.weight]
                try:
                    made[place] = make(place, matrix)
                except Exception as error:  # the others are told
                    made[place] = error

    run(itertools.starmap(make_all, enumerate(batches)))
    owners = {places[weight]: owner for batch in batches for weight, owner in batch.owners.items()}
    return made, owners
