"""When a step makes new bases, and weights whose bases wait for a gradient.

A gradient of zeros has no subspace: its singular vectors are the first axes, which would be the
basis for a whole gap. Its basis is zero, and is made anew at the first gradient that is not zero.
A zero basis in a state is the sign of that, so that it is in dictionaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusedstep._matrix.low_rank_states import PLACE, TURN
from fusedstep._matrix.projection import LEFT, RIGHT, sides_of
from fusedstep._matrix.scratch import Scratch
from fusedstep._matrix.sharded_projections import basis_part
from fusedstep._sharding.dtensor import local
from fusedstep._sharding.exchange import cut_of
from fusedstep._state.counts import read_count
from fusedstep._state.storage import PLACES, key_of_draws, way_of
from fusedstep._step.plan import Work

#: Returns bases by side.
WideBases = Callable[[], dict[str, Tensor]]


class Projection:
    """An algorithm of low-rank gradients: how it makes bases, and moves weights.

    Moves need a method only where a native plan steps low-rank gradients in scratch memory.
    """

    def check(self, options: dict[str, Any]) -> None:
        """Raises an option that is none."""
        raise NotImplementedError

    # Bases

    def shapes_from_gradients(self, group: dict[str, Any], weight: Tensor) -> dict[str, torch.Size]:
        """The shapes of the states that ``new_bases`` makes of whole gradients, by name."""
        raise NotImplementedError

    def has_turns(self, group: dict[str, Any]) -> bool:
        """Returns whether refreshes of the weights of a group come in turn."""
        return False

    def is_refresh(self, group: dict[str, Any], state: dict[str, Any], count: int) -> bool:
        """Returns whether a weight gets new bases at the end of a gap, after so many steps."""
        return True

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
        """Bases and other states that a step makes, by name; nothing is changed by this.

        It is called where they are due, and where no memory holds bases that are no states.
        ``grad``: a matrix, and finite where bases are due, and not zero where they are states.
        ``is_first``: whether no state has bases of an earlier gradient.
        """
        raise NotImplementedError

    # Moves

    def begin(self, scratch: Scratch, group: dict[str, Any]) -> None:
        """Makes what moves need in new scratch memory."""

    def prepare_moves(
        self,
        found: list[tuple[Work, Scratch]],
        states: Mapping[Tensor, dict[str, Any]],
        factor: float,
    ) -> None:
        """Makes what moves of weights need. ``factor``: of the low-rank gradients."""

    def before_moves(self, found: list[tuple[Work, Scratch]], factor: float) -> None:
        """Does what moves of weights need of other processes, when the moments are stepped."""

    def move_all(self, item: Work, scratch: Scratch) -> bool:
        """Moves the weights of a group at once, or returns False and changes nothing."""
        raise NotImplementedError

    def move(
        self,
        item: Work,
        scratch: Scratch,
        index: int,
        target: Tensor,
        wide_bases: WideBases | None,
    ) -> None:
        """Moves a weight, as a matrix, by the update in the scratch memory.

        ``target``: the weight, or the float32 value of one of 16 bits; then ``wide_bases`` returns
        the bases in float32, where they are states.
        """
        raise NotImplementedError


class KnownBases:
    """What is known of the bases in states, from step to step."""

    def __init__(self) -> None:
        self.turns: dict[Tensor, list[int]] = {}
        """States of that name that have been read: to read a state waits for a device."""
        self.waiting: set[Tensor] | None = None
        """Weights with zero bases; None before a look."""


class Bases:
    """The bases of weights in a step: which are due, and those that the step has made."""

    def __init__(
        self,
        projection: Projection,
        states: Mapping[Tensor, dict[str, Any]],
        known: KnownBases,
    ) -> None:
        self._projection, self.states, self._known = projection, states, known
        self.fresh: dict[Tensor, dict[str, Tensor]] = {}
        """Bases and other states that the step has made."""
        self.is_zero: dict[Tensor, bool] = {}
        """Whether the gradients are zero that the step makes bases of."""

    def due(self, group: dict[str, Any], weights: list[Tensor]) -> list[bool]:
        """Tells of weights whether the next step makes new bases, if the gradient is not zero."""
        gap, has_turns = group["update_proj_gap"], self._projection.has_turns(group)
        found, waiting = [], self._known.waiting or ()
        for weight in weights:
            state, offset = self.states[weight], 0
            if has_turns:
                place, number = self._turn(weight)
                # Such refreshes come before the ends of gaps. A user may have set the number to 0.
                offset = place * gap // max(number, 1)
            count = count_of(state)
            found.append(
                weight in waiting
                or count == 0
                or (
                    (count + offset) % gap == 0
                    and self._projection.is_refresh(group, state, count + offset)
                )
            )
        return found

    def _turn(self, weight: Tensor) -> list[int]:
        turns = self._known.turns
        if weight not in turns:
            turns[weight] = list(map(int, local(self.states[weight][TURN]).tolist()))
        return turns[weight]

    def look(self) -> None:
        """Looks for zero bases where they are not known: in states of which others may be."""
        if self._known.waiting is None:
            self._known.waiting = {
                weight
                for weight, state in self.states.items()
                for side in (LEFT, RIGHT)
                if side in state and not local(state[side]).any()
            }

    def make(self, group: dict[str, Any], weight: Tensor, grad: Tensor, is_due: bool) -> None:
        """Makes the bases of a weight for the step under way; ``grad``: a matrix."""
        if is_due and self._projection.shapes_from_gradients(group, weight):
            self.is_zero[weight] = not grad.any()
            if self.is_zero[weight]:
                self.make_zero(group, weight)
                return
        self.fresh[weight] = self.new(group, weight, grad, is_due)

    def new(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, is_due: bool
    ) -> dict[str, Tensor]:
        """Bases of a gradient that is not zero."""
        state = self.states[weight]
        count = count_of(state)
        is_first = count == 0 or weight in (self._known.waiting or ())
        return self._projection.new_bases(group, weight, state, grad, count, is_due, is_first)

    def make_zero(self, group: dict[str, Any], weight: Tensor) -> None:
        """Makes bases of a gradient of zeros."""
        state = self.states[weight]
        names = self._projection.shapes_from_gradients(group, weight)
        self.fresh[weight] = {name: torch.zeros_like(local(state[name])) for name in names}

    def of(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        """The bases of a weight by side, or what belongs to this process's part of it.

        They are those of its state, where they are part of it.
        """
        known, cut = self.states[weight] | self.fresh.get(weight, {}), cut_of(weight)
        return {
            side: basis_part(local(known[side]), side, cut)
            for side in sides_of(group, weight.shape)
        }

    def end(self, is_taken: bool) -> None:
        """Forgets new bases; notes which weights wait, if the step has been taken."""
        if not is_taken:
            self._known.waiting = None  # some new bases may have been written
        elif self._known.waiting is not None:
            for weight, is_zero in self.is_zero.items():
                (self._known.waiting.add if is_zero else self._known.waiting.discard)(weight)
        self.fresh.clear()


def commit(fresh: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Writes new bases into a state where they are part of it."""
    for name in fresh.keys() & state.keys():
        local(state[name]).copy_(fresh[name])


def count_of(state: Mapping[str, Any]) -> int:
    """The steps of a weight so far; -1 for a count that is NaN, which is refused later."""
    step = state.get("step", 0)
    count = read_count(step) if isinstance(step, Tensor) else float(step)
    return -1 if math.isnan(count) else int(count)


def key_of(group: dict[str, Any], state: Mapping[str, Any], draw: int) -> int:
    """The key of a weight's random numbers."""
    index, place = map(int, local(state[PLACE]).tolist())
    return key_of_draws(group.get("seed", 0), draw, index * PLACES + place)


def moves_late(item: Work) -> bool:
    """Returns whether torch allocates something as weights move along their updates."""
    return any(way_of(item.group, p) is not None or p.dim() > 2 for p in item.weights)
