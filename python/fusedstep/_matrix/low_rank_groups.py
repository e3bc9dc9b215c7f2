"""Groups with a rank of GaLore and APOLLO: their options and states.

The formula is that of ``_matrix/transformers_adamw.py``, on low-rank gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusedstep._matrix.low_rank_shards import LowRankShards
from fusedstep._matrix.products import dtype_of_products
from fusedstep._matrix.projection import check_whole_number
from fusedstep._options.kinds import check_ranges
from fusedstep._sharding.dtensor import is_dtensor, spread_of
from fusedstep._state.codes import absmax_of, is_codes
from fusedstep._state.kinds import shapes_of
from fusedstep._state.storage import BESIDE, way_of
from fusedstep._step.gradients import by_place


class LowRankGroups(LowRankShards):
    """The options and states of groups with a rank."""

    _rule = "adam"
    _rule_constants: ClassVar[dict[str, Any]] = {
        "amsgrad": False,
        "decoupled_weight_decay": True,
        "eps_before_bias": True,
        "decay_last": True,
    }
    _learns_in_int4 = True
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

    def _check(self, options: dict[str, Any]) -> None:
        self._check_projection(options)
        super()._check(options)

    def _is_composite(self, group: dict[str, Any]) -> bool:
        return self._is_projected(group)

    def _products_dtype(self, group: dict[str, Any], weight: Tensor) -> torch.dtype | None:
        return dtype_of_products(weight) if self._is_projected(group) else None

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        super()._check_group(index, group)
        self._check_projected(group, group["params"])

    def _check_projected(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Raises if a group has a rank, and weights that cannot be projected to it."""
        if self._is_projected(group):
            self._check_projection(group)
            for p in weights:
                if reason := self._why_not_projected(group, p):
                    raise ValueError(f"{self._name_of(group, p)} {reason}")

    def _is_native(
        self, group: dict[str, Any], weights: list[Tensor], grads: Sequence[Tensor] = ()
    ) -> bool:
        if self._is_projected(group):
            self._check_projected(group, weights)
            self._takes_scratch(group, weights, grads)
        return super()._is_native(group, weights, grads)

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

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Returns False: a count tells which step makes bases, and the host has to know counts."""
        return False

    def _in_form(
        self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Takes the bases out of a projector object, and makes states beside 16 bits float32."""
        shapes = shapes_of(self._state_kinds, group, weight.shape)
        if state.keys().isdisjoint({*self._states, *shapes}):  # it has taken no step
            return {}
        if not self._is_projected(group):
            return {name: value for name, value in state.items() if name != "seed"}
        found = getattr(state.get("projector"), "ortho_matrix", None)
        found = list(found) if isinstance(found, (list, tuple)) else [found]
        bases = dict(zip(self._sides(group, weight), found, strict=False))
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

    def _launches(
        self, index: int, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
        if not self._is_projected(group):
            return super()._launches(index, group, weights, grads)
        return by_place(weights, grads, [(way_of(group, p), p.dtype) for p in weights])

    def _check_states(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Raises if states are no longer those that the options of a group ask for."""
        self._check_projected(group, weights)
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

    def _low_rank_states(self, group: dict[str, Any], weight: Tensor) -> list[Tensor]:
        """The states of a weight, but for bases that a step leaves alone and what is beside it."""
        bases = () if weight in self._fresh else self._sides(group, weight)
        slots = self._store.slots_of(group, weight)
        names = {"step", *(slot.name for slot in slots if slot.record)}.difference(bases)
        names |= set(map(absmax_of, names))
        return [value for name, value in self._state[weight].items() if name in names]
