"""When a step makes new bases, and weights whose bases wait for a gradient.

A gradient of zeros has no subspace: its singular vectors are the first axes, which would be the
basis for a whole gap. Its basis is zero, and is made anew at the first gradient that is not zero.
A zero basis in a state is the sign of that, so that it is in dictionaries.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.low_rank_states import PLACE, TURN
from fusedstep._matrix.projection import LEFT, RIGHT, is_due, matrix_shape, sides
from fusedstep._sharding.dtensor import local
from fusedstep._state.checks import name_of
from fusedstep._state.counts import read_count
from fusedstep._state.storage import PLACES, key_of_draws
from fusedstep._torch_ops.imperative import ImperativeTwin


class LowRankBases(ImperativeTwin):
    """Gives an optimizer the bases of groups with a rank.

    Tells when a basis has to be made anew, and makes the basis of a gradient of zeros.
    """

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
