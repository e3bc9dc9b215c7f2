"""GaLore: bases are singular vectors of gradients, and weights move by a product of the update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._matrix.low_rank_bases import Projection, WideBases, key_of
from fusedstep._matrix.low_rank_states import (
    PLACE,
    TURN,
    bases,
    beside,
    place_of,
    turn_of,
    whole_pair,
)
from fusedstep._matrix.products import add_back, add_back_all
from fusedstep._matrix.projection import PROJ_TYPES, basis_shapes_of, check_one_of, sides_of
from fusedstep._matrix.scratch import Scratch
from fusedstep._matrix.subspace import bases_of, overlap
from fusedstep._options.kinds import Flag, Option, Options
from fusedstep._options.shared import PROJECTION
from fusedstep._sharding.dtensor import local
from fusedstep._state.kinds import States
from fusedstep._step.plan import Work
from fusedstep._step.undo import is_out_of_memory

SVDS = ("exact", "randomized", "power", "lazy")

#: Options of GaLore's projections.
GALORE: Options = {**PROJECTION, "svd": Option(before="exact"), "stagger": Flag(before=False)}

#: The state that counts how often ``svd="lazy"`` has doubled the gap of a weight.
_DOUBLINGS = "gap_doublings"

#: The states that groups with a rank have beside their moments.
BESIDE_MOMENTS: States = {
    **bases(),
    _DOUBLINGS: beside(needs=lambda group: group["svd"] == "lazy", is_whole=True),
    PLACE: whole_pair(place_of, needs=lambda group: group["svd"] != "exact"),
    TURN: whole_pair(turn_of, needs="stagger"),
}

#: A lazy refresh finds the basis at rest from this overlap on; the gap doubles at most so often.
_AT_REST, _MOST_DOUBLINGS = 0.4, 4


class GaLore(Projection):
    """Bases that are singular vectors of gradients."""

    def check(self, options: dict[str, Any]) -> None:
        check_one_of("proj_type", options["proj_type"], PROJ_TYPES)
        check_one_of("svd", options["svd"], SVDS)

    def shapes_from_gradients(self, group: dict[str, Any], weight: Tensor) -> dict[str, torch.Size]:
        shapes = basis_shapes_of(group, weight)
        return shapes | ({_DOUBLINGS: torch.Size(())} if group["svd"] == "lazy" else {})

    def has_turns(self, group: dict[str, Any]) -> bool:
        return bool(group["stagger"])

    def is_refresh(self, group: dict[str, Any], state: dict[str, Any], count: int) -> bool:
        if group["svd"] != "lazy":
            return True
        times = count // group["update_proj_gap"]
        return times % 2 ** int(state[_DOUBLINGS]) == 0

    def new_bases(
        self,
        group: dict[str, Any],
        weight: Tensor,
        state: dict[str, Any],
        grad: Tensor,
        count: int,
        is_due: bool,
        is_first: bool,
    ) -> dict[str, Tensor]:
        if not is_due:
            return {}
        side, svd = sides_of(group, weight.shape), group["svd"]
        last = None
        if not is_first:
            last = {name: local(state[name]).to(grad.device) for name in side}
        key = key_of(group, state, count) if svd != "exact" else 0
        wide = grad.to(state[side[0]].dtype)
        found = bases_of(wide, group["rank"], side, svd, last, key)
        if svd != "lazy":
            return found
        doublings = torch.zeros_like(state[_DOUBLINGS])  # which each process has
        if last is not None and overlap(last, found) >= _AT_REST:
            doublings = (state[_DOUBLINGS] + 1).clamp(max=_MOST_DOUBLINGS)
        return found | {_DOUBLINGS: doublings}

    def move_all(self, item: Work, scratch: Scratch) -> bool:
        """Moves all weights in one native call, where there is one."""
        indices, weights = range(len(item.weights)), list(map(local, item.weights))
        found, updates = map(scratch.bases, indices), map(scratch.update, indices)
        try:
            has_moved = add_back_all(weights, [*updates], [*found], *_factors(item.group))
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):  # torch's products allocate nothing
                return False
            raise
        if has_moved:
            increment_version(item.weights)
        return has_moved

    def move(
        self,
        item: Work,
        scratch: Scratch,
        index: int,
        target: Tensor,
        wide_bases: WideBases | None,
    ) -> None:
        factors = _factors(item.group)
        if wide_bases is not None:
            add_back(target, scratch.updates[index], wide_bases(), *factors)
        else:
            update = scratch.update(index)
            add_back(target, update, scratch.bases(index), *factors, scratch.between)


def _factors(group: dict[str, Any]) -> tuple[float, float]:
    """What decay leaves of a weight, and the factor of its update."""
    lr = float(group["lr"])
    keep = 1 - lr * group["weight_decay"]
    return keep, lr * keep * group["scale"]
