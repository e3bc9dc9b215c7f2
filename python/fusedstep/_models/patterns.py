"""Patterns of ``no_decay``: parts of the names of weights, and of the classes of their modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fusedstep._state.checks import did_you_mean


def as_patterns(no_decay: Any) -> tuple[str, ...]:
    """The patterns in lower case; none if ``no_decay`` is ``"auto"``."""
    if no_decay == "auto":
        return ()
    # A text is a sequence of texts too.
    if isinstance(no_decay, str) or not all(isinstance(each, str) for each in no_decay):
        raise TypeError(
            "no_decay must be 'auto' or a sequence of texts, such as ('bias',), "
            f"not {no_decay!r:.60}"
        )
    return tuple(each.lower() for each in no_decay)


def matches(names: Iterable[str], kinds: Iterable[str], patterns: Sequence[str]) -> bool:
    """Returns whether a weight with these names, in modules of these classes, is meant."""
    names = [name.lower() for name in names]
    parts = _parts(names, kinds)
    return any(
        any(pattern in text for text in (names if "." in pattern else parts))
        for pattern in patterns
    )


def check_patterns(
    patterns: Sequence[str], weights: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> None:
    """Raises a pattern that no weight matches. ``weights``: the names and classes of each."""
    for pattern in patterns:
        if any(matches(names, kinds, [pattern]) for names, kinds in weights):
            continue
        known = {part for names, kinds in weights for part in (*names, *_parts(names, kinds))}
        near = did_you_mean(pattern, sorted(each.lower() for each in known))
        raise ValueError(f"no_decay: no weight matches {pattern!r}{near and f': {near}'}")


def _parts(names: Iterable[str], kinds: Iterable[str]) -> list[str]:
    return [part for name in names for part in name.split(".")] + [each.lower() for each in kinds]
