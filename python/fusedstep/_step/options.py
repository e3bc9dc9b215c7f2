"""Options of groups that steps have checked, and errors of those that no step can take."""

from __future__ import annotations

from typing import Any

import torch

from fusedstep._options.kinds import numeric
from fusedstep._state.kinds import Group
from fusedstep._step.owner import Owner
from fusedstep._step.plan import Work, same

#: Options of these types cannot change while they are the same object; nor can tuples of them.
_IMMUTABLE = (bool, int, float, str, torch.dtype, type(None))


def has_passed(optimizer: Owner, group: Group) -> bool:
    """Returns whether a step has checked the options of a group; numbers may have changed since."""
    known = optimizer._passed.get(id(group["params"]))
    return known is not None and same(_items_of(group), known)


def note_passed(optimizer: Owner, group: Group) -> None:
    """Notes options that a step has checked, if none can change in place but for the ``lr``."""
    if not is_fixed(group, but_for="lr"):
        return
    passed = optimizer._passed
    passed[id(group["params"])] = _items_of(group)
    if len(passed) > len(optimizer._groups):  # groups have other lists of weights now
        there = {id(each["params"]) for each in optimizer._groups}
        for gone in passed.keys() - there:
            del passed[gone]


def _items_of(group: Group) -> list[Any]:
    """The names and the values of a group's options, as objects to compare; floats may change.

    Without the list of weights, which may be another one when the group has others.
    """
    options = {name: value for name, value in group.items() if name != "params"}
    return [*options, *(float if type(value) is float else value for value in options.values())]


def is_fixed(group: Group, *, but_for: str = "") -> bool:
    """Returns whether no option of a group can change in place, but for the one of this name."""
    return isinstance(group["params"], list) and all(
        name in ("params", but_for)
        or isinstance(value, _IMMUTABLE)
        or (isinstance(value, tuple) and all(isinstance(part, _IMMUTABLE) for part in value))
        for name, value in group.items()
    )


def option_error(optimizer: Owner, item: Work, error: Exception) -> Exception:
    """Returns the error of an option of a group, with the number of the group."""
    given = numeric(optimizer._option_kinds, item.group)
    return type(error)(f"Invalid options of group {item.number}, {given}: {error}")
