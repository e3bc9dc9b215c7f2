#!/usr/bin/env python3
"""Draw the plots of results.

plot.py RESULTS.json FOLDER [PLOT...]      PLOT: of those below; all that there are rows for

RESULTS-times.svg      how many times the time of ours others take, by list, a panel an optimizer
RESULTS-PURPOSE.svg    ms a step by what grows from row to row: size, threads, host
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report import OURS, columns, rows_of, subjects, subtitle

Results = dict[str, Any]
Row = dict[str, Any]

#: By what the rows of a purpose grow, and its name.
GROWING = {
    "size": ("elements", "elements of one tensor"),
    "threads": ("threads", "threads"),
    "host": ("tensors", "tensors of 64 elements"),
}

#: Colours of those that are in most plots; others take what matplotlib has left.
COLOURS = {"fused": "#d62728", "graph": "#ff9896", "unfused": "#8c8c8c", "torch_fused": "#1f77b4"}
CYCLE = ("#9467bd", "#2ca02c", "#ff7f0e", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#c5b0d5")

#: Text stays text, and the same results make the same file.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fusedstep", "font.size": 9})


def colours(results: Results) -> dict[str, str]:
    others = [name for name in results["implementations"] if name not in COLOURS]
    return COLOURS | {name: CYCLE[i % len(CYCLE)] for i, name in enumerate(others)}


def of_lists(results: Results, optimizer: str) -> list[Row]:
    """Rows that were measured, under one allocator: glibc's, or that of the only run."""
    rows = [row for row in rows_of(results, optimizer, "list") if "ms" in ours(row)]
    first = rows[0].get("allocator") if rows else None
    return [row for row in rows if row.get("allocator") == first]


def ours(row: Row) -> dict[str, Any]:
    return row["results"].get("fused", {})


def plot_times(results: Results) -> Figure:
    """Bars by list, a panel for each optimizer; where there is none, what is the matter."""
    panels = {name: of_lists(results, name) for name, of in subjects(results) if of == "list"}
    panels = {name: rows for name, rows in panels.items() if len(rows) > 1}
    figure = Figure(figsize=(9, 2.4 * len(panels) + 0.9), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axis, (optimizer, rows) in zip(axes, panels.items(), strict=True):
        _bars(axis, results, rows)
        axis.axhline(1, color="black", lw=1.2, label="ours fused")
        axis.set_xticks(range(len(rows)), [row["title"] for row in rows], rotation=12, ha="right")
        axis.set_title(optimizer, fontsize=10, loc="left")
        axis.set_ylabel("times of ours")
        _logarithmic(axis.yaxis)
    return _finished(figure, results)


def _bars(axis: Axes, results: Results, rows: list[Row]) -> None:
    names = [name for name in columns(results, rows) if name not in (*OURS, "kernels")]
    width = 0.85 / max(len(names), 1)
    for position, name in enumerate(names):
        bars = []
        for place, row in enumerate(rows):
            middle = place - 0.425 + (position + 0.5) * width
            result = row["results"].get(name, {})
            if "times" in result:
                bars.append((middle, result["times"]))
            elif result:
                axis.text(middle, 1.1, next(iter(result)), rotation=90, ha="center", fontsize=7)
        if bars:
            title = results["implementations"][name]
            axis.bar(*zip(*bars, strict=True), width, label=title, color=colours(results)[name])


def plot_growing(purpose: str, results: Results) -> Figure:
    """Lines by what grows from row to row, a panel for each optimizer."""
    key, label = GROWING[purpose]
    optimizers = [name for name, of in subjects(results) if of == purpose]
    figure = Figure(figsize=(max(7, 3.5 * len(optimizers)), 4.2), layout="constrained")
    panels = figure.subplots(1, len(optimizers), squeeze=False, sharey=True)[0]
    for axis, optimizer in zip(panels, optimizers, strict=True):
        rows = [r for r in rows_of(results, optimizer, purpose) if "limit" in r and "ms" in ours(r)]
        first = rows[0].get("allocator") if rows else None
        rows = [row for row in rows if row.get("allocator") == first]
        lines = {name: (title, lambda row, n=name: row["results"].get(n, {}).get("ms"))
                 for name, title in results["implementations"].items()}  # fmt: skip
        lines["limit"] = ("limit", lambda row: row["limit"]["ms"])
        for name, (title, value) in lines.items():
            points = [(row[key], value(row)) for row in rows if value(row) is not None]
            if points:
                colour = "black" if name == "limit" else colours(results)[name]
                axis.plot(*zip(*points, strict=True), marker=".", color=colour, label=title)
        _logarithmic(axis.xaxis)
        _logarithmic(axis.yaxis)
        axis.set_xlabel(label)
        axis.set_title(optimizer, fontsize=10)
    panels[0].set_ylabel("ms a step")
    return _finished(figure, results)


def _logarithmic(axis: Any) -> None:
    """Numbers as one writes them; of the lesser ticks those with a 2 or 5."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_minor_formatter(lambda value, _: f"{value:,g}" if f"{value:.0e}"[0] in "25" else "")


def _finished(figure: Figure, results: Results) -> Figure:
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        handles |= dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(subtitle(results), fontsize=8)
    return figure


def plots(results: Results) -> dict[str, Callable[[Results], Figure]]:
    """Those that there are rows for."""
    found: dict[str, Callable[[Results], Figure]] = {}
    names = [name for name, of in subjects(results) if of == "list"]
    if any(len(of_lists(results, name)) > 1 for name in names):
        found["times"] = plot_times
    purposes = {of for _, of in subjects(results)}
    found |= {name: partial(plot_growing, name) for name in GROWING if name in purposes}
    return found


def draw(file: Path, folder: Path, wanted: Iterable[str] | None = None) -> None:
    results = json.loads(file.read_text(encoding="utf-8"))
    for name, make in plots(results).items():
        if wanted is None or name in wanted:
            figure = make(results)
            figure.savefig(folder / f"{file.stem}-{name}.svg", metadata={"Date": None})


def main() -> None:
    file, folder, *wanted = sys.argv[1:]
    draw(Path(file), Path(folder), wanted or None)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main()
