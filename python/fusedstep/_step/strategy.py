"""How an optimizer steps its groups, beyond a native rule and a formula."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

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
from fusedstep._state.kinds import Group
from fusedstep._step.factors import Factors
from fusedstep._step.gradients import by_place
from fusedstep._step.kernels import may_be_skipped, wants_native, why_no_kernels
from fusedstep._step.options import has_passed, option_error
from fusedstep._step.owner import Owner, Place
from fusedstep._step.plan import Plan, Work, same
from fusedstep._step.plans import forget_changed, is_of_options, plan_at, states_of
from fusedstep._step.program import Program
from fusedstep._step.support import why_not_native


class Strategy:
    """Steps groups by native plans or, weight by weight, by the formula of the optimizer.

    A family of optimizers that steps groups otherwise has a subclass. An optimizer has an instance
    of its own, and gets a new one when plans are forgotten: what an instance keeps from step to
    step follows from operands. The optimizer is an argument of each method: an instance that held
    it would keep it alive.
    """

    #: False if the formulas of the family are for real weights alone.
    takes_complex: ClassVar[bool] = True

    # Which steps a group takes

    def is_composite(self, optimizer: Owner, group: Group) -> bool:
        """Returns whether a group has no plan of its weights, and is stepped by the program."""
        return False

    def exchanges(self, optimizer: Owner, group: Group) -> bool:
        """Returns whether steps of a group add up numbers of its weights over the processes."""
        return not optimizer._elementwise

    def sparse_error(self, optimizer: Owner, group: Group) -> str | None:
        """Text of the error for a sparse gradient; None where only its rows are updated."""
        for name in optimizer._zero_with_sparse:
            if group[name] != 0:
                return f"{name} option is not compatible with sparse gradients"
        text = optimizer._against_sparse
        return None if text is None else text.format(name=type(optimizer).__name__)

    def is_native(
        self, optimizer: Owner, group: Group, weights: list[Tensor], grads: Sequence[Tensor] = ()
    ) -> bool:
        """Returns whether a native plan updates these weights; raises if one must but cannot."""
        for p in weights:
            storage.way_of(group, p)  # raises where the value of none can be kept so
        is_asked = own_option(group, "fused")
        is_composite = self.is_composite(optimizer, group)
        if not wants_native(optimizer, group) or is_composite:
            on_meta = [p for p in weights if p.is_meta]
            if on_meta and is_asked and is_composite:
                raise RuntimeError(why_not_native(on_meta))
            return False
        reason = why_no_kernels(optimizer, weights, grads)
        if reason and is_asked:
            raise RuntimeError(reason)
        return reason is None

    def launches(
        self, optimizer: Owner, index: int, group: Group, weights: list[Tensor], grads: list[Tensor]
    ) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
        """The weights and gradients of a group, those together that are updated at one go."""
        whole = optimizer._plans.get((index, 0))
        if (whole and same(weights, whole.weights)) or weights in optimizer._aside:
            return [(weights, grads)]
        return by_place(weights, grads, [storage.way_of(group, p) for p in weights])

    # Work, bound before anything is changed

    def bind(
        self,
        optimizer: Owner,
        place: Place,
        group: Group,
        weights: list[Tensor],
        grads: list[Tensor],
    ) -> Work:
        """Returns the work of a launch, with its plan if there is one; raises what is wrong."""
        try:
            plan = plan_at(optimizer, place, weights)
            sparse = self.sparse_error(optimizer, group) is None
            if not plan and self.is_known(optimizer, group, weights, grads):
                self.check_operands(optimizer, group, weights, grads, is_known=True)
            elif not (
                plan
                and is_of_options(optimizer, plan, place, group)
                and plan.bind(weights, grads, sparse, optimizer._store.was_read)
            ):
                optimizer._plans.pop(place, None)
                plan = self._new_plan(optimizer, group, weights, grads)
                if plan:
                    plan.bind(weights, grads, sparse)
                    optimizer._plans[place], optimizer._seen = plan, None
                else:
                    self.check_operands(optimizer, group, weights, grads)
        except RuntimeError as error:
            raise with_name(error, place[0], group, weights) from None
        is_queued = (
            not plan and optimizer._queues_factors and self.is_composite(optimizer, group)
        ) and all(map(_takes_factor_there, grads))
        return Work(group, weights, grads, plan, place[0], is_queued=is_queued)

    def _new_plan(
        self, optimizer: Owner, group: Group, weights: list[Tensor], grads: list[Tensor]
    ) -> Plan | None:
        """The native plan of a group's weights; None where torch operations update them."""
        sparse = self.has_sparse(optimizer, group, grads)
        optimizer._store.check_are_tensors(weights)
        native, store = self.is_native(optimizer, group, weights, grads), optimizer._store
        if not native and not self.is_composite(optimizer, group):
            optimizer._rehearse(group, weights, grads)  # before a state begins at such an option
        has_plans = optimizer._plans or optimizer._memory or [*optimizer._aside]
        before = states_of(optimizer, weights) if has_plans else None
        store.create(group, weights, native, optimizer._groups)
        states = store.operands(group, weights)
        if native:
            store.count_together(weights, states, may_be_skipped(optimizer))
        if before is not None:
            forget_changed(optimizer, weights, before)
        if not native:
            return None
        names, way = store.names_of(group, weights[0]), storage.way_of(group, weights[0])
        slots, has_beside = self.slots(optimizer, group, weights, states), way in storage.BESIDE
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

    def check_own(self, group: Group) -> None:
        """Raises an option that only this family has, if no step can take it."""

    def check_options(self, optimizer: Owner, item: Work) -> None:
        """The same, with the number of the group in the error."""
        try:
            self.check_own(item.group)
        except (TypeError, ValueError) as error:
            raise option_error(optimizer, item, error) from error

    def check_states(self, optimizer: Owner, group: Group, weights: list[Tensor]) -> None:
        """Raises if a state of a composite group's weights is not as the step needs it."""
        optimizer._store.check(group, weights)

    def check_operands(
        self,
        optimizer: Owner,
        group: Group,
        weights: list[Tensor],
        grads: list[Tensor],
        is_known: bool = False,
    ) -> None:
        """Raises what a step without a plan would stop at half way, or not notice.

        ``is_known``: whether ``is_known()`` says so.
        """
        if not is_known:
            check_operands(weights, grads)
        made_elsewhere = any(map(Tensor.is_inference, weights))
        if made_elsewhere and not self.writes_natively(optimizer, group, weights, grads):
            check_writable(weights)
        if not self.is_composite(optimizer, group):
            optimizer._store.check(group, weights, any_dtype=True)
            check_counts(optimizer._state.get(p, {}).get("step") for p in weights)
            return
        if not (is_known or self.takes_complex):
            _check_real(optimizer, weights)
        optimizer._rehearse(group, weights, grads)
        if is_dtensor(weights[0]):
            local_pairs(weights, grads)  # raises for gradients that are spread otherwise
        operands = optimizer._memory.get(weights[0])
        if not (is_known and operands):
            states = [optimizer._state.get(p, {}) for p in weights]
            check_memory(weights, grads, states)
            if wants_native(optimizer, group):
                check_apart(weights, states)
            operands = CheckedOperands(weights, grads, states)
        check_counts(operands.counts)
        if not is_known:
            self.check_states(optimizer, group, weights)
            is_told = operands.are_told_by_addresses
            optimizer._memory[weights[0]] = operands if is_told else None
            optimizer._seen = None  # for states have been made

    def is_known(
        self, optimizer: Owner, group: Group, weights: list[Tensor], grads: list[Tensor]
    ) -> bool:
        """Returns whether a composite's operands, states and options have been checked.

        Learning rates and other floats may have changed since.
        """
        if not (self.is_composite(optimizer, group) and has_passed(optimizer, group)):
            return False
        operands = optimizer._memory.get(weights[0])
        return operands is not None and operands.are(weights, grads)

    def has_sparse(self, optimizer: Owner, group: Group, grads: list[Tensor]) -> bool:
        """Returns whether gradients are sparse; raises them if the class takes none."""
        sparse = any(grad.layout is not torch.strided for grad in grads)
        if sparse and (error := self.sparse_error(optimizer, group)):
            if any(grad.is_nested for grad in grads):
                error = f"{type(optimizer).__name__} does not support nested tensors as gradients"
            raise RuntimeError(error)
        return sparse

    def writes_natively(
        self, optimizer: Owner, group: Group, weights: list[Tensor], grads: list[Tensor]
    ) -> bool:
        """Returns whether a native operation changes weights that have no plan."""
        return False

    # The step

    def slots(
        self, optimizer: Owner, group: Group, weights: list[Tensor], states: list[dict[str, Tensor]]
    ) -> list[Tensor]:
        """The states of a group's weights as the native rule has them, slot by slot."""
        names = optimizer._store.names_of(group, weights[0])
        return optimizer._store.slots(names, weights, states)

    def program(self, optimizer: Owner, work: list[Work], factors: Factors) -> Program:
        """What a step does with work that has no plan."""
        return Program(optimizer, work, factors)

    def operands_of_formula(
        self, optimizer: Owner, group: Group, weight: Tensor, state: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The options and the state by which the formula steps a weight.

        States may be written by this: the step puts them back if memory runs out.
        """
        return group, state

    def written_early(
        self, optimizer: Owner, group: Group, weight: Tensor, kept: dict[str, Tensor]
    ) -> list[Tensor] | None:
        """What the formula's step of a weight may have written before its last allocation.

        None where the class says that: ``_allocates_first``.
        """
        return None

    # The precision of a step

    def products_dtype(self, optimizer: Owner, group: Group, weight: Tensor) -> torch.dtype | None:
        """The precision of the matrix products that a weight moves by; None for other weights."""
        return None

    def exact_options(self, optimizer: Owner, group: Group) -> dict[str, Any]:
        """Options with which float64 copies of a group's weights take the same step, exactly."""
        return {}


def _check_real(optimizer: Owner, weights: list[Tensor]) -> None:
    """Raises for a complex weight that has come into a composite's group since it was made."""
    for index, p in enumerate(weights):
        if p.is_complex():
            what = f"{type(optimizer).__name__} does not support complex parameters"
            raise RuntimeError(f"tensor {index} of the list: the weight is complex, and {what}")


def _takes_factor_there(grad: Tensor) -> bool:
    """Returns whether torch multiplies a gradient by a number on its device as by one of the host.

    It would round the number to 16 bits for a gradient of 16 bits.
    """
    shard = local(grad)
    is_dense = type(shard) is Tensor and shard.layout is torch.strided
    return is_dense and shard.is_cuda and shard.dtype in (torch.float32, torch.float64)


def strategy_of(optimizer: Owner) -> Strategy:
    return cast("Strategy", optimizer._group_strategy)
