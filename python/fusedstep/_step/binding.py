"""The work of a step: groups are bound to native plans, or left to torch operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedstep._options.kinds import has_text
from fusedstep._options.shared import own_option
from fusedstep._sharding.dtensor import is_dtensor, local, local_pairs
from fusedstep._state import storage
from fusedstep._state.checks import (
    CheckedOperands,
    check_apart,
    check_counts,
    check_memory,
    check_operands,
    check_storage_is_taken,
    check_writable,
    with_name,
)
from fusedstep._step.factors import PLAIN
from fusedstep._step.gradients import with_gradients
from fusedstep._step.owner import Owner, Place
from fusedstep._step.plan import Bucket, Plan, PlansAside, Snapshot, Work, plans_of_nobody, same
from fusedstep._step.sums import SpreadWeights
from fusedstep._step.support import why_not_native


def _takes_factor_there(grad: Tensor) -> bool:
    """Returns whether torch multiplies a gradient by a number on its device as by one of the host.

    It would round the number to 16 bits for a gradient of 16 bits.
    """
    shard = local(grad)
    is_dense = type(shard) is Tensor and shard.layout is torch.strided
    return is_dense and shard.is_cuda and shard.dtype in (torch.float32, torch.float64)


def wants_native(optimizer: Owner, group: dict[str, Any]) -> bool:
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


def is_native(
    optimizer: Owner, group: dict[str, Any], weights: list[Tensor], grads: Sequence[Tensor] = ()
) -> bool:
    """Returns whether native kernels update these weights; raises if they must but cannot."""
    for p in weights:
        storage.way_of(group, p)  # raises where the value of none can be kept so
    is_asked, is_composite = own_option(group, "fused"), optimizer._is_composite(group)
    if not optimizer._wants_native(group) or is_composite:
        on_meta = [p for p in weights if p.is_meta]
        if on_meta and is_asked and is_composite:
            raise RuntimeError(why_not_native(on_meta))
        return False
    reason = optimizer._why_not_native(weights, grads)
    if reason and is_asked:
        raise RuntimeError(reason)
    return reason is None


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


def forget_plans(optimizer: Owner) -> None:
    optimizer._plans, optimizer._memory = {}, {}
    optimizer._aside = PlansAside()
    optimizer._seen = optimizer._last_step = optimizer._spread = None


def spread_weights(optimizer: Owner) -> SpreadWeights:
    """The weights that are spread over processes: steps with norms communicate over them."""
    exchanging = list(map(optimizer._exchanges, optimizer._groups))
    if optimizer._spread is None or not optimizer._spread.is_of(optimizer._groups, exchanging):
        optimizer._spread = SpreadWeights(optimizer._groups, exchanging)
    return optimizer._spread


def _new_plan(
    optimizer: Owner, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
) -> Plan | None:
    """The native plan of a group's weights; None where the imperative twin updates them."""
    sparse = optimizer._has_sparse(group, grads)
    optimizer._store.check_are_tensors(weights)
    native, store = optimizer._is_native(group, weights, grads), optimizer._store
    if not native and not optimizer._is_composite(group):
        optimizer._rehearse(group, weights, grads)  # before a state begins at such an option
    has_plans = optimizer._plans or optimizer._memory or [*optimizer._aside]
    before = _states_of(optimizer, weights) if has_plans else None
    store.create(group, weights, native, optimizer._groups)
    states = store.operands(group, weights)
    if native:
        store.count_together(weights, states, optimizer._may_be_skipped())
    if before is not None:
        _forget_changed(optimizer, weights, before)
    if not native:
        return None
    names, way = store.names_of(group, weights[0]), storage.way_of(group, weights[0])
    slots, has_beside = optimizer._slots(group, weights, states), way in storage.BESIDE
    seed, draws = storage.seed_of(group, weights[0]), None
    if seed is not None:
        draws = seed, storage.places_of(optimizer._groups, group, weights)
    return Plan(
        weights,
        slots,
        states,
        names=names,
        numbers=store.numbers,
        has_masters=has_beside,
        had_sparse=sparse,
        draws=draws,
        state_dtype=own_option(group, "state_dtype"),
        rule=optimizer._rule,
        takes_norm=optimizer._plan_takes_norm,
    )


def _states_of(optimizer: Owner, weights: list[Tensor]) -> list[list[Any]]:
    return [[*optimizer._state.get(p, {}).values()] for p in weights]


def _forget_changed(optimizer: Owner, weights: list[Tensor], before: list[list[Any]]) -> None:
    """Lets go of plans of weights whose states are others than ``before``.

    A weight may have several plans, for it may be stepped beside other weights.
    """
    both = zip(before, _states_of(optimizer, weights), strict=True)
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


def has_sparse(optimizer: Owner, group: dict[str, Any], grads: list[Tensor]) -> bool:
    """Returns whether gradients are sparse; raises them if the class takes none."""
    sparse = any(grad.layout is not torch.strided for grad in grads)
    if sparse and (error := optimizer._sparse_error(group)):
        if any(grad.is_nested for grad in grads):
            error = f"{type(optimizer).__name__} does not support nested tensors as gradients"
        raise RuntimeError(error)
    return sparse


def may_be_skipped(optimizer: Owner) -> bool:
    """Returns whether a number on a device may tell if a step is skipped."""
    found_inf = getattr(optimizer, "found_inf", None)
    return (found_inf is not None and not found_inf.is_cpu) or optimizer._skips_nonfinite()


def bind_groups(optimizer: Owner, bucket: Bucket | None = None) -> list[Work]:
    """Returns the work of a step; raises any group's error before anything is changed."""
    if optimizer._seen is None or not optimizer._seen.is_of(optimizer._state):
        optimizer._forget_plans()
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
        if not optimizer._has_passed(group):  # options that states depend on
            name = type(optimizer).__name__
            check_storage_is_taken(name, optimizer._storage_not_taken, group)
            if has_text(optimizer._option_kinds, group):
                optimizer._checked_options(Work(group, weights, grads, None, index), PLAIN)
        launches = optimizer._launches(index, group, weights, grads)
        for part, pair in enumerate(launches):
            places.add(place := (index, part, *numbers))
            work.append(optimizer._bind(place, group, *pair))
    if bucket is None and (optimizer._seen is None or not optimizer._plans.keys() <= places):
        forget_removed(optimizer)
    if (optimizer._plans or optimizer._memory) and optimizer._seen is None:
        optimizer._seen = Snapshot(optimizer._state)
    return work


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


def bind(
    optimizer: Owner,
    place: Place,
    group: dict[str, Any],
    weights: list[Tensor],
    grads: list[Tensor],
) -> Work:
    try:
        plan, sparse = (
            _plan_at(optimizer, place, group, weights),
            optimizer._sparse_error(group) is None,
        )
        if not plan and optimizer._is_known(group, weights, grads):
            optimizer._check_composite(group, weights, grads, is_known=True)
        elif not (
            plan
            and plan.names == optimizer._store.names_of(group, weights[0])
            and plan.seed == storage.seed_of(group, weights[0])
            and _has_places(optimizer, plan, place, group)
            and plan.state_dtype == own_option(group, "state_dtype")
            and optimizer._wants_native(group)
            and not (plan.is_on_device and plan.counts_on_host and optimizer._may_be_skipped())
            and plan.bind(weights, grads, sparse, optimizer._store.was_read)
        ):
            optimizer._plans.pop(place, None)
            plan = _new_plan(optimizer, group, weights, grads)
            if plan:
                plan.bind(weights, grads, sparse)
                optimizer._plans[place], optimizer._seen = plan, None
            else:
                optimizer._check_composite(group, weights, grads)
    except RuntimeError as error:
        raise with_name(error, place[0], group, weights) from None
    is_queued = not plan and optimizer._queues_factors and optimizer._is_composite(group)
    return Work(
        group,
        weights,
        grads,
        plan,
        place[0],
        is_queued=is_queued and all(map(_takes_factor_there, grads)),
    )


def _has_places(optimizer: Owner, plan: Plan, place: Place, group: dict[str, Any]) -> bool:
    """Returns whether weights that are rounded at random are where they were in the groups.

    Plans of buckets are forgotten when the groups are edited.
    """
    is_of_bucket = len(place) > 2
    if plan.places is None or is_of_bucket:
        return True
    return plan.places == storage.places_of(optimizer._groups, group, plan.weights)


def _plan_at(
    optimizer: Owner, place: Place, group: dict[str, Any], weights: list[Tensor]
) -> Plan | None:
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


def check_composite(
    optimizer: Owner,
    group: dict[str, Any],
    weights: list[Tensor],
    grads: list[Tensor],
    is_known: bool = False,
) -> None:
    """Raises what torch's operations would stop at half way, or not notice.

    ``is_known``: whether ``_is_known`` says so.
    """
    if not is_known:
        check_operands(weights, grads)
    made_elsewhere = any(map(Tensor.is_inference, weights))
    if made_elsewhere and not optimizer._writes_natively(group, weights, grads):
        check_writable(weights)
    if optimizer._is_composite(group):
        optimizer._rehearse(group, weights, grads)
        if is_dtensor(weights[0]):
            local_pairs(weights, grads)  # raises for gradients that are spread otherwise
        operands = optimizer._memory.get(weights[0])
        if not (is_known and operands):
            states = [optimizer._state.get(p, {}) for p in weights]
            check_memory(weights, grads, states)
            if optimizer._wants_native(group):
                check_apart(weights, states)
            operands = CheckedOperands(weights, grads, states)
        check_counts(operands.counts)
        if not is_known:
            optimizer._check_states(group, weights)
            is_told = operands.are_told_by_addresses
            optimizer._memory[weights[0]] = operands if is_told else None
            optimizer._seen = None  # for states have been made
    else:
        optimizer._store.check(group, weights, any_dtype=True)
        check_counts(optimizer._state.get(p, {}).get("step") for p in weights)


def is_known(
    optimizer: Owner, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
) -> bool:
    """Returns whether a composite's operands, states and options have been checked.

    Learning rates and other floats may have changed since.
    """
    if not (optimizer._is_composite(group) and optimizer._has_passed(group)):
        return False
    operands = optimizer._memory.get(weights[0])
    return operands is not None and operands.are(weights, grads)
