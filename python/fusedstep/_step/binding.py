"""The work of a step: groups are bound to native plans, or left to torch operations."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fusedstep._options.kinds import check_floats, has_text
from fusedstep._state.checks import check_storage, check_storage_is_taken
from fusedstep._step.factors import PLAIN, Factors
from fusedstep._step.gradients import with_gradients
from fusedstep._step.options import has_passed, is_fixed, note_passed, option_error
from fusedstep._step.owner import Owner, Place
from fusedstep._step.plan import Bucket, Snapshot, Work
from fusedstep._step.plans import forget_removed
from fusedstep._step.strategy import strategy_of
from fusedstep._step.sums import SpreadWeights


def spread_weights(optimizer: Owner) -> SpreadWeights:
    """The weights that are spread over processes: steps with norms communicate over them."""
    strategy = strategy_of(optimizer)
    exchanging = [strategy.exchanges(optimizer, group) for group in optimizer._groups]
    if optimizer._spread is None or not optimizer._spread.is_of(optimizer._groups, exchanging):
        optimizer._spread = SpreadWeights(optimizer._groups, exchanging)
    return optimizer._spread


def bind_groups(optimizer: Owner, bucket: Bucket | None = None) -> list[Work]:
    """Returns the work of a step; raises any group's error before anything is changed."""
    if optimizer._seen is None or not optimizer._seen.is_of(optimizer._state):
        optimizer._forget_plans()
    strategy = strategy_of(optimizer)
    parts: Iterable[tuple[int, list[Tensor]]]
    parts = enumerate(group["params"] for group in optimizer.param_groups)
    work: list[Work] = []
    places: set[Place] = set()
    numbers: tuple[int, ...] = ()
    if bucket is not None:
        index = next(i for i, group in enumerate(optimizer.param_groups) if group is bucket.group)
        parts, numbers = [(index, bucket.weights)], (bucket.number,)
    for index, params in parts:
        group = optimizer.param_groups[index]
        weights, grads = with_gradients(params)
        if not weights:
            continue
        if not has_passed(optimizer, group):  # options that states depend on
            name = type(optimizer).__name__
            check_storage_is_taken(name, optimizer._storage_not_taken, group)
            check_storage(group)
            if has_text(optimizer._option_kinds, group):
                checked_options(optimizer, Work(group, weights, grads, None, index), PLAIN)
        launches = strategy.launches(optimizer, index, group, weights, grads)
        for part, pair in enumerate(launches):
            places.add(place := (index, part, *numbers))
            work.append(strategy.bind(optimizer, place, group, *pair))
    if bucket is None and (optimizer._seen is None or not optimizer._plans.keys() <= places):
        forget_removed(optimizer)
    if (optimizer._plans or optimizer._memory) and optimizer._seen is None:
        optimizer._seen = Snapshot(optimizer._state)
    return work


def checked_options(optimizer: Owner, item: Work, factors: Factors) -> tuple[float, ...]:
    """Options as a native step takes them; an error before any group has stepped."""
    strategy_of(optimizer).check_options(optimizer, item)
    group, plan, kinds = item.group, item.plan, optimizer._option_kinds
    if not plan and has_passed(optimizer, group) and is_fixed(group):
        return ()
    try:
        if has_text(kinds, group):  # which float() might take
            optimizer._check_kinds(group)
        if not plan:
            if not (group.get("differentiable") or group.get("capturable")):
                # Else autograd and graphs follow them.
                check_floats(kinds, group, optimizer.defaults)
            note_passed(optimizer, group)
            return ()
        lr = plan.set_device_inputs(group["lr"], factors) if plan.is_on_device else None
        options = optimizer._options(group, None if lr is None else 0.0)
        list(map(float, options))
        return options
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise option_error(optimizer, item, error) from error
