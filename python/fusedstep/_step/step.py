"""Takes a step: natively where there is a plan, elsewhere by torch operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._native import ops
from fusedstep._state.checks import with_name
from fusedstep._step.factors import PLAIN, Factors, is_one
from fusedstep._step.plan import Plan, Work
from fusedstep._step.sums import SpreadWeights


def take(
    rule: str,
    work: list[Work],
    factors: Factors,
    check_ready: Callable[[], None],
    with_factor: Callable[[list[Work], Factors], list[Work]],
    by_torch: Callable[[list[Work]], None],
    accessed_states: Callable[[list[Tensor]], list[Tensor]],
    spread: SpreadWeights | None,
    in_phases: bool,
    stepped: list[Tensor],
) -> list[tuple[Tensor, Tensor]]:
    """Steps all groups, or none if an error is raised; but torch operations may stop at one.

    ``stepped`` then has the weights that have been stepped, in front of it as well.

    ``check_ready`` may raise: it is asked when native steps have been prepared, before the first
    change. ``with_factor`` multiplies the gradients of work without a plan, and ``by_torch`` steps
    it. ``accessed_states`` returns the states of
    weights that autograd may know of. ``spread``: weights with parts in other processes, for a step
    that takes norms or products of whole weights. ``in_phases``: the native step of such weights is
    two phases, with norms in between.

    Returns the weights and gradients of which no step has scaled or zeroed the gradient.
    """
    uses = any(item.use for item in work)
    untreated = _aliasing_grads(work) if uses else []
    factor = 1.0 if factors is PLAIN else factors.on_host
    for item in work:
        if not item.plan:
            continue
        try:
            ops.prepare_step(rule, item.plan.handle, item.options, factor, item.use)
        except RuntimeError as error:
            raise with_name(error, item.number, item.group, item.weights) from None
    check_ready()
    others = [item for item in work if not item.plan]
    others = with_factor(others, factors) if others else others
    # Groups without a plan run first if native steps may overwrite gradients, whose memory may be
    # shared, or if weights are sharded: all processes need one order of collectives. Otherwise
    # groups run in order, because two groups may share a weight.
    at_once = uses or len(others) == len(work) or bool(spread and spread.rows)
    if at_once:
        by_torch(others)
    native = [item.plan for item in work if item.plan]
    spread = spread if in_phases else None
    in_order = others and not at_once
    one_by_one = iter(others)
    if not in_order:
        _take_native(native, spread)
    for item in work:
        if item.plan:
            if in_order:
                _take_native([item.plan], spread)
                stepped += item.weights
            increment_version(item.weights)
            increment_version(accessed_states(item.weights))
            if item.use:
                increment_version(item.grads)
            elif factors is not PLAIN and not is_one(factors.grad):
                untreated.extend(item.pairs())
        else:
            if not at_once:
                by_torch([next(one_by_one)])
            untreated.extend(item.pairs())
    return untreated


def _take_native(native: list[Plan], spread: SpreadWeights | None) -> None:
    """Takes steps that have been prepared."""
    is_spread = [spread is not None and plan.is_spread for plan in native]
    # In one call: nothing can fail between two groups.
    if alone := [plan.handle for plan, each in zip(native, is_spread, strict=True) if not each]:
        ops.take_steps(alone)
    if spread is None:
        return
    plans: dict[Any, list[Plan]] = {}
    for plan, each in zip(native, is_spread, strict=True):
        if each:
            plans.setdefault((plan.device, plan.spread_of_sums), []).append(plan)
    # All of them, though this process may have no gradient there.
    for place in dict.fromkeys((*spread.places(native=True), *plans)):
        parts = []
        for plan in plans.get(place, []):
            norms2 = _no_norms2(len(plan.weights), plan.device)
            torch.ops.fusedstep.plan_direction(plan.handle, norms2)
            parts.append((plan.weights, norms2))
        # One collective for all weights that are spread alike.
        found = spread.sums(place, parts or [([], _no_norms2(0, place[0]))])
        for plan, norms2 in zip(plans.get(place, []), found[: len(parts)], strict=True):
            torch.ops.fusedstep.plan_apply(plan.handle, norms2)


def _no_norms2(weights: int, device: torch.device) -> Tensor:
    """Room for the squared norms of so many weights, and of their updates."""
    return torch.empty(weights, 2, dtype=torch.float64, device=device)


def _aliasing_grads(work: list[Work]) -> list[tuple[Tensor, Tensor]]:
    """Weights and gradients of native groups whose memory the step will not write: it is shared."""
    native = [item for item in work if item.plan]
    if not native:
        return []
    found = ops.plans_aliasing_grads([item.plan.handle for item in work if item.plan])
    places = zip(found[::2], found[1::2], strict=True)
    return [(native[p].weights[i], native[p].grads[i]) for p, i in places]
