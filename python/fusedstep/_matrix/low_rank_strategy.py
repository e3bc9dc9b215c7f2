"""How groups of low-rank gradients are stepped: by plans over scratch memory, or by the formula."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from fusedstep._matrix.low_rank import LowRankOptimizer
from fusedstep._matrix.low_rank_bases import Bases, KnownBases, commit
from fusedstep._matrix.low_rank_program import LowRankProgram, project_early
from fusedstep._matrix.low_rank_states import has_rank
from fusedstep._matrix.products import dtype_of_products
from fusedstep._matrix.projection import basis_shapes, low_shape, matrix_shape, sides_of
from fusedstep._matrix.scratch import Scratch
from fusedstep._sharding.dtensor import is_dtensor, local, spread_of
from fusedstep._state.checks import is_whole, with_name
from fusedstep._state.codes import is_codes
from fusedstep._state.kinds import Group
from fusedstep._state.storage import way_of
from fusedstep._step.factors import Factors
from fusedstep._step.gradients import by_place
from fusedstep._step.kernels import wants_native, why_no_kernels
from fusedstep._step.owner import Owner, Place
from fusedstep._step.plan import Work, same
from fusedstep._step.program import Program
from fusedstep._step.strategy import Strategy


class LowRankSteps(Strategy):
    """Steps groups with a rank through a projection, and all others as the next class does."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch: dict[Tensor, Scratch] = {}
        """By the first weight of a launch."""
        self.known = KnownBases()
        self.fresh: dict[Tensor, dict[str, Tensor]] = {}
        """New bases of the step under way."""

    def is_composite(self, optimizer: Owner, group: Group) -> bool:
        return has_rank(group)

    def exchanges(self, optimizer: Owner, group: Group) -> bool:
        return super().exchanges(optimizer, group) or has_rank(group)

    def products_dtype(self, optimizer: Owner, group: Group, weight: Tensor) -> torch.dtype | None:
        return dtype_of_products(weight) if has_rank(group) else None

    def is_native(
        self, optimizer: Owner, group: Group, weights: list[Tensor], grads: Sequence[Tensor] = ()
    ) -> bool:
        if has_rank(group):
            # Before bases of other sides are made beside them.
            self.check_states(optimizer, group, weights)
            self.takes_scratch(optimizer, group, weights, grads)
        is_native = super().is_native(optimizer, group, weights, grads)
        if grads and has_rank(group):
            _check_values(weights)
        return is_native

    def takes_scratch(
        self, optimizer: Owner, group: Group, weights: list[Tensor], grads: Sequence[Tensor]
    ) -> bool:
        """Returns whether products and a native step do a group with a rank; raises if they must.

        Otherwise the formula does.
        """
        if not wants_native(optimizer, group):
            return False
        reason = why_no_kernels(optimizer, weights, grads)
        if reason and group.get("fused"):
            raise RuntimeError(reason)
        # CPUs multiply float16 so slowly that the formula, which is float32, takes less time.
        is_slow = any(p.is_cpu and p.dtype is torch.float16 for p in weights)
        return reason is None and bool(group.get("fused") or not is_slow)

    def check_states(self, optimizer: Owner, group: Group, weights: list[Tensor]) -> None:
        """Raises if states are no longer those that the options of a group ask for."""
        of = cast("LowRankOptimizer", optimizer)
        of._check_projected(group, weights)
        of._store.check_are_tensors(weights)
        for place, slots in enumerate(of._store.slots_of_each(group, weights)):
            p, state = weights[place], of._state.get(weights[place], {})
            for slot in slots:
                name, shape, spread = slot.name, slot.own_shape, slot.placements
                if shape is None or name not in state:  # it is to be made
                    continue
                found, wide = state[name], torch.float32 if p.itemsize == 2 else p.dtype
                fits = slot.fits(state)
                if not is_codes(found) and found.dtype != wide and shape:
                    raise RuntimeError(
                        f"tensor {place} of the list: the state {name} is {found.dtype} but "
                        f"has to be {wide}"
                    )
                if spread and not (
                    is_dtensor(found) and spread_of(found) == (spread_of(p)[0], spread)
                ):
                    raise RuntimeError(
                        f"{name} of {of._name_of(group, p)} must be a DTensor over the mesh of "
                        f"its weight with the placements {spread}"
                    )
                if not fits or found.device != p.device:
                    raise RuntimeError(
                        f"{name} of {of._name_of(group, p)} is {list(found.shape)} on "
                        f"{found.device}, but the options of its group ask for {list(shape)} on "
                        f"{p.device}. The rank and the sides of a projection cannot be changed, "
                        "nor weights moved, while there are states: make a new optimizer, or load "
                        "a state dictionary that fits"
                    )
                if slot.record and slot.record.is_whole and not is_whole(local(found)):
                    raise RuntimeError(
                        f"tensor {place} of the list: the state {name} must have whole numbers of "
                        f"at least 0, not {local(found).tolist()}"
                    )

    # The step

    def launches(
        self, optimizer: Owner, index: int, group: Group, weights: list[Tensor], grads: list[Tensor]
    ) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
        if not has_rank(group):
            return super().launches(optimizer, index, group, weights, grads)
        return by_place(weights, grads, [(way_of(group, p), p.dtype) for p in weights])

    def bind(
        self,
        optimizer: Owner,
        place: Place,
        group: Group,
        weights: list[Tensor],
        grads: list[Tensor],
    ) -> Work:
        if not has_rank(group):
            return super().bind(optimizer, place, group, weights, grads)
        scratch = self.scratch.get(weights[0])
        if scratch is not None and _has_plan(optimizer, scratch, place, group, weights):
            is_known = self.is_known(optimizer, group, weights, grads)
            if is_known or scratch.kind == _kind(group, weights):
                try:
                    if not is_known:
                        self.has_sparse(optimizer, group, grads)  # raises them
                    self.check_operands(optimizer, group, weights, grads, is_known)
                except RuntimeError as error:
                    raise with_name(error, place[0], group, weights) from None
                work, scratch.has_products = Work(group, weights, grads, None, place[0]), False
                if is_known and scratch.had_no_factor and self.known.waiting is not None:
                    projection = cast("LowRankOptimizer", optimizer)._projection
                    project_early(work, scratch, Bases(projection, optimizer._state, self.known))
                return work
        work = super().bind(optimizer, place, group, weights, grads)
        # A weight has one scratch memory, which has its last bases.
        mine = set(map(id, weights))
        others = self.scratch.items()
        self.scratch = {p: each for p, each in others if mine.isdisjoint(map(id, each.weights))}
        if self.takes_scratch(optimizer, group, weights, grads):
            try:
                scratch = self.scratch[weights[0]] = _new_scratch(optimizer, group, weights)
            except RuntimeError as error:
                raise with_name(error, place[0], group, weights) from None
            optimizer._plans[place], optimizer._seen = scratch.plan, None
        return work

    def program(self, optimizer: Owner, work: list[Work], factors: Factors) -> Program:
        low_rank = [item for item in work if has_rank(item.group)]
        others = [item for item in work if not has_rank(item.group)]
        plain = super().program(optimizer, others, factors)
        projection = cast("LowRankOptimizer", optimizer)._projection
        known = projection, self.known, self.scratch
        program = LowRankProgram(optimizer, low_rank, factors, plain, *known)
        self.fresh = program.bases.fresh
        return program

    def operands_of_formula(
        self, optimizer: Owner, group: Group, weight: Tensor, state: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if has_rank(group):
            commit(self.fresh[weight], optimizer._state[weight])
            state = self.fresh[weight] | state
        return super().operands_of_formula(optimizer, group, weight, state)


def _check_values(weights: list[Tensor]) -> None:
    """Raises for a weight without values: bases, and whether there are any, follow from these."""
    for index, p in enumerate(weights):
        if p.is_meta or isinstance(p, FakeTensor):
            what = "on the meta device" if p.is_meta else "a FakeTensor"
            raise RuntimeError(
                f"tensor {index} of the list: the weight is {what}, and a step of a group with a "
                "rank needs the values of gradients"
            )


def _has_plan(
    optimizer: Owner, scratch: Scratch, place: Place, group: Group, weights: list[Tensor]
) -> bool:
    """Returns whether a group still has the plan over scratch memory of the last step."""
    return (
        optimizer._plans.get(place) is scratch.plan
        and wants_native(optimizer, group)
        and same(weights, scratch.weights)
    )


def _new_scratch(optimizer: Owner, group: Group, weights: list[Tensor]) -> Scratch:
    states = [optimizer._store.with_count(group, p) for p in weights]
    # The shapes are of this process's part; the sides follow from the whole weight.
    sides = [(sides_of(group, p.shape), *matrix_shape(local(p))) for p in weights]
    shapes = [low_shape(group["rank"], *each) for each in sides]
    bases = [basis_shapes(group["rank"], *each) for each in sides]
    scratch = Scratch(weights, states, shapes, bases, _kind(group, weights))
    cast("LowRankOptimizer", optimizer)._projection.begin(scratch, group)
    return scratch


def _kind(group: Group, weights: list[Tensor]) -> tuple[Any, ...]:
    """All that scratch memory is made for."""
    names = ("rank", "proj_type", "proj", "svd", "stagger", "scale_type", "state_dtype")
    options = [group.get(name) for name in names]
    shapes = [(p.shape, p.dtype, p.device) for p in weights]
    return *options, way_of(group, weights[0]), *shapes
