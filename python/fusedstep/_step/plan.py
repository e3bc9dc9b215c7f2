"""The native plan of a group of weights, and how long it is good for."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import chain
from operator import is_
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fusedstep._native import ops
from fusedstep._sharding.dtensor import local, local_pairs, spread_of_sums
from fusedstep._step.factors import Factors
from fusedstep._step.support import why_not_readable

#: Plans of one kind.
_Plan = TypeVar("_Plan", bound="Plan")


class GradUse(IntEnum):
    """The use that a native step makes of the memory of gradients that do not alias."""

    LEAVE = 0
    SCALE = 1
    """Multiplies them by the factor that the step takes them with."""
    SCRATCH = 2
    """May leave anything in them."""
    CLEAR = 3


class Plan:
    """Addresses, layouts and chunks of a list of weights; frees the native part when it dies.

    The weights are on one device, and spread over processes alike.
    """

    __slots__ = (
        "_held",
        "counts_on_host",
        "device",
        "had_sparse",
        "handle",
        "is_distributed",
        "names",
        "places",
        "seed",
        "spread_of_sums",
        "state_dtype",
        "takes_norm",
        "weights",
    )

    def __init__(
        self,
        weights: list[Tensor],
        slots: list[Tensor],
        states: list[dict[str, Tensor]],
        names: tuple[str, ...],
        numbers: tuple[str, ...],
        has_masters: bool,
        had_sparse: bool,
        draws: tuple[int, list[int]] | None = None,
        state_dtype: torch.dtype | str | None = None,
        rule: str | None = None,
        takes_norm: bool = True,
    ) -> None:
        """``draws``: the seed and the places by which weights are rounded at random.

        ``state_dtype``: the option of the group that the states are for. ``rule``: that whose
        states they are; without it they have the shapes of the weights. ``takes_norm``: whether the
        norm of gradients is added up in its order.
        """
        self.names = names
        self.state_dtype = state_dtype
        self.takes_norm = takes_norm
        self.seed: int | None = draws[0] if draws else None
        self.places: list[int] | None = draws[1] if draws else None
        self.weights = list(weights)
        self.device = weights[0].device
        self.spread_of_sums = spread_of_sums(weights[0])
        self.is_distributed = self.spread_of_sums is not None
        self.had_sparse = had_sparse  # at the last step: a gradient
        slots = list(map(local, slots))
        steps = [state[name] for name in numbers for state in states]  # the count first
        self.counts_on_host = steps[0].is_cpu
        shards = list(map(local, weights))
        self.handle: int = torch.ops.fusedstep.plan_new(shards, slots, steps, has_masters)
        self._held = ops.hold_plan(self.handle)
        if rule:
            torch.ops.fusedstep.plan_roles(self.handle, ops.rule_index[rule])
        if draws:
            torch.ops.fusedstep.plan_round_at_random(self.handle, *draws)

    @property
    def is_spread(self) -> bool:
        """Returns whether other processes have other parts of the weights."""
        spread = self.spread_of_sums
        return spread is not None and any(each.is_partial() for each in spread[1])

    @property
    def is_on_device(self) -> bool:
        """Returns whether steps run on an accelerator, after the call that asks for them."""
        return self.device.type != "cpu"

    def set_device_inputs(self, lr: float | Tensor, factors: Factors) -> Tensor | None:
        """Says what the next step finds on the device; returns the learning rate if it is there."""
        there = None
        if isinstance(lr, Tensor) and not lr.is_cpu and not self.counts_on_host:
            there = lr.to(self.device, torch.float32)
        factor, found_inf = factors.on_device, factors.found_inf
        if not (there is None and factor is None and found_inf is None):
            torch.ops.fusedstep.plan_device_inputs(
                self.handle,
                there,
                None if factor is None else factor.to(self.device),
                None if found_inf is None else found_inf.to(self.device),
            )
        return there

    def bind(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        sparse: bool,
        look_at_states: bool = True,
    ) -> bool:
        """Checks the operands of a step and notes where they are.

        Returns whether native kernels can update them: not if one has changed its device or layout
        since the plan was made. Gradients may be sparse if `sparse` says so. States need no look if
        nobody has had them since the last call.
        """
        # The direct way gives up at a sparse gradient, which takes it half a millisecond.
        direct = ops.direct()
        if (
            direct
            and not self.had_sparse
            and direct.plan_bind(self.handle, weights, grads, look_at_states)
        ):
            return True
        if self.is_distributed:
            weights, grads = local_pairs(weights, grads)
        grads = list(map(local, grads))
        if why_not_readable((*grads, *weights), "operands"):
            return False
        try:
            if not sparse:
                return torch.ops.fusedstep.plan_bind.default(self.handle, weights, grads)
            bind = torch.ops.fusedstep.plan_bind_sparse.default
            sparse_grads = bind(self.handle, weights, grads)
        except NotImplementedError:  # the dispatcher's
            return False
        self.had_sparse = sparse_grads > 0
        return sparse_grads >= 0


class PlansAside(Generic[_Plan]):
    """Plans of weights that a group had before and may have again, as engines exchange them.

    They are found by their weights. A group of which other weights have a gradient at each step
    would leave any number of them, so the oldest are dropped.
    """

    #: The most weights of all these plans: as many plans where each has one.
    MOST = 4096

    __slots__ = ("_count", "_plans")

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], _Plan] = {}  # oldest first; a plan keeps its weights
        self._count = 0

    def put(self, plan: _Plan) -> None:
        self._plans[tuple(map(id, plan.weights))] = plan
        self._count += len(plan.weights)
        while self._count > self.MOST:
            self.take(next(iter(self._plans.values())).weights)

    def take(self, weights: list[Tensor]) -> _Plan | None:
        """Returns the plan of these weights, and forgets it."""
        plan = self._plans.pop(tuple(map(id, weights)), None)
        if plan is not None:
            self._count -= len(weights)
        return plan

    def __contains__(self, weights: list[Tensor]) -> bool:
        return tuple(map(id, weights)) in self._plans

    def __iter__(self) -> Iterator[_Plan]:
        return iter(self._plans.values())


def plans_of_nobody(plans: list[Plan], kept: set[int]) -> set[Plan]:
    """Returns those plans that fit no group again: only plans hold one of their weights.

    ``kept``: the weights of all groups, by id(). Nothing refers weakly to weights, for torch then
    refuses to exchange their contents.
    """
    owners = Counter(id(p) for plan in plans for p in plan.weights)
    found, held_here = set(), object()
    without_owner = sys.getrefcount(held_here)
    for plan in plans:
        for p in plan.weights:
            if id(p) not in kept and sys.getrefcount(p) == without_owner + owners[id(p)]:
                found.add(plan)
                break
    return found


class Work(NamedTuple):
    """The unit of a step: weights of a group that are updated at one go, and how."""

    group: dict[str, Any]
    weights: list[Tensor]
    grads: list[Tensor]
    plan: Plan | None
    """None where torch operations update them."""
    number: int
    """The number of the group among the optimizer's groups."""
    use: GradUse = GradUse.LEAVE
    options: tuple[Any, ...] = ()
    """The rule's hyper-parameters and, last, whether to maximize."""
    is_queued: bool = False
    """Whether torch operations on a device multiply the gradients by a factor that is there."""

    @property
    def queue(self) -> torch.device | None:
        """The accelerator that the whole step is queued on; None where the host takes part."""
        if self.plan:
            return self.plan.device if self.plan.is_on_device else None
        return self.weights[0].device if self.is_queued else None

    def pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(self.weights, self.grads, strict=True)


class Bucket(NamedTuple):
    """Weights of a group that are stepped together, before or after the others."""

    group: dict[str, Any]
    number: int
    """No other bucket of the group has it."""
    weights: list[Tensor]


class Snapshot:
    """Which tensors an optimizer's state consisted of: a plan is good for these and no others."""

    __slots__ = ("values",)

    def __init__(self, state: dict[Tensor, dict[str, Any]]) -> None:
        self.values = list(_values(state))

    def is_of(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        if ops.bind:
            return ops.bind.is_state(state, self.values)
        return same(list(_values(state)), self.values)


def _values(state: dict[Tensor, dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(tensors.values() for tensors in state.values())


def same(a: list[Any], b: list[Any]) -> bool:
    """Returns whether two lists hold the very same objects; in C, for it runs at every step."""
    if ops.bind:
        return ops.bind.same(a, b)
    return len(a) == len(b) and all(map(is_, a, b))
