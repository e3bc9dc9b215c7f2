"""Makes a failing case small: leaves things out for as long as it fails in the same way."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

Case = dict[str, Any]


def shrink(case: Case, fails: Callable[[Case], bool], most_runs: int = 400) -> Case:
    """The smallest case found, which `fails` as well; the case itself does."""
    runs = 0
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if runs == most_runs:
                return case
            runs += 1
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with a choice less, those that leave out most first."""
    for names in (["steps"], ["settings"], ["groups"]):
        yield from _shorter(case, names)
    for index, _ in enumerate(case["groups"]):
        yield from _shorter(case, ["groups", index, "weights"])
        yield from _without_keys(case, ["groups", index, "options"])
    yield from _without_keys(case, ["options"])
    for index, step in enumerate(case["steps"]):
        yield from _shorter(case, ["steps", index, "changes"])
        yield from _without_keys(case, ["steps", index, "call"])
        if step["grads"]:
            yield _with(case, ["steps", index, "grads"], {})
        yield from _without_keys(case, ["steps", index, "grads"])
        for key in step["grads"]:
            yield from _without_keys(case, ["steps", index, "grads", key], kept=("how", "of"))
        for number, change in enumerate(step["changes"]):
            if change["do"] == "group":
                yield from _shorter(case, ["steps", index, "changes", number, "of", "weights"])
    for number, group in enumerate(case["groups"]):
        for index, weight in enumerate(group["weights"]):
            where = ["groups", number, "weights", index]
            yield from _without_keys(case, where, kept=("id", "dtype", "shape"))
            if "strides" not in weight and not _has_strides(case):
                yield from _less_elements(case, where, weight["shape"])
    for index, (isa, threads) in enumerate(case["settings"]):
        if threads > 1:
            yield _with(case, ["settings", index], [isa, threads // 2])


def _has_strides(case: Case) -> bool:
    """True if a gradient or a change has strides. These go with the shape."""
    gradients = (g for step in case["steps"] for g in step["grads"].values())
    changes = (change for step in case["steps"] for change in step["changes"])
    return any("strides" in each for each in (*gradients, *changes))


def _less_elements(case: Case, where: list, shape: list[int]) -> Iterator[Case]:
    if math.prod(shape) <= 1:
        return
    for dim, size in enumerate(shape):
        yield _with(case, [*where, "shape"], [*shape[:dim], *shape[dim + 1 :]])
        for less in (1, size // 2, size - 1):
            if 0 < less < size:
                yield _with(case, [*where, "shape"], [*shape[:dim], less, *shape[dim + 1 :]])


def _shorter(case: Case, where: list) -> Iterator[Case]:
    """Without a half of a list, and then without each of its entries, the last one first."""
    entries = _at(case, where)
    fewest = 1 if where[0] in ("steps", "settings", "groups") and len(where) == 1 else 0
    half = len(entries) // 2
    for part in (entries[:half], entries[half:]):
        if fewest <= len(part) < len(entries) - 1:
            yield _with(case, where, part)
    for index in reversed(range(len(entries))):
        if len(entries) > fewest:
            yield _with(case, where, entries[:index] + entries[index + 1 :])


def _without_keys(case: Case, where: list, kept: tuple[str, ...] = ()) -> Iterator[Case]:
    entries = _at(case, where)
    names = [name for name in entries if name not in kept]
    if len(names) > 1:
        yield _with(case, where, {name: entries[name] for name in kept if name in entries})
    for name in names:
        yield _with(case, where, {key: entries[key] for key in entries if key != name})


def _at(case: Case, where: list) -> Any:
    entry = case
    for key in where:
        entry = entry[key]
    return entry


def _with(case: Case, where: list, value: Any) -> Case:
    """A copy with another value at a place."""
    smaller = copy.deepcopy(case)
    *path, last = where
    _at(smaller, path)[last] = copy.deepcopy(value)
    return smaller
