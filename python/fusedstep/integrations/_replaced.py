"""Attributes of frameworks in whose place others stand until they are put back."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class _Attribute:
    owner: Any
    name: str
    is_own: bool
    """False if the owner inherits it."""
    theirs: Any
    ours: Any


#: All that are replaced, the oldest first.
_all: list[_Attribute] = []


class Replaced:
    """Is true while any are replaced."""

    def __init__(self) -> None:
        self._attributes: list[_Attribute] = []

    def __bool__(self) -> bool:
        return bool(self._attributes)

    def put(self, *attributes: tuple[Any, str, Any]) -> None:
        """Replaces attributes, given as owner, name and value; none if one is not there."""
        found = [
            _Attribute(owner, name, name in vars(owner), inspect.getattr_static(owner, name), value)
            for owner, name, value in attributes
        ]
        for each in found:
            setattr(each.owner, each.name, each.ours)
            self._attributes.append(each)
            _all.append(each)

    def put_back(self) -> None:
        """Puts all back, as static methods where they were static.

        What others have put there since stays. It may call ours, which then does what theirs does.
        """
        while self._attributes:
            each = self._attributes.pop()
            _all.remove(each)
            if vars(each.owner).get(each.name) is not each.ours:
                _leave_out(each)
            elif each.is_own:
                setattr(each.owner, each.name, each.theirs)
            else:
                delattr(each.owner, each.name)


def _leave_out(gone: _Attribute) -> None:
    """Takes a replacement out of the chain.

    Replacements made later will restore what was there before it.
    """
    for each in _all:
        if each.owner is gone.owner and each.name == gone.name and each.theirs is gone.ours:
            each.theirs, each.is_own = gone.theirs, gone.is_own
