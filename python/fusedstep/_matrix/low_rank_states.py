"""Records of states of groups with a rank: low-rank moments, bases, and places of weights.

Random bases, and the steps of staggered refreshes, follow from a weight's place in the groups. A
state keeps the place, so that bases belong to the weight when groups are edited, and over a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.projection import LEFT, RIGHT, low_shape_of, sides_of
from fusedstep._matrix.sharded_projections import copies_of, low_placements
from fusedstep._state.kinds import Group, State, States
from fusedstep._state.storage import PLACES, whole_places_of

#: The state that random numbers follow from: the index of a weight's group, and the weight's place
#: there when it got its states.
PLACE = "place"
#: The state that the steps of staggered refreshes follow from: a weight's place in its group, and
#: the number of weights there, when it got its states.
TURN = "turn"


def has_rank(group: Group, shape: torch.Size | None = None) -> bool:
    """Returns whether the gradients of a group are projected, those of whichever shape."""
    return group.get("rank") is not None


def low_rank(states: States) -> States:
    """Returns the records of states that are those of low-rank gradients in groups with a rank."""
    return {name: state if state.is_number else _low_rank(state) for name, state in states.items()}


def _low_rank(state: State) -> State:
    def may_be(group: Group, shape: torch.Size) -> bool:
        return state.may_be(group, low_shape_of(group, shape) if has_rank(group) else shape)

    def shape_of(group: Group, shape: torch.Size) -> torch.Size | None:
        if not has_rank(group):
            return state.shape and state.shape(group, shape)
        low = low_shape_of(group, shape)
        return low if state.shape is None else state.shape(group, low)

    def placements(group: Group, weight: Tensor) -> tuple[Any, ...] | None:
        if has_rank(group):
            return low_placements(weight, sides_of(group, weight.shape))
        return state.placements and state.placements(group, weight)

    return replace(state, of=state.of and may_be, shape=shape_of, placements=placements)


def bases(when: Callable[[Group], bool] = has_rank) -> States:
    """Returns the records of the bases of groups with a rank; ``when``: of those that have any."""

    def left(group: Group, shape: torch.Size) -> bool:
        return has_rank(group) and when(group) and LEFT in sides_of(group, shape)

    def right(group: Group, shape: torch.Size) -> bool:
        return has_rank(group) and when(group) and RIGHT in sides_of(group, shape)

    def of_left(group: Group, shape: torch.Size) -> torch.Size:
        return torch.Size((shape[0], group["rank"]))

    def of_right(group: Group, shape: torch.Size) -> torch.Size:
        return torch.Size((group["rank"], shape[1:].numel()))

    return {
        LEFT: State(of=left, shape=of_left, placements=_copies, takes_codes=False),
        RIGHT: State(of=right, shape=of_right, placements=_copies, takes_codes=False),
    }


def beside(*sizes: int, **fields: Any) -> State:
    """Returns the record of a state of these sizes of groups with a rank; each process has all.

    Without sizes the state is a number, and a tensor of torch beside a DTensor too.
    """
    fields |= {"shape": lambda group, shape: torch.Size(sizes), "takes_codes": False}
    return State(of=has_rank, placements=_copies if sizes else None, **fields)


def _copies(group: Group, weight: Tensor) -> tuple[Any, ...]:
    return copies_of(weight)


def whole_pair(start: Callable[[list[Group], Group, Tensor], Sequence[int]], **of: Any) -> State:
    """Returns the record of two whole numbers, which older dictionaries lack."""
    return beside(2, start=start, is_whole=True, is_later=True, **of)


def place_of(groups: list[Group], group: Group, weight: Tensor) -> Sequence[int]:
    """Returns the first values of the state ``place``."""
    (whole,) = whole_places_of(groups, group, [weight])
    return divmod(whole, PLACES)


def turn_of(groups: list[Group], group: Group, weight: Tensor) -> Sequence[int]:
    """Returns the first values of the state ``turn``."""
    return place_of(groups, group, weight)[1], len(group["params"])
