"""Works out what a step multiplies its gradients by: their norm is taken here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedstep._native import ops
from fusedstep._options.shared import own_option
from fusedstep._sharding.dtensor import local
from fusedstep._step.factors import PLAIN, Factors
from fusedstep._step.plan import Work
from fusedstep._step.sums import Place, SpreadWeights, in_real_numbers, place_of

#: torch.nn.utils.clip_grad_norm_ adds it to the norm that it divides by.
EPSILON = 1e-6


class Asked(NamedTuple):
    """What a step needs the norm of all gradients for."""

    max_norm: float | None
    """What ``step(max_norm=…)`` clips it to."""
    own_max_norm: float | None
    """What the optimizer itself clips it to then."""
    own_eps: float
    """What the optimizer adds to it."""
    raises: bool
    """Whether a norm that is not finite is an error."""
    skips: bool
    """Whether a step with such a norm is left out."""

    @property
    def is_norm(self) -> bool:
        """Whether the step needs it at all."""
        clips = self.max_norm is not None or self.own_max_norm is not None
        return clips or self.raises or self.skips


def factors_of(
    work: list[Work],
    scaler: tuple[Tensor | None, Tensor | None],
    asked: Asked,
    spread: SpreadWeights | None,
) -> Factors:
    """Returns the factors of a step, or that it is to be skipped.

    ``scaler``: its ``found_inf`` and ``grad_scale``. ``spread``: the weights with parts in other
    processes, if the step needs the norm.
    """
    found_inf, scale = scaler
    max_norm, own_max_norm, own_eps, *_ = asked
    if found_inf is None and scale is None and not asked.is_norm:
        return PLAIN
    # The host decides for torch operations whether a step is left out.
    is_decided = (found_inf is not None or asked.skips) and not all(item.plan for item in work)
    if (device := _only_device(work)) is not None and not is_decided:
        return _on_device(work, device, found_inf, scale, asked, spread)
    if found_inf is not None and found_inf.item():
        return Factors(is_skipped=True)
    factor, clip, norm = 1.0 if scale is None else 1.0 / scale.item(), 1.0, math.inf
    if spread is not None:
        left = norm = _grad_norm(work, spread) * factor
        if asked.skips and not math.isfinite(norm):
            return Factors(norm=norm, is_skipped=True)
        if max_norm is not None and not (part := max_norm / (norm + EPSILON)) >= 1:
            factor, left = factor * part, left * part
        left += own_eps
        if own_max_norm is not None and left > own_max_norm:
            clip = own_max_norm / left
    return Factors(factor, clip, norm)


def norm_of(work: list[Work], spread: SpreadWeights) -> float | Tensor:
    """The 2-norm of all gradients of a step: on the device, if all of it is on one."""
    if (device := _only_device(work)) is not None:
        return _device_norm2(work, spread, device).sqrt()
    return _grad_norm(work, spread)


def _only_device(work: list[Work]) -> torch.device | None:
    """The first accelerator of a step of which all is queued on accelerators; else None."""
    queues = [item.queue for item in work]
    return None if None in queues else next(iter(queues), None)


def _on_device(
    work: list[Work],
    device: torch.device,
    found_inf: Tensor | None,
    scale: Tensor | None,
    asked: Asked,
    spread: SpreadWeights | None,
) -> Factors:
    """The same without waiting for a device."""
    max_norm, own_max_norm, own_eps, *_ = asked
    factor: float | Tensor = 1.0
    clip: float | Tensor = 1.0
    norm: float | Tensor = math.inf
    if scale is not None:
        factor = scale.to(device, torch.float64).reciprocal()
    if spread is not None:
        norm = _device_norm2(work, spread, device).sqrt()
        if scale is not None:
            norm = norm * factor
        left = norm
        if max_norm is not None:
            part = (max_norm / (norm + EPSILON)).clamp(max=1.0)
            factor = part if scale is None else part * factor
        if own_max_norm is not None and own_max_norm < math.inf:
            if max_norm is not None:
                left = left * part
            left = left + own_eps
            clip = torch.where(left > own_max_norm, own_max_norm / left, 1.0)
    if found_inf is not None:
        found_inf = found_inf.to(device)
        if isinstance(norm, Tensor):
            norm = torch.where(found_inf != 0, math.inf, norm)
    if asked.skips and isinstance(norm, Tensor):
        found_inf = (norm < math.inf).logical_not().to(torch.float32)
    return Factors(factor, clip, norm, found_inf)


def _device_norm2(work: Iterable[Work], spread: SpreadWeights, device: torch.device) -> Tensor:
    """The square of the 2-norm of all gradients, added up device by device."""
    sums: dict[torch.device, Tensor] = {}
    for item in work:
        there, plan = item.queue, item.plan
        if there is None or (plan and plan.is_spread):
            continue
        if there not in sums:
            sums[there] = torch.zeros((), dtype=torch.float64, device=there)
        if plan:
            torch.ops.fusedstep.plan_add_grad_norm2(plan.handle, sums[there])
        elif grads := [local(grad) for p, grad in item.pairs() if place_of(p) is None]:
            sums[there] += _norms(grads).square().sum()
    first, *others = (each.to(device) for each in (*sums.values(), *_spread_norms2(work, spread)))
    for each in others:
        first = first + each
    return first


def _spread_norms2(work: Iterable[Work], spread: SpreadWeights) -> list[Tensor]:
    """The squares of the 2-norms of gradients that are spread over processes, place by place."""
    if not spread.places:
        return []
    here: defaultdict[Place, _Own] = defaultdict(lambda: _Own([], [], [], []))
    for item in work:
        if item.plan:
            if item.plan.is_spread:
                own = here[item.plan.device, item.plan.spread_of_sums]
                own.weights.extend(item.weights)
                own.handles.append(item.plan.handle)
            continue
        for weight, grad in item.pairs():
            if place := place_of(weight):
                own, shard = here[place], local(grad)
                own.weights.append(weight)
                (own.plain if _is_plain(shard, item.group) else own.others).append(shard)

    def add(place: Place, to: Tensor) -> None:
        _add_norms2(*here[place][1:], to)

    return spread.totals({place: own.weights for place, own in here.items()}, add, everywhere=True)


class _Own(NamedTuple):
    """Weights of one place that have a gradient here, and where the gradients are."""

    weights: list[Tensor]
    handles: list[int]
    plain: list[Tensor]
    others: list[Tensor]


def _is_plain(grad: Tensor, group: dict[str, Any]) -> bool:
    """Returns whether the library reads a gradient that has no plan, as it does a plan's."""
    return (
        type(grad) is Tensor
        and grad.is_cpu
        and grad.dtype in ops.DTYPES
        and grad.layout is torch.strided
        and own_option(group, "fused") is not False
        and not group.get("differentiable")
        and not ops.missing
    )


def _add_norms2(handles: list[int], plain: list[Tensor], others: list[Tensor], to: Tensor) -> None:
    """Adds the squares of the norms of plans' gradients, and of shards, plain ones and others."""
    if others:
        to += _norms(others).square().sum()
    if plain:
        to += torch.ops.fusedstep.grads_norm2(plain)
    if handles and to.is_cpu:
        to += torch.ops.fusedstep.plans_grad_norm(handles) ** 2
    else:
        for handle in handles:
            torch.ops.fusedstep.plan_add_grad_norm2(handle, to)


def _grad_norm(work: list[Work], spread: SpreadWeights) -> float:
    """The 2-norm of all gradients of a step."""
    on_cpu: list[int] = []
    on_device: list[Work] = []
    plain: list[Tensor] = []
    others: list[Tensor] = []
    for item in work:
        if not (item.plan and item.plan.takes_norm):
            for weight, grad in item.pairs():
                if place_of(weight) is None:
                    values = local(grad.coalesce().values() if grad.is_sparse else grad)
                    (plain if _is_plain(values, item.group) else others).append(values)
        elif not item.plan.is_spread:
            if item.plan.is_on_device:
                on_device.append(item)
            else:
                on_cpu.append(item.plan.handle)
    norms = []
    if on_cpu:
        norms.append(torch.ops.fusedstep.plans_grad_norm(on_cpu))
    if on_device:
        found = _device_norm2(on_device, SpreadWeights([], []), torch.device("cpu"))
        norms.append(found.sqrt().item())
    if plain:
        norms.append(math.sqrt(torch.ops.fusedstep.grads_norm2(plain)))
    if others:
        norms.append(_norm(others))
    norms += [found.sqrt().item() for found in _spread_norms2(work, spread)]
    return math.hypot(*norms) if len(norms) > 1 else sum(norms)


def _norm(tensors: list[Tensor]) -> float:
    """The 2-norm of tensors."""
    return torch.linalg.vector_norm(_norms(tensors)).item()


def _norms(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each tensor, in float64: that of two float16 numbers may exceed their range.

    A GPU takes all in a few launches.
    """
    real = list(map(in_real_numbers, tensors))
    found = torch._foreach_norm(real, 2, dtype=torch.float64)
    return torch.stack([each.to(found[0].device) for each in found])
