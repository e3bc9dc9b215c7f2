#!/usr/bin/env python3
"""Draw the time, memory, optimizer's share and losses of the runs of a matrix.

nanonano_plot.py RESULTS.json FOLDER      writes RESULTS-iterations.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanonano_settings import ATTENTION
from reports import nanogpt
from reports.grid import Results, Row, subtitle
from reports.tables import write_plot

#: The figures that have a panel: key, title, factor.
PANELS = (
    ("ms", "ms an iteration, without the first", 1),
    ("peak", "peak of memory, MiB", 2**-20),
    ("share", "optimizer's share of an iteration, %", 100),
)

#: Text stays text, and the same results make the same file.
matplotlib.rcParams.update({"font.size": 9})


def series_of(results: Results) -> dict[str, list[Row]]:
    """Returns the rows that differ by attention only, by the name of what they share."""
    found: dict[str, list[Row]] = {}
    for optimizer, rows in nanogpt.rows_of(results).items():
        for row in rows:
            if "failed" not in row:
                found.setdefault(f"{optimizer}{', compiled' * row['compile']}", []).append(row)
    return found


def plot(results: Results) -> Figure:
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(2, 2).flat
    series = series_of(results)
    colours = {name: f"C{number}" for number, name in enumerate(series)}
    for axis, (key, title, factor) in zip(axes, PANELS, strict=False):
        _bars(axis, series, colours, key, factor)
        axis.set_title(title, fontsize=9, loc="left")
    _losses(axes[3], series, colours)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(subtitle(results), fontsize=8)
    return figure


def _bars(
    axis: Axes, series: dict[str, list[Row]], colours: dict[str, str], key: str, factor: float
) -> None:
    width = 0.85 / max(len(series), 1)
    for position, (name, rows) in enumerate(series.items()):
        middle = -0.425 + (position + 0.5) * width
        bars = [
            (ATTENTION.index(row["attn_type"]) + middle, factor * row[key])
            for row in rows
            if key in row
        ]
        if bars:
            axis.bar(*zip(*bars, strict=True), width, label=name, color=colours[name])
    axis.set_xticks(range(len(ATTENTION)), ATTENTION)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def _losses(axis: Axes, series: dict[str, list[Row]], colours: dict[str, str]) -> None:
    for name, rows in series.items():
        for row in rows:
            axis.plot(*zip(*row["losses"], strict=True), lw=0.8, color=colours[name])
    axis.set_title("loss by iteration, all runs", fontsize=9, loc="left")
    axis.grid(alpha=0.3)


def draw(file: Path, folder: Path) -> None:
    """Draws FILE-iterations.svg."""
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    write_plot(folder / f"{file.stem}-iterations.svg", plot(results))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
