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
    check_writable,
    with_name,
)
from fusedstep._step.factors import PLAIN
from fusedstep._step.gradients import with_gradients
from fusedstep._step.owner import Owner, StepRecord
from fusedstep._step.plan import Bucket, Plan, PlansAside, Snapshot, Work, plans_of_nobody, same
from fusedstep._step.sums import SpreadWeights
from fusedstep._step.support import why_not_native

#: The index of a group, that of a launch among those that update it, and of a bucket if it is one.
_Place = tuple[int, ...]


def _takes_factor_there(grad: Tensor) -> bool:
    """Returns whether torch multiplies a gradient by a number on its device as by one of the host.

    It would round the number to 16 bits for a gradient of 16 bits.
    """
    shard = local(grad)
    is_dense = type(shard) is Tensor and shard.layout is torch.strided
    return is_dense and shard.is_cuda and shard.dtype in (torch.float32, torch.float64)


class BindsGroups(Owner):
    """Chooses native or imperative code for groups, and keeps the plans of those with native."""

    def _wants_native(self, group: dict[str, Any]) -> bool:
        """Returns whether the options of a group ask for native kernels, or allow them."""
        foreach = self._foreach_means_unfused and group.get("foreach")
        fused, differentiable = own_option(group, "fused"), group.get("differentiable", False)
        if differentiable and isinstance(own_option(group, "state_dtype"), str):
            raise RuntimeError(
                "quantised states, by `state_dtype`, do not support `differentiable`"
            )
        if differentiable:
            storage.refuse_differentiable(group)
        if fused:
            if differentiable:
                raise RuntimeError("`fused` does not support `differentiable`")
            if foreach:
                raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
            return True
        return fused is None and not (foreach or differentiable)

    def _is_native(
        self, group: dict[str, Any], weights: list[Tensor], grads: Sequence[Tensor] = ()
    ) -> bool:
        """Returns whether native kernels update these weights; raises if they must but cannot."""
        for p in weights:
            storage.way_of(group, p)  # raises where the value of none can be kept so
        is_asked, is_composite = own_option(group, "fused"), self._is_composite(group)
        if not self._wants_native(group) or is_composite:
            on_meta = [p for p in weights if p.is_meta]
            if on_meta and is_asked and is_composite:
                raise RuntimeError(why_not_native(on_meta))
            return False
        reason = self._why_not_native(weights, grads)
        if reason and is_asked:
            raise RuntimeError(reason)
        return reason is None

    def _why_not_native(self, weights: list[Tensor], grads: Iterable[Tensor] = ()) -> str | None:
        devices = self._native_devices
        for weight in weights:
            if devices is not None and weight.device.type not in devices:
                return f"{type(self).__name__} has no native kernels on {weight.device.type}"
        states = self._accessed_states(weights)
        needs_whole = not self._steps_shards_natively
        return why_not_native(weights, grads, states, needs_whole=needs_whole)

    def _forget_plans(self) -> None:
        self._plans: dict[_Place, Plan] = {}
        self._aside: PlansAside[Plan] = PlansAside()
        # Of composites, by the first weight.
        self._memory: dict[Tensor, CheckedOperands | None] = {}
        self._seen: Snapshot | None = None  # of the state that the plans were made for
        self._last_step: StepRecord | None = None
        self._spread: SpreadWeights | None = None

    def _spread_weights(self) -> SpreadWeights:
        """The weights that are spread over processes: steps with norms communicate over them."""
        exchanging = list(map(self._exchanges, self._groups))
        if self._spread is None or not self._spread.is_of(self._groups, exchanging):
            self._spread = SpreadWeights(self._groups, exchanging)
        return self._spread

    def _exchanges(self, group: dict[str, Any]) -> bool:
        """Returns whether steps of a group add up numbers of its weights over the processes."""
        return not self._elementwise

    def _new_plan(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> Plan | None:
        """The native plan of a group's weights; None where the imperative twin updates them."""
        sparse = self._has_sparse(group, grads)
        native, store = self._is_native(group, weights, grads), self._store
        if not native and not self._is_composite(group):
            self._rehearse(group, weights, grads)  # before a state begins at such an option
        store.create(group, weights, native, self._groups)
        states = store.operands(group, weights)
        if not native:
            return None
        store.count_together(weights, states, self._may_be_skipped())
        names, way = store.names_of(group, weights[0]), storage.way_of(group, weights[0])
        slots, has_beside = self._slots(group, weights, states), way in storage.BESIDE
        seed, draws = storage.seed_of(group, weights[0]), None
        if seed is not None:
            draws = seed, storage.places_of(self._groups, group, weights)
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
            rule=self._rule,
            takes_norm=self._plan_takes_norm,
        )

    def _has_sparse(self, group: dict[str, Any], grads: list[Tensor]) -> bool:
        """Returns whether gradients are sparse; raises them if the class takes none."""
        sparse = any(grad.layout is not torch.strided for grad in grads)
        if sparse and (error := self._sparse_error(group)):
            if any(grad.is_nested for grad in grads):
                error = f"{type(self).__name__} does not support nested tensors as gradients"
            raise RuntimeError(error)
        return sparse

    def _slots(
        self, group: dict[str, Any], weights: list[Tensor], states: list[dict[str, Tensor]]
    ) -> list[Tensor]:
        """The states of a group's weights as the native rule has them, slot by slot."""
        return self._store.slots(self._store.names_of(group, weights[0]), weights, states)

    def _may_be_skipped(self) -> bool:
        """Returns whether a number on a device may tell if a step is skipped."""
        found_inf = getattr(self, "found_inf", None)
        return (found_inf is not None and not found_inf.is_cpu) or self._skips_nonfinite()

    # The operands of a step

    def _bind_groups(self, bucket: Bucket | None = None) -> list[Work]:
        """Returns the work of a step; raises any group's error before anything is changed."""
        if self._seen is None or not self._seen.is_of(self._state):
            self._forget_plans()
        parts: Iterable[tuple[int, list[Tensor]]]
        parts = enumerate(group["params"] for group in self.param_groups)
        work: list[Work] = []
        places: set[_Place] = set()
        numbers: tuple[int, ...] = ()
        if bucket is not None:
            index = next(i for i, group in enumerate(self.param_groups) if group is bucket.group)
            parts, numbers = [(index, bucket.weights)], (bucket.number,)
        for index, params in parts:
            group = self.param_groups[index]
            weights, grads = with_gradients(params)
            if not weights:
                continue
            if not self._has_passed(group) and has_text(
                self._option_kinds, group
            ):  # what states depend on, perhaps
                self._checked_options(Work(group, weights, grads, None, index), PLAIN)
            launches = self._launches(index, group, weights, grads)
            for part, pair in enumerate(launches):
                places.add(place := (index, part, *numbers))
                work.append(self._bind(place, group, *pair))
        if bucket is None and (self._seen is None or not self._plans.keys() <= places):
            self._forget_removed()
        if (self._plans or self._memory) and self._seen is None:
            self._seen = Snapshot(self._state)
        return work

    def _forget_removed(self) -> None:
        """Lets go of weights that have left the groups and that no state and no engine has."""
        kept = {id(p) for group in self._groups for p in group["params"]}
        self._store.forget_counts(kept)
        if self._spread is not None and not self._spread.is_among(kept):
            self._spread = None
        nobodys = plans_of_nobody([*self._plans.values(), *self._aside], kept)
        for plan in nobodys:
            self._aside.take(plan.weights)
        for place in [place for place, plan in self._plans.items() if plan in nobodys]:
            del self._plans[place]

    def _bind(
        self, place: _Place, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> Work:
        try:
            plan, sparse = self._plan_at(place, group, weights), self._sparse_error(group) is None
            if not plan and self._is_known(group, weights, grads):
                self._check_composite(group, weights, grads, is_known=True)
            elif not (
                plan
                and plan.names == self._store.names_of(group, weights[0])
                and plan.seed == storage.seed_of(group, weights[0])
                and self._has_places(plan, place, group)
                and plan.state_dtype == own_option(group, "state_dtype")
                and self._wants_native(group)
                and not (plan.is_on_device and plan.counts_on_host and self._may_be_skipped())
                and plan.bind(weights, grads, sparse, self._store.was_read)
            ):
                self._plans.pop(place, None)
                plan = self._new_plan(group, weights, grads)
                if plan:
                    plan.bind(weights, grads, sparse)
                    self._plans[place], self._seen = plan, None
                else:
                    self._check_composite(group, weights, grads)
        except RuntimeError as error:
            raise with_name(error, place[0], group, weights) from None
        is_queued = not plan and self._queues_factors and self._is_composite(group)
        return Work(
            group,
            weights,
            grads,
            plan,
            place[0],
            is_queued=is_queued and all(map(_takes_factor_there, grads)),
        )

    def _has_places(self, plan: Plan, place: _Place, group: dict[str, Any]) -> bool:
        """Returns whether weights that are rounded at random are where they were in the groups.

        Plans of buckets are forgotten when the groups are edited.
        """
        is_of_bucket = len(place) > 2
        if plan.places is None or is_of_bucket:
            return True
        return plan.places == storage.places_of(self._groups, group, plan.weights)

    def _plan_at(self, place: _Place, group: dict[str, Any], weights: list[Tensor]) -> Plan | None:
        """The plan of these weights, if there is one, in its place.

        That of others, which were there, is put aside: DeepSpeed's ZeRO exchanges the weights of a
        group, or the groups, at each call.
        """
        plan = self._plans.get(place)
        if plan is not None and same(weights, plan.weights):
            return plan
        found = self._aside.take(weights)
        if plan is not None:
            self._aside.put(plan)
            del self._plans[place]
        if found is not None:
            self._plans[place] = found
        return found

    def _check_composite(
        self,
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
        if made_elsewhere and not self._writes_natively(group, weights, grads):
            check_writable(weights)
        if self._is_composite(group):
            self._rehearse(group, weights, grads)
            if is_dtensor(weights[0]):
                local_pairs(weights, grads)  # raises for gradients that are spread otherwise
            operands = self._memory.get(weights[0])
            if not (is_known and operands):
                states = [self._state.get(p, {}) for p in weights]
                check_memory(weights, grads, states)
                if self._wants_native(group):
                    check_apart(weights, states)
                operands = CheckedOperands(weights, grads, states)
            check_counts(operands.counts)
            if not is_known:
                self._check_states(group, weights)
                is_told = operands.are_told_by_addresses
                self._memory[weights[0]] = operands if is_told else None
                self._seen = None  # for states have been made
        else:
            self._store.check(group, weights, any_dtype=True)

    def _writes_natively(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> bool:
        """Returns whether a native operation changes weights that have no plan."""
        return False

    def _is_known(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> bool:
        """Returns whether a composite's operands, states and options have been checked.

        Learning rates and other floats may have changed since.
        """
        if not (self._is_composite(group) and self._has_passed(group)):
            return False
        operands = self._memory.get(weights[0])
        return operands is not None and operands.are(weights, grads)
