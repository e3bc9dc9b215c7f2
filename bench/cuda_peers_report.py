"""The results beside peers on a CUDA device as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from rich.table import Table

import report
from report import Grid, Results, cell, columns, milliseconds, optimizers

OURS = ("fused", "graph")

LEGEND = (
    "Milliseconds a step of steps back to back, called from Python; graph: replays of a CUDA graph "
    "of a step. In parentheses: how many times the time of ours fused, in the same process; ours "
    "fused, the limit and the share are medians over these processes. limit: the same reads and "
    "writes without the maths, once each; share: the limit's time over the step's. DeepSpeed's "
    "LAMB has a formula of its own, by which it is checked."
)


def _rows(results: Results, optimizer: str) -> list[dict[str, Any]]:
    return [row for row in report.of_lists(results, optimizer) if "results" in row]


def grid(results: Results, optimizer: str) -> Grid:
    names = columns(results, optimizer)
    titles = [results["implementations"][name] for name in names]
    ours = [name for name in OURS if name in names]
    shares = [f"share, {results['implementations'][name]}" for name in ours]
    lines = []
    for row in _rows(results, optimizer):
        found = [row["results"].get(name, {}) for name in names]
        bound = milliseconds(row["limit"]["ms"]) if "limit" in row else "–"
        of_ours = [_share(row["results"].get(name, {})) for name in ours]
        lines.append([row["title"], *map(cell, found), bound, *of_ours])
    return Grid(f"{optimizer}: ms a step", ["tensors", *titles, "limit", *shares], lines)


def share_grid(results: Results) -> Grid:
    """Of all implementations, over all optimizers."""
    names = [name for name in results["implementations"] if name not in OURS]
    rows = [row for optimizer in optimizers(results) for row in _rows(results, optimizer)]
    shown = [name for name in names if any("share" in row["results"].get(name, {}) for row in rows)]
    shown += [name for name in OURS if name in results["implementations"]]
    lines = [
        [row["optimizer"], row["title"], *(_share(row["results"].get(name, {})) for name in shown)]
        for row in rows
    ]
    titles = [results["implementations"][name] for name in shown]
    return Grid("Share of the limit", ["optimizer", "tensors", *titles], lines, words=2)


def _share(result: dict[str, Any]) -> str:
    return f"{result['share']:.2f}" if "share" in result else "–"


def grids(results: Results) -> list[Grid]:
    found = [optimizer for optimizer in optimizers(results) if columns(results, optimizer)]
    return [*(grid(results, optimizer) for optimizer in found), share_grid(results)]


def subtitle(results: Results) -> str:
    return f"{results['device']}, torch {results['torch']}, {results['date']}"


def ratios(results: Results) -> Iterator[str]:
    """How many times the time of ours each peer takes, by optimizer."""
    for optimizer in optimizers(results):
        told = []
        for name, title in results["implementations"].items():
            found = [row["results"].get(name, {}) for row in _rows(results, optimizer)]
            times = [result["times"] for result in found if "times" in result]
            if times and name not in OURS:
                middle = f"{statistics.median(times):.2f}×"
                span = f" ({min(times):.2f} to {max(times):.2f})" if len(times) > 1 else ""
                told.append(f"{title} {middle}{span}")
        if told:
            yield f"{optimizer}, times of ours fused, median over the lists: {'; '.join(told)}."


def remarks(results: Results) -> list[str]:
    problems = report.problems(results)
    return [subtitle(results), LEGEND, *ratios(results), *problems]


def tables(results: Results) -> list[Table]:
    return [grid.table() for grid in grids(results)]


PLOTS = ("time", "share")


def markdown(results: Results) -> str:
    first, *others = remarks(results)
    parts = [f"# Optimizer steps beside peers on {results['device']}", first]
    parts += [grid.markdown() for grid in grids(results)]
    return report.document(parts, others, PLOTS)
