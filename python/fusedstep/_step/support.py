"""Tells why native kernels cannot step a group."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusedstep._native import ops
from fusedstep._sharding.dtensor import is_dtensor, local


def why_not_native(
    weights: list[Tensor],
    grads: Iterable[Tensor] = (),
    states: Iterable[Tensor] = (),
    *,
    needs_whole: bool = False,
) -> str | None:
    """Returns the reason in the words of an error, or None if the kernels can.

    ``needs_whole``: whether the step cannot take shards of a DTensor.
    """
    for p in weights:
        if reason := _of_weight(p) or _of_shards(p, needs_whole):
            return reason
    if len(set(map(id, weights))) != len(weights):
        return "`fused=True` requires all the params of a group to be different Tensors"
    return why_not_readable(grads, "gradients") or why_not_readable(states, "states")


def why_not_readable(tensors: Iterable[Tensor], what: str) -> str | None:
    """Returns why the memory of one of these tensors does not hold its values, or None."""
    for tensor in map(local, tensors):
        if is_traceable_wrapper_subclass(tensor) or tensor.is_neg() or tensor._is_zerotensor():
            kind = "negated view" if tensor.is_neg() else type(tensor).__name__
            kind = "zero tensor" if tensor._is_zerotensor() else kind
            return (
                f"`fused=True` requires all the {what} to be Tensors whose memory holds their "
                f"values but one is a {kind}; clone() it, or use fused=None or False"
            )
    return None


def _of_weight(p: Tensor) -> str | None:
    if p.device.type not in ops.DEVICES or p.dtype not in ops.DTYPES:
        return (
            "`fused=True` requires all the params to be floating point Tensors of "
            f"supported devices: {list(ops.DEVICES)} but {p.dtype} and {p.device.type}"
        )
    if missing := ops.missing_on(p.device.type):
        return f"`fused=True` needs native kernels. {missing}"
    if type(local(p)) not in (Tensor, Parameter) or p.layout is not torch.strided:
        return (
            "`fused=True` requires all the params to be dense Tensors but one is a "
            f"{type(p).__module__}.{type(p).__qualname__} of layout {p.layout}"
        )
    return why_not_readable([p], "params")


def _of_shards(p: Tensor, needs_whole: bool) -> str | None:
    if not is_dtensor(p):
        return None
    if any(placement.is_partial() for placement in p.placements):
        return "`fused=True` does not support DTensor params with Partial placements"
    if needs_whole and not all(placement.is_replicate() for placement in p.placements):
        return "`fused=True` does not support sharded DTensor params of this optimizer"
    return None
