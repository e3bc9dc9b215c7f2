"""What an optimizer says of the states of its weights: a record for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Options of a group.
Group = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class State:
    """A state of a weight.

    Attributes:
        of: whether a weight of this shape in a group may have the state, whichever options in
            ``needs`` were set since the state was made; None for all weights.
        needs: the option that a group has to have set, neither 0 nor False, for its weights to have
            the state, or a function of the group; None for a state that they always have.
        lasts: whether no dictionary of a group lacks the state where the group needs it. None: the
            option in ``needs`` may have been set after the last step.
        shape: the shape of the state by that of the weight, if the state has its own shape; None
            for the weight's. Where one state has its own shape, all states of the weight are
            float32 beside 16 bits.
        placements: the placements of a state with its own shape beside a DTensor; None for a state
            that is a tensor of torch in each process.
        start: the value of each element before the first step, or the option that has this value,
            or the values of all elements by the groups of the optimizer, the group and the weight.
        is_number: whether the state is one number, beside the tensors of a weight.
        is_whole: whether each element is a whole number of at least 0.
        is_signed: whether the state may be negative, where the native rule does not say so.
        takes_codes: whether ``state_dtype`` may ask for the state in codes.
        is_later: whether older dictionaries lack the state: it is made when they are loaded.
    """

    of: Callable[[Group, torch.Size], bool] | None = None
    needs: str | Callable[[Group], bool] | None = None
    lasts: Callable[[Group], bool] | None = None
    shape: Callable[[Group, torch.Size], torch.Size | None] | None = None
    placements: Callable[[Group, Tensor], tuple[Any, ...] | None] | None = None
    start: float | str | Callable[[list[Group], Group, Tensor], Sequence[float]] = 0.0
    is_number: bool = False
    is_whole: bool = False
    is_signed: bool = False
    takes_codes: bool = True
    is_later: bool = False

    def may_be(self, group: Group, shape: torch.Size) -> bool:
        """Returns whether a weight of this shape may have the state."""
        return self.of is None or self.of(group, shape)

    def is_needed(self, group: Group) -> bool:
        """Returns whether the options of a group ask for the state."""
        needs = self.needs
        if needs is None:
            return True
        return bool(group.get(needs) if isinstance(needs, str) else needs(group))

    def is_lasting(self, group: Group, later: Group) -> bool:
        """Returns whether all dictionaries of a group have the state.

        ``later``: options that older dictionaries lack, with the values that mean what was done.
        """
        needed_now = self.lasts is not None and self.lasts(group) and self.is_needed(group)
        return needed_now or self.is_needed(later)

    def is_of(self, group: Group, shape: torch.Size) -> bool:
        """Returns whether a weight of this shape has the state."""
        if self.of is not None and not self.of(group, shape):
            return False
        return self.needs is None or self.is_needed(group)

    def first_value(self, group: Group) -> float:
        """Returns the value of each element before the first step."""
        assert not callable(self.start)
        return float(group[self.start] if isinstance(self.start, str) else self.start)


#: What an optimizer says of all states of a weight, by their names: tensors in the order of the
#: native rule, and numbers in the order of a plan.
States = Mapping[str, State]

#: A step count, of the weight.
COUNT: States = {"step": State(is_number=True)}


def plain(*names: str) -> States:
    """Returns the records of tensors that all weights have, and that start at 0."""
    return dict.fromkeys(names, State())


def numbers_of(states: States, group: Group, shape: torch.Size) -> list[str]:
    """The names of the numbers that a weight has beside its tensors."""
    return [n for n, state in states.items() if state.is_number and state.is_of(group, shape)]


def shapes_of(states: States, group: Group, shape: torch.Size) -> dict[str, torch.Size | None]:
    """The shapes of a weight's tensors by their names; None for all that have the weight's."""
    found = {
        name: state.shape and state.shape(group, shape)
        for name, state in states.items()
        if not state.is_number and state.is_of(group, shape)
    }
    if all(own is None for own in found.values()):
        return found
    return {name: shape if own is None else own for name, own in found.items()}


def same_shape(group: Group, shape: torch.Size) -> torch.Size:
    """The weight's shape, for a state beside others that have their own."""
    return shape
