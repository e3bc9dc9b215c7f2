"""Takes a step: natively where there is a plan, elsewhere by torch operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep import _ops
from fusedstep.optim._checks import with_name
from fusedstep.optim._dtensor import total
from fusedstep.optim._factors import PLAIN, Factors, is_one
from fusedstep.optim._plan import Plan, Work


def take(
    rule: str,
    groups: list[dict[str, Any]],
    work: list[Work],
    factors: Factors,
    by_torch: Callable[[list[Work], Factors], None],
    accessed_states: Callable[[list[Tensor]], list[Tensor]],
    *,
    has_norms: bool,
) -> list[tuple[Tensor, Tensor]]:
    """Steps all groups, or none if an error is raised.

    ``by_torch`` steps work without a plan. ``accessed_states`` returns the states of weights that
    autograd may know of. ``has_norms``: the rule takes norms of whole weights.

    Returns the weights and gradients of which no step has scaled or zeroed the gradient.
    """
    uses = any(item.use for item in work)
    untreated = _aliasing_grads(work) if uses else []
    factor = 1.0 if factors is PLAIN else factors.on_host
    for item in work:
        if not item.plan:
            continue
        try:
            _ops.prepare_step(rule, item.plan.handle, item.options, factor, item.use)
        except RuntimeError as error:
            raise with_name(error, groups, item.group, item.weights) from None
    others = [item for item in work if not item.plan]
    # First, for what a native step leaves in a gradient is of no use to who shares its memory.
    # Else in the order of the groups, of which some may share weights.
    at_once = uses or len(others) == len(work)
    if at_once:
        by_torch(others, factors)
    native = [item for item in work if item.plan]
    in_order = others and not at_once
    if native and not in_order:
        _take_native(native, has_norms)
    for item in work:
        if item.plan:
            if in_order:
                _take_native([item], has_norms)
            increment_version(item.weights)
            increment_version(accessed_states(item.weights))
            if item.use:
                increment_version(item.grads)
            elif factors is not PLAIN and not is_one(factors.grad):
                untreated.extend(item.pairs())
        else:
            if not at_once:
                by_torch([item], factors)
            untreated.extend(item.pairs())
    return untreated


def _take_native(work: list[Work], has_norms: bool) -> None:
    """Takes steps that have been prepared."""
    spread = [item for item in work if has_norms and item.plan.is_spread]
    # In one call: nothing can fail between two groups.
    if alone := [item.plan.handle for item in work if not (has_norms and item.plan.is_spread)]:
        _ops.take_steps(alone)
    alike: dict[Any, list[tuple[Plan, Tensor]]] = {}
    for plan in (item.plan for item in spread):
        norms2 = torch.empty(len(plan.weights), 2, dtype=torch.float64, device=plan.device)
        torch.ops.fusedstep.plan_direction(plan.handle, norms2)
        alike.setdefault((plan.device, plan.spread_of_sums), []).append((plan, norms2))
    for (device, sums), parts in alike.items():
        own = torch.cat([norms2 for _, norms2 in parts])
        found = total(own, sums).to(device)  # by one collective for all that are spread alike
        for (plan, _), norms2 in zip(parts, found.split([len(n) for _, n in parts]), strict=True):
            torch.ops.fusedstep.plan_apply(plan.handle, norms2)


def _aliasing_grads(work: list[Work]) -> list[tuple[Tensor, Tensor]]:
    """Weights and gradients of native groups whose memory the step will not write: it is shared."""
    native = [item for item in work if item.plan]
    if not native:
        return []
    found = _ops.plans_aliasing_grads([item.plan.handle for item in native])
    places = zip(found[::2], found[1::2], strict=True)
    return [(native[p].weights[i], native[p].grads[i]) for p, i in places]
