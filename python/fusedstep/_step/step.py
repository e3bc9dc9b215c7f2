"""Takes a step: natively where there is a plan, elsewhere by torch operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._native import ops
from fusedstep._state.checks import with_name
from fusedstep._step.factors import PLAIN, Factors, is_one
from fusedstep._step.plan import Plan, Work
from fusedstep._step.program import AddUp, Pass, Program, Sums, run
from fusedstep._step.sums import NORMS, SpreadWeights


def take(
    rule: str,
    work: list[Work],
    factors: Factors,
    program: Program,
    accessed_states: Callable[[list[Tensor]], list[Tensor]],
    spread: SpreadWeights | None,
    in_phases: bool,
    stepped: list[Tensor],
) -> list[tuple[Tensor, Tensor]]:
    """Steps all groups, or none if an error is raised; but torch operations may stop at one.

    ``stepped`` then has the weights that have been stepped, in front of it as well.

    ``program``: of the work without a plan, when it has been prepared. ``accessed_states`` returns
    the states of weights that autograd may know of. ``spread``: weights with parts in other
    processes, for a step that takes norms or products of whole weights. ``in_phases``: the native
    step of such weights is two phases, with norms in between.

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
    program.check()
    others = [item for item in work if not item.plan]
    others = program.multiplied(others) if others else others
    # Groups without a plan run first if native steps may overwrite gradients, whose memory may be
    # shared, or if weights are sharded: all processes need one order of collectives. Otherwise
    # groups run in order, because two groups may share a weight.
    at_once = uses or len(others) == len(work) or bool(spread and spread.places)
    native = [item.plan for item in work if item.plan]
    norms = [functools.partial(spread.sums, NORMS)] if spread and in_phases else []
    in_order, one_by_one = others and not at_once, iter(others)
    if not in_order:
        _take_native(native, program.run(others) if at_once else [], norms)
    for item in work:
        if item.plan:
            if in_order:
                _take_native([item.plan], [], norms)
                stepped += item.weights
            increment_version(item.weights)
            increment_version(accessed_states(item.weights))
            if item.use:
                increment_version(item.grads)
            elif factors is not PLAIN and not is_one(factors.grad):
                untreated.extend(item.pairs())
        else:
            if in_order:
                _take_native([], program.run([next(one_by_one)]), norms)
            untreated.extend(item.pairs())
    return untreated


def _take_native(native: list[Plan], passes: list[Pass], norms: Sequence[AddUp]) -> None:
    """Takes steps that have been prepared, and passes beside them.

    ``norms``: adds up the norms of weights that are spread over processes, if steps need these.
    """
    spread = [plan for plan in native if norms and plan.is_spread]
    if passes or norms:
        run([*passes, *map(_phases, spread)], norms)
    # In one call: nothing can fail between two groups.
    if alone := [plan.handle for plan in native if plan not in spread]:
        ops.take_steps(alone)


def _phases(plan: Plan) -> Pass:
    """Takes the two phases of a native step of weights that are spread over processes."""
    norms2 = torch.empty(len(plan.weights), 2, dtype=torch.float64, device=plan.device)
    torch.ops.fusedstep.plan_direction(plan.handle, norms2)
    (norms2,) = yield Sums([(plan.weights, norms2)])
    torch.ops.fusedstep.plan_apply(plan.handle, norms2)


def _aliasing_grads(work: list[Work]) -> list[tuple[Tensor, Tensor]]:
    """Weights and gradients of native groups whose memory the step will not write: it is shared."""
    native = [item for item in work if item.plan]
    if not native:
        return []
    found = ops.plans_aliasing_grads([item.plan.handle for item in work if item.plan])
    places = zip(found[::2], found[1::2], strict=True)
    return [(native[p].weights[i], native[p].grads[i]) for p, i in places]
