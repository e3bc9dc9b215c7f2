"""The results beside peers as tables: those of report.py, and what else was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

import report
from report import Grid, Results, milliseconds

#: Lists whose time is told against that of contiguous weights.
LAYOUTS = {
    "transposed": "[4096, 1024] transposed to contiguous",
    "sliced": "[4096, 1024] every second column to contiguous",
    "channels-last": "ResNet-50 channels-last to contiguous",
}


def of_purpose(results: Results, purpose: str) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if row["purpose"] == purpose and "limit" in row]


def grids(results: Results) -> Iterator[Grid]:
    for optimizer in report.optimizers(results):
        if report.columns(results, optimizer):
            yield report.grid(results, optimizer)
    made = (_ratios(results), _threads(results), _host(results), _sizes(results))
    yield from (grid for grid in made if grid.lines)


def _ratios(results: Results) -> Grid:
    """Of ours: layouts to contiguous, in turn within one process; LAMB to Adam."""
    rows = [
        row
        for row in of_purpose(results, "list")
        if row["allocator"] == "glibc"
        and row["precision"] == "float32"
        and "ms" in row["results"]["fused"]
    ]
    ours = {(row["optimizer"], row["shapes"]): row["results"]["fused"]["ms"] for row in rows}
    times = {
        (row["optimizer"], row["shapes"]): f"{row['contiguous']['times']:.2f}"
        for row in rows
        if "contiguous" in row
    }
    optimizers = list(dict.fromkeys(optimizer for optimizer, _ in ours))
    lines = [
        [title, *(times.get((name, shapes), "") for name in optimizers)]
        for shapes, title in LAYOUTS.items()
    ]
    for row in rows:
        if row["optimizer"] == "lamb":
            shapes = row["shapes"]
            ratio = _ratio(ours.get(("lamb", shapes)), ours.get(("adam", shapes)))
            cells = [ratio if name == "lamb" else "" for name in optimizers]
            lines.append([f"{row['title']}: LAMB to Adam", *cells])
    lines = [line for line in lines if any(line[1:])]
    return Grid("Ours against ours: time to time", ["", *optimizers], lines)


def _ratio(time: float | None, other: float | None) -> str:
    return f"{time / other:.2f}" if time and other else ""


def _threads(results: Results) -> Grid:
    rows = of_purpose(results, "threads")
    names = [n for n in results["implementations"] if any(n in row["results"] for row in rows)]
    header = ["threads", *(results["implementations"][name] for name in names), "limit", "share"]
    lines = [
        [
            f"{row['threads']}",
            *(report.cell(row["results"].get(name, {})) for name in names),
            milliseconds(row["limit"]["ms"]),
            _share(row["results"].get("fused", {})),
        ]
        for row in rows
    ]
    title = f"Threads: {rows[0]['optimizer']}, {rows[0]['title']}, ms a step" if rows else ""
    return Grid(title, header, lines)


def _share(result: dict[str, Any]) -> str:
    return f"{result['share']:.2f}" if "share" in result else ""


def _host(results: Results) -> Grid:
    rows = of_purpose(results, "host")
    names = [n for n in results["implementations"] if any(n in row["results"] for row in rows)]
    titles = [results["implementations"][name] for name in names]
    lines = []
    for row in rows:
        found = [row["results"].get(name, {}) for name in names]
        each = [f"{1e3 * f['ms'] / row['tensors']:.2f}" if "ms" in f else "–" for f in found]
        lines.append([f"{row['tensors']:,}", *map(report.cell, found), *each])
    header = ["tensors of 64", *titles, *(f"{title}, µs a tensor" for title in titles)]
    title = f"The host's cost: {rows[0]['optimizer']}, ms a step" if rows else ""
    return Grid(title, header, lines)


def _sizes(results: Results) -> Grid:
    rows = of_purpose(results, "size")
    columns = list(
        dict.fromkeys(
            (row["optimizer"], name)
            for row in rows
            for name in results["implementations"]
            if "share" in row["results"].get(name, {})
        )
    )
    titles = [f"{name}, {results['implementations'][each]}" for name, each in columns]
    found = {(row["optimizer"], row["shapes"]): row["results"] for row in rows}
    lines = [
        [title, *(_share(found.get((name, shapes), {}).get(each, {})) for name, each in columns)]
        for shapes, title in dict.fromkeys((row["shapes"], row["title"]) for row in rows)
    ]
    return Grid("Share of the limit by size", ["one tensor", *titles], lines)


def legend(results: Results) -> str:
    told = (
        "In parentheses: how many times the time of ours, in the same process. Ours, the limit and "
        "the share are medians over these processes; the share is the limit's time over ours."
    )
    if results.get("kernels"):
        told += " kernels alone: ours fused without torch and Python."
    return told


def faults(results: Results) -> Iterator[str]:
    """A step cannot be faster than the limit."""
    for row in results["rows"]:
        for name, result in row.get("results", {}).items():
            if result.get("share", 0) > 1:
                yield (
                    f"Above the limit, which is a fault of the limit or a busy machine: {name}, "
                    f"{row['name']}, {row['allocator']}: {result['share']:.2f}."
                )


def remarks(results: Results) -> list[str]:
    return [
        report.subtitle(results),
        *filter(None, [report.limit_line(results)]),
        legend(results),
        *report.against_torch(results),
        *faults(results),
        *report.problems(results),
    ]


def tables(results: Results) -> list[Table]:
    return [grid.table() for grid in grids(results)]


#: Plots besides, and the purpose of the rows that each shows.
_PLOTS = {"share": "size", "threads": "threads", "host": "host"}


def plots(results: Results) -> list[str]:
    """The plot of lists, and those that there are rows for."""
    return ["time", *(name for name, purpose in _PLOTS.items() if of_purpose(results, purpose))]


def markdown(results: Results) -> str:
    subtitle, *others = remarks(results)
    parts = [f"# Optimizer steps beside peers on {results['machine']['cpu']}", subtitle]
    parts += [grid.markdown() for grid in grids(results)]
    return report.document(parts, others, plots(results))
