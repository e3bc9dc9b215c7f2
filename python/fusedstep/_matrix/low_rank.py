"""Optimizers of low-rank gradients: the class that GaLore and APOLLO share.

Groups with a ``rank`` are projected; all others are AdamW in the same step, by a native plan. The
formula of both is that of ``_matrix/transformers_adamw.py``. Options and states are here;
``low_rank_strategy.py`` steps the groups.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusedstep._matrix.low_rank_bases import Projection
from fusedstep._matrix.low_rank_states import has_rank
from fusedstep._matrix.projection import (
    check_whole_number,
    sides_of,
    why_not_projected,
)
from fusedstep._options.kinds import check_ranges
from fusedstep._sharding.dtensor import is_dtensor
from fusedstep._sharding.exchange import step_whole
from fusedstep._state.checks import name_of
from fusedstep._state.codes import absmax_of, is_codes
from fusedstep._state.kinds import shapes_of
from fusedstep._state.storage import BESIDE
from fusedstep._step.owner import Owner


class LowRankOptimizer(Owner):
    """Has groups with a rank, which are projected, and groups of the next class."""

    #: How bases are made, and how weights move.
    _projection: ClassVar[Projection]
    #: False if weights of groups with a rank cannot be DTensors.
    _takes_shards: ClassVar[bool] = True

    _rule = "adam"
    _rule_values: ClassVar[dict[str, Any]] = {
        "amsgrad": False,
        "decoupled_weight_decay": True,
        "eps_before_bias": True,
        "decay_last": True,
    }
    _learns_in_int4 = True
    _host_counts_steps = True  # a count tells which step makes bases
    _composite: ClassVar[bool] = True
    _by_dimensions = ({}, {"rank": None})
    _foreign_states = frozenset({"projector", "seed"})

    # Options, and which groups

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

    # Weight by weight, by the formula

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        """Steps a weight by the formula: of shards all processes take the whole."""
        if has_rank(group) and is_dtensor(weight):
            step_whole(functools.partial(self._formula, group), weight, grad, state)
        else:
            super()._imperative(group, weight, grad, state)
