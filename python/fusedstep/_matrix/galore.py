"""Parts that the classes of GaLore share: bases of gradients, and when they are made anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.low_rank import LowRankSteps
from fusedstep._matrix.low_rank_states import PLACE, TURN, bases, beside, place_of, turn_of
from fusedstep._matrix.projection import (
    PROJ_TYPES,
    basis_shapes,
    check_one_of,
    is_due,
    matrix_shape,
)
from fusedstep._matrix.subspace import bases_of, overlap
from fusedstep._options.kinds import Flag, Option, Options
from fusedstep._options.shared import PROJECTION
from fusedstep._sharding.dtensor import local
from fusedstep._state.kinds import States

SVDS = ("exact", "randomized", "power", "lazy")

#: Options of GaLore's projections.
GALORE: Options = {**PROJECTION, "svd": Option(before="exact"), "stagger": Flag(before=False)}

#: The state that counts how often ``svd="lazy"`` has doubled the gap of a weight.
_DOUBLINGS = "gap_doublings"

#: The states that groups with a rank have beside their moments.
BESIDE_MOMENTS: States = {
    **bases(),
    _DOUBLINGS: beside(needs=lambda group: group["svd"] == "lazy"),
    PLACE: beside(2, needs=lambda group: group["svd"] != "exact", start=place_of, is_later=True),
    TURN: beside(2, needs="stagger", start=turn_of, is_later=True),
}

#: A lazy refresh finds the basis at rest from this overlap on; the gap doubles at most so often.
_AT_REST, _MOST_DOUBLINGS = 0.4, 4


class GaLoreSteps(LowRankSteps):
    """Steps through bases that are singular vectors of gradients."""

    @classmethod
    def _check_projection(cls, options: dict[str, Any]) -> None:
        super()._check_projection(options)
        check_one_of("proj_type", options["proj_type"], PROJ_TYPES)
        check_one_of("svd", options["svd"], SVDS)

    def _shapes_from_gradients(
        self, group: dict[str, Any], weight: Tensor
    ) -> dict[str, torch.Size]:
        shapes = basis_shapes(group["rank"], self._sides(group, weight), *matrix_shape(weight))
        return shapes | ({_DOUBLINGS: torch.Size(())} if group["svd"] == "lazy" else {})

    def _is_refresh(self, group: dict[str, Any], weight: Tensor, count: int) -> bool:
        offset = self._offset(group, weight) if group["stagger"] else 0
        if not is_due(count, group["update_proj_gap"], offset):
            return False
        if count == 0 or group["svd"] != "lazy":
            return True
        times = (count + offset) // group["update_proj_gap"]
        return times % 2 ** int(self._state[weight][_DOUBLINGS]) == 0

    def _new_bases(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, count: int, is_due: bool
    ) -> dict[str, Tensor]:
        if not is_due:
            return {}
        state, side, svd = self._state[weight], self._sides(group, weight), group["svd"]
        has_last = count and weight not in (self._waiting or ())
        last = {name: local(state[name]).to(grad.device) for name in side} if has_last else None
        key = self._key(group, weight, count) if svd != "exact" else 0
        wide = grad.to(state[side[0]].dtype)
        found = bases_of(wide, group["rank"], side, svd, last, key)
        if svd != "lazy":
            return found
        doublings = torch.zeros_like(state[_DOUBLINGS])  # which each process has
        if last is not None and overlap(last, found) >= _AT_REST:
            doublings = (state[_DOUBLINGS] + 1).clamp(max=_MOST_DOUBLINGS)
        return found | {_DOUBLINGS: doublings}
