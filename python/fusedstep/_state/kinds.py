"""What an optimizer says of the states of its weights: a record for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class State:
    """A state of a weight.

    Attributes:
        needs: the option that a group has to have set, neither 0 nor False, for its weights to have
            the state; None for a state that they always have.
        start: the value of each element before the first step, or the option that has this value.
        is_number: whether the state is one number, beside the tensors of a weight.
        is_signed: whether the state may be negative, where the native rule does not say so.
    """

    needs: str | None = None
    start: float | str = 0.0
    is_number: bool = False
    is_signed: bool = False

    def first_value(self, group: Mapping[str, Any]) -> float:
        """Returns the value of each element before the first step."""
        return float(group[self.start] if isinstance(self.start, str) else self.start)


#: What an optimizer says of all states of a weight, by their names: tensors in the order of the
#: native rule, and numbers in the order of a plan.
States = Mapping[str, State]

#: A step count, of the weight.
COUNT: States = {"step": State(is_number=True)}


def plain(*names: str) -> States:
    """Returns the records of tensors that all weights have, and that start at 0."""
    return dict.fromkeys(names, State())
