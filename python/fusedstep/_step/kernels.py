"""Tells whether native kernels step weights of an optimizer, by its class and options."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fusedstep._options.shared import own_option
from fusedstep._state import storage
from fusedstep._state.kinds import Group
from fusedstep._step.limits import skips_nonfinite
from fusedstep._step.owner import Owner
from fusedstep._step.support import why_not_native


def wants_native(optimizer: Owner, group: Group) -> bool:
    """Returns whether the options of a group ask for native kernels, or allow them."""
    foreach = optimizer._foreach_means_unfused and group.get("foreach")
    fused, differentiable = own_option(group, "fused"), group.get("differentiable", False)
    if differentiable and isinstance(own_option(group, "state_dtype"), str):
        raise RuntimeError("quantised states, by `state_dtype`, do not support `differentiable`")
    if differentiable:
        storage.refuse_differentiable(group)
    if fused:
        if differentiable:
            raise RuntimeError("`fused` does not support `differentiable`")
        if foreach:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        return True
    return fused is None and not (foreach or differentiable)


def why_no_kernels(
    optimizer: Owner, weights: list[Tensor], grads: Iterable[Tensor] = ()
) -> str | None:
    devices = optimizer._native_devices
    for weight in weights:
        if devices is not None and weight.device.type not in devices:
            return f"{type(optimizer).__name__} has no native kernels on {weight.device.type}"
    states = optimizer._accessed_states(weights)
    needs_whole = not optimizer._steps_shards_natively
    return why_not_native(weights, grads, states, needs_whole=needs_whole)


def may_be_skipped(optimizer: Owner) -> bool:
    """Returns whether a number on a device may tell if a step is skipped."""
    found_inf = getattr(optimizer, "found_inf", None)
    return (found_inf is not None and not found_inf.is_cpu) or skips_nonfinite(optimizer)
