"""Optimizers of low-rank gradients: the class that GaLore and APOLLO share.

Groups with a ``rank`` are projected; all others are AdamW in the same step, by a native plan. The
formula of both is that of ``_matrix/transformers_adamw.py``. ``_matrix/low_rank_program.py`` steps
the groups with a rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from fusedstep._matrix.low_rank_bases import Bases, KnownBases, Projection, commit
from fusedstep._matrix.low_rank_program import LowRankProgram, project_early
from fusedstep._matrix.low_rank_states import has_rank
from fusedstep._matrix.products import dtype_of_products
from fusedstep._matrix.projection import (
    basis_shapes,
    check_whole_number,
    low_shape,
    matrix_shape,
    sides_of,
    why_not_projected,
)
from fusedstep._matrix.scratch import Scratch
from fusedstep._options.kinds import check_ranges
from fusedstep._sharding.dtensor import is_dtensor, local, spread_of
from fusedstep._sharding.exchange import step_whole
from fusedstep._state.checks import is_whole, name_of, with_name
from fusedstep._state.codes import absmax_of, is_codes
from fusedstep._state.kinds import shapes_of
from fusedstep._state.storage import BESIDE, way_of
from fusedstep._step.factors import Factors
from fusedstep._step.gradients import by_place
from fusedstep._step.owner import Owner
from fusedstep._step.plan import Work, same
from fusedstep._step.program import Program


class LowRankSteps(Owner):
    """Steps groups with a rank through a projection, and all others as the next class does."""

    #: How bases are made, and how weights move.
    _projection: ClassVar[Projection]
    #: False if weights of groups with a rank cannot be DTensors.
    _takes_shards: ClassVar[bool] = True

    _rule = "adam"
    _rule_constants: ClassVar[dict[str, Any]] = {
        "amsgrad": False,
        "decoupled_weight_decay": True,
        "eps_before_bias": True,
        "decay_last": True,
    }
    _learns_in_int4 = True
    _host_counts_steps = True  # a count tells which step makes bases
    _composite: ClassVar[bool] = True
    _foreign_states = frozenset({"projector", "seed"})

    # Options, and which groups

    @classmethod
    def _grouped(cls, weights: list[Tensor]) -> list[Any]:
        matrices = [p for p in weights if p.ndim >= 2]
        others = [p for p in weights if p.ndim < 2]
        groups: list[dict[str, Any]]
        groups = [{"params": matrices}, {"params": others, "rank": None}]
        return [group for group in groups if group["params"]]

    @classmethod
    def _check_projection(cls, options: dict[str, Any]) -> None:
        """Raises an option of the projection that is none."""
        if options["rank"] is not None:
            check_whole_number("rank", options["rank"])
        check_whole_number("update_proj_gap", options["update_proj_gap"])
        check_ranges(cls._option_kinds, {"scale": options["scale"]}, tensors=True)
        cls._projection.check(options)

    def _check(self, options: dict[str, Any]) -> None:
        self._check_projection(options)
        super()._check(options)

    def _is_composite(self, group: dict[str, Any]) -> bool:
        return has_rank(group)

    def _products_dtype(self, group: dict[str, Any], weight: Tensor) -> torch.dtype | None:
        return dtype_of_products(weight) if has_rank(group) else None

    @classmethod
    def _why_not_projected(cls, group: dict[str, Any], weight: Tensor) -> str | None:
        if weight.is_nested:
            return f"is a nested tensor, which {cls.__name__} does not project"
        if is_dtensor(weight) and not cls._takes_shards:
            return (
                f"is a DTensor: {cls.__name__} does not project shards. Put it into a group "
                "without a rank"
            )
        return why_not_projected(group, weight)

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        super()._check_group(index, group)
        self._check_projected(group, group["params"])

    def _check_projected(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Raises if a group has a rank, and weights that cannot be projected to it."""
        if has_rank(group):
            self._check_projection(group)
            for p in weights:
                if reason := self._why_not_projected(group, p):
                    raise ValueError(f"{self._name_of(group, p)} {reason}")

    def _is_native(
        self, group: dict[str, Any], weights: list[Tensor], grads: Sequence[Tensor] = ()
    ) -> bool:
        if has_rank(group):
            self._check_states(group, weights)  # before bases of other sides are made beside them
            self._takes_scratch(group, weights, grads)
        is_native = super()._is_native(group, weights, grads)
        if grads and has_rank(group):
            _check_values(weights)
        return is_native

    def _takes_scratch(
        self, group: dict[str, Any], weights: list[Tensor], grads: Sequence[Tensor]
    ) -> bool:
        """Returns whether products and a native step do a group with a rank; raises if they must.

        Otherwise the formula does.
        """
        if not self._wants_native(group):
            return False
        reason = self._why_not_native(weights, grads)
        if reason and group.get("fused"):
            raise RuntimeError(reason)
        # CPUs multiply float16 so slowly that the formula, which is float32, takes less time.
        is_slow = any(p.is_cpu and p.dtype is torch.float16 for p in weights)
        return reason is None and bool(group.get("fused") or not is_slow)

    def _exchanges(self, group: dict[str, Any]) -> bool:
        return super()._exchanges(group) or has_rank(group)

    def _name_of(self, group: dict[str, Any], weight: Tensor) -> str:
        index = next(i for i, each in enumerate(self._groups) if each["params"] is group["params"])
        return name_of(group, index, next(i for i, p in enumerate(group["params"]) if p is weight))

    # States

    def _in_form(
        self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Takes the bases out of a projector object, and makes states beside 16 bits float32."""
        shapes = shapes_of(self._state_kinds, group, weight.shape)
        if state.keys().isdisjoint({*self._states, *shapes}):  # it has taken no step
            return {}
        if not has_rank(group):
            return {name: value for name, value in state.items() if name != "seed"}
        found = getattr(state.get("projector"), "ortho_matrix", None)
        found = list(found) if isinstance(found, (list, tuple)) else [found]
        bases = dict(zip(sides_of(group, weight.shape), found, strict=False))
        known = state | {side: basis for side, basis in bases.items() if basis is not None}
        formed = {name: state[name] for name in BESIDE.values() if name in state}
        for name in ("step", *shapes):
            value = known.get(name)
            if isinstance(value, Tensor) and value.is_floating_point():
                formed[name] = value.float() if value.itemsize == 2 else value
            elif value is not None:
                formed[name] = value
            elif not shapes.get(name, weight.shape):  # a number
                formed[name] = torch.zeros((), dtype=torch.float32, device=weight.device)
            if is_codes(value):
                formed[absmax_of(name)] = known[absmax_of(name)]
        return formed

    def _check_states(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Raises if states are no longer those that the options of a group ask for."""
        self._check_projected(group, weights)
        self._store.check_are_tensors(weights)
        for place, slots in enumerate(self._store.slots_of_each(group, weights)):
            p, state = weights[place], self._state.get(weights[place], {})
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
                        f"{name} of {self._name_of(group, p)} must be a DTensor over the mesh of "
                        f"its weight with the placements {spread}"
                    )
                if not fits or found.device != p.device:
                    raise RuntimeError(
                        f"{name} of {self._name_of(group, p)} is {list(found.shape)} on "
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

    def _launches(
        self, index: int, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
        if not has_rank(group):
            return super()._launches(index, group, weights, grads)
        return by_place(weights, grads, [(way_of(group, p), p.dtype) for p in weights])

    def _forget_plans(self) -> None:
        super()._forget_plans()
        self._scratch: dict[Tensor, Scratch] = {}  # by the first weight of a launch
        self._known = KnownBases()
        self._fresh: dict[Tensor, dict[str, Tensor]] = {}  # bases of the step under way

    def _bind(
        self,
        place: tuple[int, ...],
        group: dict[str, Any],
        weights: list[Tensor],
        grads: list[Tensor],
    ) -> Work:
        if not has_rank(group):
            return super()._bind(place, group, weights, grads)
        scratch = self._scratch.get(weights[0])
        if scratch is not None and self._has_plan(scratch, place, group, weights):
            is_known = self._is_known(group, weights, grads)
            if is_known or scratch.kind == _kind(group, weights):
                try:
                    if not is_known:
                        self._has_sparse(group, grads)  # raises them
                    self._check_composite(group, weights, grads, is_known)
                except RuntimeError as error:
                    raise with_name(error, place[0], group, weights) from None
                work, scratch.has_products = Work(group, weights, grads, None, place[0]), False
                if is_known and scratch.had_no_factor and self._known.waiting is not None:
                    bases = Bases(self._projection, self._state, self._known)
                    project_early(work, scratch, bases)
                return work
        work = super()._bind(place, group, weights, grads)
        # A weight has one scratch memory, which has its last bases.
        mine = set(map(id, weights))
        others = self._scratch.items()
        self._scratch = {p: each for p, each in others if mine.isdisjoint(map(id, each.weights))}
        if self._takes_scratch(group, weights, grads):
            try:
                scratch = self._scratch[weights[0]] = self._new_scratch(group, weights)
            except RuntimeError as error:
                raise with_name(error, place[0], group, weights) from None
            self._plans[place], self._seen = scratch.plan, None
        return work

    def _has_plan(
        self, scratch: Scratch, place: tuple[int, ...], group: dict[str, Any], weights: list[Tensor]
    ) -> bool:
        """Returns whether a group still has the plan over scratch memory of the last step."""
        return (
            self._plans.get(place) is scratch.plan
            and self._wants_native(group)
            and same(weights, scratch.weights)
        )

    def _new_scratch(self, group: dict[str, Any], weights: list[Tensor]) -> Scratch:
        states = [self._store.with_count(group, p) for p in weights]
        # The shapes are of this process's part: the sides are those of the whole weight.
        sides = [(sides_of(group, p.shape), *matrix_shape(local(p))) for p in weights]
        shapes = [low_shape(group["rank"], *each) for each in sides]
        bases = [basis_shapes(group["rank"], *each) for each in sides]
        scratch = Scratch(weights, states, shapes, bases, _kind(group, weights))
        self._projection.begin(scratch, group)
        return scratch

    def _program(self, work: list[Work], factors: Factors) -> Program:
        low_rank = [item for item in work if has_rank(item.group)]
        plain = super()._program([i for i in work if not has_rank(i.group)], factors)
        known = self._projection, self._known, self._scratch
        program = LowRankProgram(self, low_rank, factors, plain, *known)
        self._fresh = program.bases.fresh
        return program

    # Weight by weight, by the formula

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        """Steps a weight by the formula: of shards all processes take the whole."""
        if has_rank(group) and is_dtensor(weight):
            step_whole(functools.partial(self._formula, group), weight, grad, state)
        else:
            super()._imperative(group, weight, grad, state)

    def _step_on_numbers(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        if has_rank(group):
            commit(self._fresh[weight], self._state[weight])
            state = self._fresh[weight] | state
        super()._step_on_numbers(group, weight, grad, state)


def _check_values(weights: list[Tensor]) -> None:
    """Raises for a weight without values: bases, and whether there are any, follow from these."""
    for index, p in enumerate(weights):
        if p.is_meta or isinstance(p, FakeTensor):
            what = "on the meta device" if p.is_meta else "a FakeTensor"
            raise RuntimeError(
                f"tensor {index} of the list: the weight is {what}, and a step of a group with a "
                "rank needs the values of gradients"
            )


def _kind(group: dict[str, Any], weights: list[Tensor]) -> tuple[Any, ...]:
    """All that scratch memory is made for."""
    names = ("rank", "proj_type", "proj", "svd", "stagger", "scale_type", "state_dtype")
    options = [group.get(name) for name in names]
    shapes = [(p.shape, p.dtype, p.device) for p in weights]
    return *options, way_of(group, weights[0]), *shapes
