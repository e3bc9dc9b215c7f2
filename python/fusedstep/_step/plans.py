"""The native plans that an optimizer keeps from step to step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedstep._options.shared import own_option
from fusedstep._state import storage
from fusedstep._state.kinds import Group
from fusedstep._step.kernels import may_be_skipped, wants_native
from fusedstep._step.owner import Owner, Place
from fusedstep._step.plan import Plan, PlansAside, plans_of_nobody, same


def forget_plans(optimizer: Owner) -> None:
    """Lets go of plans, and of all else that follows from operands."""
    optimizer._plans, optimizer._memory = {}, {}
    optimizer._aside = PlansAside()
    optimizer._seen = optimizer._last_step = optimizer._spread = None
    optimizer._group_strategy = optimizer._strategy_class()


def forget_removed(optimizer: Owner) -> None:
    """Lets go of weights that have left the groups and that no state and no engine has."""
    kept = {id(p) for group in optimizer._groups for p in group["params"]}
    optimizer._store.forget_counts(kept)
    if optimizer._spread is not None and not optimizer._spread.is_among(kept):
        optimizer._spread = None
    nobodys = plans_of_nobody([*optimizer._plans.values(), *optimizer._aside], kept)
    for plan in nobodys:
        optimizer._aside.take(plan.weights)
    for place in [place for place, plan in optimizer._plans.items() if plan in nobodys]:
        del optimizer._plans[place]


def states_of(optimizer: Owner, weights: list[Tensor]) -> list[list[Any]]:
    return [[*optimizer._state.get(p, {}).values()] for p in weights]


def forget_changed(optimizer: Owner, weights: list[Tensor], before: list[list[Any]]) -> None:
    """Lets go of plans of weights whose states are others than ``before``.

    A weight may have several plans, for it may be stepped beside other weights.
    """
    both = zip(before, states_of(optimizer, weights), strict=True)
    changed = {id(p) for p, (old, new) in zip(weights, both, strict=True) if not same(old, new)}
    if not changed:
        return
    plans = [plan for plan in optimizer._aside if not changed.isdisjoint(map(id, plan.weights))]
    for plan in plans:
        optimizer._aside.take(plan.weights)
    optimizer._plans = {
        place: plan
        for place, plan in optimizer._plans.items()
        if changed.isdisjoint(map(id, plan.weights))
    }
    optimizer._memory = {
        first: operands
        for first, operands in optimizer._memory.items()
        if operands and changed.isdisjoint(operands.weights)
    }


def plan_at(optimizer: Owner, place: Place, weights: list[Tensor]) -> Plan | None:
    """The plan of these weights, if there is one, in its place.

    That of others, which were there, is put aside: DeepSpeed's ZeRO exchanges the weights of a
    group, or the groups, at each call.
    """
    plan = optimizer._plans.get(place)
    if plan is not None and same(weights, plan.weights):
        return plan
    found = optimizer._aside.take(weights)
    if plan is not None:
        optimizer._aside.put(plan)
        del optimizer._plans[place]
    if found is not None:
        optimizer._plans[place] = found
    return found


def is_of_options(optimizer: Owner, plan: Plan, place: Place, group: Group) -> bool:
    """Returns whether a plan is that of its weights by the present options of their group."""
    return (
        plan.names == optimizer._store.names_of(group, plan.weights[0])
        and plan.seed == storage.seed_of(group, plan.weights[0])
        and _has_places(optimizer, plan, place, group)
        and plan.state_dtype == own_option(group, "state_dtype")
        and wants_native(optimizer, group)
        and not (plan.is_on_device and plan.counts_on_host and may_be_skipped(optimizer))
    )


def _has_places(optimizer: Owner, plan: Plan, place: Place, group: Group) -> bool:
    """Returns whether weights that are rounded at random are where they were in the groups.

    Plans of buckets are forgotten when the groups are edited.
    """
    is_of_bucket = len(place) > 2
    if plan.places is None or is_of_bucket:
        return True
    return plan.places == storage.places_of(optimizer._groups, group, plan.weights)
