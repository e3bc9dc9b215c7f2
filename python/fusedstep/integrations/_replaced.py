"""Attributes of frameworks in whose place others stand until they are put back."""

from __future__ import annotations

import inspect
from typing import Any


class Replaced:
    """Is true while any are replaced."""

    def __init__(self) -> None:
        self._theirs: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._theirs)

    def put(self, owner: Any, name: str, value: Any) -> None:
        self._theirs.append((owner, name, inspect.getattr_static(owner, name)))
        setattr(owner, name, value)

    def put_back(self) -> None:
        """Puts all back, as static methods where they were static."""
        while self._theirs:
            setattr(*self._theirs.pop())
