"""The tables of steps: ms by optimizer and list of shapes, beside the limit and other libraries."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from reports.grid import OURS, Grid, Results, Row, cell, columns, milliseconds, rows_of

#: Reasons for a missing figure, as said behind an implementation's name.
PROBLEMS = {
    "wrong": "is wrong",
    "failed": "failed",
    "crashed": "crashed",
    "late": "took too long",
    "memory": "does not fit",
    "absent": "is absent",
    "skipped": "was skipped",
}


def subjects(results: Results) -> list[tuple[str, str]]:
    """The optimizer and purpose of each table, models first."""
    found = dict.fromkeys((row["purpose"], row["optimizer"]) for row in results["rows"])
    purposes = list(dict.fromkeys(purpose for purpose, _ in found))
    return [(name, purpose) for each in purposes for purpose, name in found if purpose == each]


def grid(results: Results, optimizer: str, purpose: str) -> Grid:
    """Columns that have anything in them."""
    rows, titles = rows_of(results, optimizer, purpose), results["implementations"]
    names = columns(results, rows)
    ours = [name for name in OURS if any("share" in row["results"].get(name, {}) for row in rows)]
    tell: dict[str, Callable[[Row], str | None]] = {
        "tensors": lambda row: row["title"],
        "allocator": lambda row: row.get("allocator"),
        **{titles[n]: lambda row, n=n: cell(row["results"].get(n, {})) for n in names},
        "limit": lambda row: milliseconds(row["limit"]["ms"]) if "limit" in row else None,
        "speed-up": lambda row: _times(row["results"].get("unfused", {})),
        "to contiguous": lambda row: _times(row.get("contiguous", {})),
        "GB/s": _rate,
        **{
            "share" if len(ours) == 1 else f"share, {titles[n]}": lambda row, n=n: _share(row, n)
            for n in ours
        },
    }
    cells = {title: [told(row) or "" for row in rows] for title, told in tell.items()}
    cells = {title: column for title, column in cells.items() if any(column)}
    lines = [list(line) for line in zip(*cells.values(), strict=True)]
    title = f"{optimizer}: ms a step" if purpose == "list" else f"{optimizer} by {purpose}"
    return Grid(title, list(cells), lines, words=1 + ("allocator" in cells))


def _times(result: dict[str, Any]) -> str | None:
    times = result.get("times")
    return None if times is None else f"{times:.2f}×" if times < 10 else f"{times:.1f}×"


def _share(row: Row, name: str) -> str | None:
    share = row["results"].get(name, {}).get("share")
    return None if share is None else f"{share:.2f}"


def _rate(row: Row) -> str | None:
    ours = row["results"].get("fused", {})
    return f"{row['bytes'] / ours['ms'] / 1e6:,.0f}" if "ms" in ours and "limit" in row else None


def grids(results: Results) -> list[Grid]:
    found = [grid(results, *subject) for subject in subjects(results)]
    return [each for each in found if each.lines]


def legend(results: Results) -> str:
    """Explains the columns that there are."""
    shown = {name for each in grids(results) for name in each.header}
    told = ["In parentheses: how many times the time of ours fused, in the same process."]
    texts = {
        "kernels alone": "kernels alone: ours fused without torch and Python.",
        "limit": "limit: the same reads and writes without the maths; share: its time over ours.",
        "ours, graph": "graph: a replay of the step captured in a CUDA graph.",
        "speed-up": "speed-up: ours fused against ours unfused.",
        "GB/s": "GB/s: bytes that a step must move at least.",
        "to contiguous": "to contiguous: ours against ours of contiguous weights, in turn.",
    }
    return " ".join(told + [text for name, text in texts.items() if name in shown])


def ratios(results: Results) -> Iterator[str]:
    """Tells the times of ours that each implementation takes, by optimizer."""
    for optimizer in dict.fromkeys(row["optimizer"] for row in results["rows"]):
        rows = rows_of(results, optimizer, "list")
        told = []
        for name, title in results["implementations"].items():
            found = [row["results"].get(name, {}).get("times") for row in rows]
            times = [each for each in found if each is not None]
            if len(times) > 1 and name not in OURS:
                span = f"{min(times):.2f} to {max(times):.2f}"
                told.append(f"{title} {statistics.median(times):.2f}× ({span})")
        if told:
            yield f"{optimizer}, times of ours fused, median over the lists: {'; '.join(told)}."


def problems(results: Results) -> Iterator[str]:
    """Tells what is not timed or cannot be, with the reason and where; and notes."""
    titles = results["implementations"]
    places: dict[str, list[str]] = {}
    for row in results["rows"]:
        where = ", ".join(filter(None, (row["optimizer"], row["title"], row.get("allocator"))))
        if "skipped" in row:
            places.setdefault(f"Skipped: {row['skipped']}", []).append(where)
        for name, result in row.get("results", {}).items():
            for problem in PROBLEMS.keys() & result.keys():
                told = f"Not timed: {titles[name]} {PROBLEMS[problem]}: {result[problem]}"
                places.setdefault(told, []).append(where)
            if result.get("share", 0) > 1:
                told = f"Above the limit, by an error of the limit or in the cache: {titles[name]}"
                places.setdefault(told, []).append(where)
    for told, found in places.items():
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield f"{told} ({found[0]}{more})."
    yield from results["notes"]


def remarks(results: Results) -> Iterator[str]:
    """Yields the lines below the tables."""
    yield legend(results)
    yield from ratios(results)
    yield from problems(results)


def command(table: str, results: Results) -> str:
    name = {"steps": "cuda" if "device" in results else ""}.get(table, table)
    device = " --device cuda" if "device" in results and table in ("peers", "embedding") else ""
    return f"`./run.sh bench{' ' * bool(name)}{name}{device}`"
