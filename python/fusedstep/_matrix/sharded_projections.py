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

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.newton_schulz import Scratch
from fusedstep._matrix.projection import LEFT, RIGHT
from fusedstep._sharding.dtensor import local, spread_of
from fusedstep._sharding.exchange import (
    Batch,
    Cut,
    Exchange,
    Form,
    Take,
    batches_over,
    cut_of,
    part_of,
    transfer_device,
)
from fusedstep._step.program import Pass, add_up, run

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
    alike: dict[Any, list[int]] = {}
    for place, grad in enumerate(grads):
        cut = cut_of(grad)
        assert cut is not None
        alike.setdefault((cut, grad.device, grad.dtype, wide[place]), []).append(place)
    made: dict[int, Any] = {}
    owners: dict[int, int] = {}
    gathers: list[Pass] = []
    memory = Scratch()
    for (cut, *_), places in alike.items():
        forms = [Form(tuple(grads[i].shape), 0, (grads[i].shape[0],)) for i in places]
        for batch in batches_over(cut, forms, _AT_ONCE):
            owners |= {places[weight]: owner for weight, owner in batch.owners.items()}
            some = [(i, grads[i]) for i in places]
            gathers.append(_gather(cut, batch, len(gathers), memory.take, some, make, made))
    run(gathers)

    # One that fails would leave the others waiting.
    own = [float(isinstance(made.get(place), Exception)) for place in range(len(grads))]
    failed = [torch.tensor(each, dtype=torch.float64, device="cpu") for each in own]
    run([add_up([(cut, failed[i]) for (cut, *_), places in alike.items() for i in places])])
    for place, count in enumerate(failed):
        if own[place]:
            raise made[place]
        if count:
            raise_failed(place)

    found: list[dict[str, Tensor]] = [{} for _ in grads]
    for (cut, device, _, made_in), places in alike.items():
        there, group = transfer_device(cut, device), cut.mesh.get_group(cut.axis)
        for owner in sorted({owners[i] for i in places}):
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
    batch: Batch,
    number: int,
    take: Take,
    grads: list[tuple[int, Tensor]],
    make: Make,
    made: dict[int, Any],
) -> Pass:
    """Gathers gradients, and makes bases of those that this process owns, or errors, by place.

    ``grads``: with their places.
    """
    device, dtype = grads[0][1].device, grads[0][1].dtype
    exchange = Exchange(cut, batch, number, take, device, dtype, dtype)
    own = [batch.part_of_shard(unit, local(grads[unit.weight][1])) for unit in batch.units]
    own = [part.reshape(to.shape) for part, to in zip(own, exchange.parts, strict=True)]
    if own:
        torch._foreach_copy_(exchange.parts, own)
    yield from exchange.gather()
    for share, whole in exchange.wholes():
        for unit, matrix in zip(share.units, whole, strict=True):
            place, _ = grads[unit.weight]
            try:
                made[place] = make(place, matrix)
            except Exception as error:  # the others are told
                made[place] = error
