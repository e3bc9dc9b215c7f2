#!/usr/bin/env python3
"""Draw how many times the time of ours others take, by list, a panel for each optimizer.

PYTHONPATH=bench python -m reports.plot RESULTS.json FOLDER      writes RESULTS-times.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reports.grid import OURS, Results, Row, columns, rows_of, subtitle
from reports.steps import subjects
from reports.tables import write_plot

#: Colours of those that are in most plots; others take what matplotlib has left.
COLOURS = {"unfused": "#8c8c8c", "torch_fused": "#1f77b4"}
CYCLE = ("#9467bd", "#2ca02c", "#ff7f0e", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#c5b0d5")

#: Text stays text, and the same results make the same file.
matplotlib.rcParams.update({"font.size": 9})


def colours(results: Results) -> dict[str, str]:
    others = [name for name in results["implementations"] if name not in COLOURS]
    return COLOURS | {name: CYCLE[i % len(CYCLE)] for i, name in enumerate(others)}


def panels_of(results: Results) -> dict[str, list[Row]]:
    """Optimizers that were measured on several lists, under glibc's or the only allocator."""
    found = {}
    for name, purpose in subjects(results):
        rows = rows_of(results, name, purpose)
        rows = [row for row in rows if "ms" in row["results"].get("fused", {})]
        rows = [row for row in rows if row.get("allocator") == rows[0].get("allocator")]
        if purpose == "list" and len(rows) > 1:
            found[name] = rows
    return found


def plot_times(results: Results, panels: dict[str, list[Row]]) -> Figure:
    """Bars by list, a panel for each optimizer; where there is none, what is the matter."""
    figure = Figure(figsize=(9, 2.4 * len(panels) + 0.9), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    handles: dict[str, Any] = {}
    for axis, (optimizer, rows) in zip(axes, panels.items(), strict=True):
        _bars(axis, results, rows)
        axis.axhline(1, color="black", lw=1.2, label="ours fused")
        axis.set_xticks(range(len(rows)), [row["title"] for row in rows], rotation=12, ha="right")
        axis.set_title(optimizer, fontsize=10, loc="left")
        axis.set_ylabel("times of ours")
        _logarithmic(axis.yaxis)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        handles |= dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(subtitle(results), fontsize=8)
    return figure


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


def _logarithmic(axis: Any) -> None:
    """Numbers as one writes them; of the lesser ticks those with a 2 or 5."""
    axis.axes.set_yscale("log")
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_minor_formatter(lambda value, _: f"{value:,g}" if f"{value:.0e}"[0] in "25" else "")


def draw(file: Path, folder: Path) -> None:
    """Draws FILE-times.svg, if there is more than one list."""
    results = json.loads(file.read_text(encoding="utf-8"))
    if panels := panels_of(results):
        figure = plot_times(results, panels)
        write_plot(folder / f"{file.stem}-times.svg", figure)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
