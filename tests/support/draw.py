"""Chooses the combinations of parameters that a run has: all, the plain rows, or a draw.

A draw has every law: on the plain rows of tests/optimizers and the first row of each family, with
each value of each other parameter, and a sixteenth of all further combinations, chosen by a text
(`./run.sh test` takes the commit's hash). A test that is marked `whole` has all its combinations in
each draw; `whole(mode="default")` those in which the parameter `mode` is "default".
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from support.cases import FAMILIES, PLAIN, WITH_COUNTS, WITH_STATES

SHARE = 16
"""Of so many further combinations a draw has one."""

PLAIN_ROWS = (*PLAIN, *WITH_STATES, *WITH_COUNTS)


def parameters(item: Any) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def is_plain(item: Any) -> bool:
    """Takes no row, or a plain one."""
    row = parameters(item).get("case")
    return row is None or row in PLAIN_ROWS


def is_whole(item: Any) -> bool:
    values = parameters(item)
    return any(
        all(values.get(name) == value for name, value in mark.kwargs.items())
        for mark in item.iter_markers("whole")
    )


def _number(text: str, item: Any) -> int:
    """Orders the combinations of a function; another text gives another order."""
    return int.from_bytes(hashlib.sha256(f"{text} {item.nodeid}".encode()).digest()[:8], "little")


def _key(value: Any) -> Any:
    """The same for equal values, which may have no hash."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value


def _values(item: Any) -> set[tuple[str, Any]]:
    """The values that a draw must contain: every value, but of the rows the plain ones alone."""
    return {
        (name, _key(value))
        for name, value in parameters(item).items()
        if name != "case" or value in PLAIN_ROWS
    }


def _drawn(combinations: list[Any], text: str) -> Iterator[Any]:
    """The combinations of one function that a draw has."""
    seen: set[tuple[str, Any]] = set()
    is_first = True
    for item in sorted(combinations, key=lambda item: _number(text, item)):
        values = _values(item)
        of_family = parameters(item).get("case") in FAMILIES
        is_due = _number(text, item) % SHARE == 0
        if is_first or of_family or is_due or is_whole(item) or not values <= seen:
            yield item
            seen |= values
            is_first = False


def drawn(items: list[Any], text: str) -> list[Any]:
    """The items of a draw, in their order."""
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept = {item for each in functions.values() for item in _drawn(each, text)}
    return [item for item in items if item in kept]
