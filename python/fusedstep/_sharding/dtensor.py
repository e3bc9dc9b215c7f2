"""DTensor: weights spread over the processes of a mesh, each of which steps its own shard."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:  # importing it takes a second
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    # Only a program that has imported the module has such tensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Returns this process's part of a tensor, when it has arrived."""
    kind = type(tensor)
    if kind is Parameter or kind is Tensor:  # the usual ones at once: a step asks for all, often
        return tensor
    if is_dtensor(tensor):
        tensor = tensor._local_tensor
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        return tensor.trigger_wait()
    return tensor


def local_pairs(weights: list[Any], grads: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns this process's parts of DTensor weights, and of gradients that are spread alike.

    It runs at every step: attributes are read without properties and checks of each.
    """
    dtensor = sys.modules["torch.distributed.tensor"].DTensor
    for weight, grad in zip(weights, grads, strict=True):
        if isinstance(grad, dtensor):
            spec, other = weight._spec, grad._spec
            same_mesh = spec.mesh is other.mesh or spec.mesh == other.mesh
            if same_mesh and spec.placements == other.placements:
                continue
        raise RuntimeError(
            "the gradient of a DTensor weight must be a DTensor of the same mesh and placements"
        )
    shards = [weight._local_tensor for weight in weights]
    parts = [grad._local_tensor for grad in grads]
    if all(type(part) is Tensor for part in (*shards, *parts)):  # none is on its way
        return shards, parts
    return list(map(local, weights)), list(map(local, grads))


def spread_like(weight: Tensor, shard: Tensor) -> Tensor:
    """A tensor spread as a weight is, of which this process has `shard`."""
    if not is_dtensor(weight):
        return shard
    return _of_shard(weight, shard, weight.shape, weight.stride(), spread_of(weight)[1])


def shard_number(weight: Tensor) -> int:
    """The place of this process's shard among those of a weight; copies have the same."""
    number = 0
    if is_dtensor(weight):
        mesh, placements = spread_of(weight)
        for index, placement in enumerate(placements):
            if not placement.is_replicate():
                number = number * mesh.size(index) + mesh.get_local_rank(index)
    return number


def spread_as(
    weight: Tensor, shard: Tensor, shape: Sequence[int], placements: tuple[Any, ...]
) -> Tensor:
    """A contiguous DTensor over the mesh of a weight, of which this process has `shard`."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return _of_shard(weight, shard, torch.Size(shape), tuple(strides), placements)


def part_shape(
    weight: Tensor, shape: Sequence[int], placements: tuple[Any, ...]
) -> tuple[int, ...]:
    """The shape of this process's part of a tensor over the mesh of a weight."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = spread_of(weight)[0]
    return compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)[0]


def _of_shard(
    weight: Any,
    shard: Tensor,
    shape: torch.Size,
    strides: tuple[int, ...],
    placements: tuple[Any, ...],
) -> Tensor:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # from_local() would move the shard to the mesh's device: with its weights offloaded to the CPU,
    # FSDP2 has shards there of a mesh of GPUs.
    meta = TensorMeta(shape, strides, shard.dtype)
    spec = DTensorSpec(weight.device_mesh, placements, tensor_meta=meta)
    return type(weight)(shard, spec, requires_grad=False)


def spread_of_sums(weight: Tensor) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns how sums over the processes' elements are spread; None where each has all."""
    if not is_dtensor(weight):
        return None
    from torch.distributed.tensor import Partial, Replicate

    mesh, placements = spread_of(weight)
    return mesh, tuple(Replicate() if each.is_replicate() else Partial() for each in placements)


def spread_of_sums_along(weight: Tensor, dim: int) -> tuple[Any, tuple[Any, ...]] | None:
    """Tells how sums along a dimension of a weight are spread; None where each has all terms."""
    if not is_dtensor(weight):
        return None
    from torch.distributed.tensor import Partial, Replicate

    (mesh, placements), dim = spread_of(weight), dim % max(weight.dim(), 1)
    cut = [not each.is_replicate() and each.dim == dim for each in placements]
    return (mesh, tuple(Partial() if each else Replicate() for each in cut)) if any(cut) else None


def placements_without(weight: Tensor, dim: int, keepdim: bool) -> tuple[Any, ...]:
    """The placements of what has been summed along a dimension of a weight, over all processes."""
    from torch.distributed.tensor import Replicate, Shard

    dim %= weight.dim()
    found = []
    for each in spread_of(weight)[1]:
        if not each.is_replicate() and each.dim == dim:
            found.append(Replicate())
        elif not each.is_replicate() and each.dim > dim and not keepdim:
            split = {} if type(each) is Shard else {"split_factor": each.split_factor}
            found.append(type(each)(each.dim - 1, **split))
        else:
            found.append(each)
    return tuple(found)


def total(part: Tensor, spread: tuple[Any, tuple[Any, ...]] | None) -> Tensor:
    """A sum over all processes, of which this one has a part: spread_of_sums() says how.

    It may be in the memory of the part. By a DTensor it would take the host longer.
    """
    if spread is None:
        return part
    mesh, placements = spread
    found = part.to(mesh.device_type)
    for index, placement in enumerate(placements):
        if placement.is_partial():
            torch.distributed.all_reduce(found, group=mesh.get_group(index))
    return found


def whole(tensor: Tensor) -> Tensor:
    """A norm over all processes, of which ``item()`` would give this one's part."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def spread_of(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    """The mesh and the placements of a DTensor."""
    return tensor.device_mesh, tensor.placements
