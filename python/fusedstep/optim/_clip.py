"""Works out what a step multiplies its gradients by: their norm is taken here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from fusedstep.optim import _dtensor
from fusedstep.optim._factors import PLAIN, Factors
from fusedstep.optim._plan import Work

#: torch.nn.utils.clip_grad_norm_ adds it to the norm that it divides by.
EPSILON = 1e-6


def factors_of(
    work: list[Work],
    scaler: tuple[Tensor | None, Tensor | None],
    max_norm: float | None,
    own_max_norm: float,
    own_eps: float,
) -> Factors | None:
    """Returns the factors of a step; None if it is to be skipped.

    ``scaler``: its ``found_inf`` and ``grad_scale``. ``own_max_norm`` and ``own_eps``: what the
    optimizer itself clips the norm to, after ``max_norm`` has, and what it adds to the norm.
    """
    found_inf, scale = scaler
    asks_norm = max_norm is not None or own_max_norm < math.inf
    if found_inf is None and scale is None and not asks_norm:
        return PLAIN
    if _is_on_device(work):
        return _on_device(work, found_inf, scale, max_norm, own_max_norm, own_eps)
    if found_inf is not None and found_inf.item():
        return None
    factor, clip, norm = 1.0 if scale is None else 1.0 / scale.item(), 1.0, math.inf
    if asks_norm:
        left = norm = _grad_norm(work) * factor
        if max_norm is not None and not (part := max_norm / (norm + EPSILON)) >= 1:
            factor, left = factor * part, left * part
        left += own_eps
        if left > own_max_norm:
            clip = own_max_norm / left
    return Factors(factor, clip, norm)


def norm_of(work: list[Work]) -> float | Tensor:
    """The 2-norm of all gradients of a step: on the device, if all of it is on one."""
    if _is_on_device(work):
        return _device_norm2(work, work[0].plan.device).sqrt()
    return _grad_norm(work)


def _is_on_device(work: list[Work]) -> bool:
    return bool(work) and all(item.plan and item.plan.is_on_device for item in work)


def _on_device(
    work: list[Work],
    found_inf: Tensor | None,
    scale: Tensor | None,
    max_norm: float | None,
    own_max_norm: float,
    own_eps: float,
) -> Factors:
    """The same without waiting for a device."""
    device = work[0].plan.device
    factor: float | Tensor = 1.0
    clip: float | Tensor = 1.0
    norm: float | Tensor = math.inf
    if scale is not None:
        factor = scale.to(device, torch.float64).reciprocal()
    if max_norm is not None or own_max_norm < math.inf:
        left = norm = _device_norm2(work, device).sqrt() * factor
        if max_norm is not None:
            part = (max_norm / (norm + EPSILON)).clamp(max=1.0)
            factor, left = part * factor, left * part
        if own_max_norm < math.inf:
            left = left + own_eps
            clip = torch.where(left > own_max_norm, own_max_norm / left, 1.0)
    if found_inf is not None:
        found_inf = found_inf.to(device)
        if isinstance(norm, Tensor):
            norm = torch.where(found_inf != 0, math.inf, norm)
    return Factors(factor, clip, norm, found_inf)


def _device_norm2(work: Iterable[Work], device: torch.device) -> Tensor:
    """The square of the 2-norm of all gradients, added up device by device."""
    sums: dict[tuple[torch.device, Any], Tensor] = {}
    for item in work:
        place = item.plan.device, item.plan.spread_of_sums
        if place not in sums:
            sums[place] = torch.zeros((), dtype=torch.float64, device=item.plan.device)
        torch.ops.fusedstep.plan_add_grad_norm2(item.plan.handle, sums[place])
    first, *others = (
        _dtensor.total(norm2, spread).to(device) for (_, spread), norm2 in sums.items()
    )
    for norm2 in others:
        first = first + norm2
    return first


def _grad_norm(work: list[Work]) -> float:
    """The 2-norm of all gradients of a step."""
    on_cpu: dict[Any, list[int]] = {}  # plans, by how their weights are spread over processes
    on_device, others = [], []
    for item in work:
        if not item.plan:
            others += [g.coalesce().values() if g.is_sparse else g for g in item.grads]
        elif item.plan.is_on_device:
            on_device.append(item)
        else:
            on_cpu.setdefault(item.plan.spread_of_sums, []).append(item.plan.handle)
    norms = []
    for spread, handles in on_cpu.items():
        norm = torch.ops.fusedstep.plans_grad_norm(handles)
        if spread is not None:
            part = torch.tensor(norm * norm, dtype=torch.float64, device="cpu")
            norm = math.sqrt(_dtensor.total(part, spread).item())
        norms.append(norm)
    if on_device:
        norms.append(_device_norm2(on_device, torch.device("cpu")).sqrt().item())
    # torch sums shards on their own device, where a mesh of GPUs has no way to communicate.
    shards = [grad for grad in others if _dtensor.is_dtensor(grad)]
    if whole := [grad for grad in others if not _dtensor.is_dtensor(grad)]:
        norms.append(get_total_norm(whole).item())
    if shards:
        norms.append(math.hypot(*_dtensor.norms(shards)))
    return math.hypot(*norms) if len(norms) > 1 else sum(norms)
