"""When a step makes new bases, and weights whose bases wait for a gradient.

A gradient of zeros has no subspace: its singular vectors are the first axes, which would be the
basis for a whole gap. Its basis is zero, and is made anew at the first gradient that is not zero.
A zero basis in a state is the sign of that, so that it is in dictionaries.

Random bases, and the steps of staggered refreshes, follow from a weight's place in the groups. A
state keeps the place, so that bases belong to the weight when groups are edited, and over a resume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusedstep._matrix.projection import LEFT, RIGHT, is_due, matrix_shape, sides
from fusedstep._sharding.dtensor import local
from fusedstep._state.checks import name_of
from fusedstep._state.counts import read_count
from fusedstep._state.storage import PLACES, key_of_draws, whole_places_of
from fusedstep._torch_ops.imperative import ImperativeTwin

#: The state that random numbers follow from: the index of a weight's group, and the weight's place
#: there when it got its states.
PLACE = "place"
#: The state that the steps of staggered refreshes follow from: a weight's place in its group, and
#: the number of weights there, when it got its states.
TURN = "turn"


class LowRankBases(ImperativeTwin):
    """Gives an optimizer the bases of groups with a rank.

    Tells when a basis has to be made anew, and makes the basis of a gradient of zeros.
    """

    _later_states: ClassVar[frozenset[str]] = frozenset({PLACE})

    def _forget_plans(self) -> None:
        super()._forget_plans()
        self._turns: dict[Tensor, list[int]] = {}  # of states that have been read: a device waits
        self._waiting: set[Tensor] | None = None  # weights with zero bases; None before a look
        self._is_zero: dict[Tensor, bool] = {}  # gradients that the step under way makes bases of

    @classmethod
    def _is_projected(cls, group: dict[str, Any]) -> bool:
        return group.get("rank") is not None

    @classmethod
    def _sides(cls, group: dict[str, Any], weight: Tensor) -> tuple[str, ...]:
        return sides(group["proj_type"], *matrix_shape(weight))

    def _count(self, weight: Tensor) -> int:
        """The steps of a weight so far; -1 for a count that is NaN, which is refused later."""
        step = self._state.get(weight, {}).get("step", 0)
        count = read_count(step) if isinstance(step, Tensor) else float(step)
        return -1 if math.isnan(count) else int(count)

    def _name_of(self, group: dict[str, Any], weight: Tensor) -> str:
        index = next(i for i, each in enumerate(self._groups) if each["params"] is group["params"])
        return name_of(group, index, self._place(group, weight))

    @staticmethod
    def _place(group: dict[str, Any], weight: Tensor) -> int:
        return next(i for i, p in enumerate(group["params"]) if p is weight)

    @classmethod
    def _kept_places(cls, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the names among ``PLACE`` and ``TURN`` that the options of a group need."""
        raise NotImplementedError

    @classmethod
    def _place_shapes(cls, group: dict[str, Any]) -> dict[str, torch.Size]:
        return dict.fromkeys(cls._kept_places(group), torch.Size((2,)))

    @classmethod
    def _possible_names(cls, group: dict[str, Any]) -> tuple[str, ...]:
        names = super()._possible_names(group)
        return (*names, *cls._later_states) if cls._is_projected(group) else names

    def _starts(self, group: dict[str, Any], weight: Tensor, name: str) -> Sequence[float]:
        if name not in self._later_states:
            return ()
        (whole,) = whole_places_of(self._groups, group, [weight])
        index, place = divmod(whole, PLACES)
        return (index, place) if name == PLACE else (place, len(group["params"]))

    def _make_later_states(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        if self._is_projected(group):
            names = {*self._kept_places(group)}
            older = [p for p in weights if not self._state[p].keys() >= names]
            self._store.create(group, older, False, self._starts)

    def _key(self, group: dict[str, Any], weight: Tensor, draw: int) -> int:
        """The key of a weight's random numbers."""
        index, place = map(int, local(self._state[weight][PLACE]).tolist())
        return key_of_draws(group.get("seed", 0), draw, index * PLACES + place)

    def _offset(self, group: dict[str, Any], weight: Tensor) -> int:
        """The steps by which a weight's refreshes come before the multiples of the gap."""
        if weight not in self._turns:
            self._turns[weight] = list(map(int, local(self._state[weight][TURN]).tolist()))
        place, count = self._turns[weight]
        return place * group["update_proj_gap"] // count

    def _is_refresh(self, group: dict[str, Any], weight: Tensor, count: int) -> bool:
        """Returns whether the gap of a weight ends at the step after so many."""
        return is_due(count, group["update_proj_gap"], 0)

    def _new_bases(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, count: int, is_due: bool
    ) -> dict[str, Tensor]:
        """Bases and other states that a step makes, by name; nothing is changed by this.

        It is asked where they are due, and where no memory holds bases that are no states.
        ``grad``: a matrix, and finite where bases are due, and not zero where they are states.
        """
        raise NotImplementedError

    def _shapes_from_gradients(
        self, group: dict[str, Any], weight: Tensor
    ) -> dict[str, torch.Size]:
        """The shapes of the states that ``_new_bases`` makes of whole gradients, by name."""
        raise NotImplementedError

    def _is_due(self, group: dict[str, Any], weight: Tensor, count: int) -> bool:
        """Returns whether the step after so many makes new bases, if its gradient is not zero."""
        if self._waiting and weight in self._waiting:
            return True
        return self._is_refresh(group, weight, count)

    def _find_waiting(self) -> None:
        """Looks for zero bases where they are not known: in states of which others may be."""
        if self._waiting is None:
            self._waiting = {
                weight
                for weight, state in self._state.items()
                for side in (LEFT, RIGHT)
                if side in state and not local(state[side]).any()
            }

    def _follow_waiting(self) -> None:
        """Notes which weights wait after a step, which has written its new bases."""
        if self._waiting is not None:
            for weight, is_zero in self._is_zero.items():
                (self._waiting.add if is_zero else self._waiting.discard)(weight)

    def _made_bases(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, count: int, is_due: bool
    ) -> dict[str, Tensor]:
        """As ``_new_bases``, of a gradient of zeros too."""
        if is_due and self._shapes_from_gradients(group, weight):
            self._is_zero[weight] = not grad.any()
            if self._is_zero[weight]:
                return self._zero_bases(group, weight)
        return self._new_bases(group, weight, grad, count, is_due)

    def _zero_bases(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        state = self._state[weight]
        names = self._shapes_from_gradients(group, weight)
        return {name: torch.zeros_like(local(state[name])) for name in names}
