#!/usr/bin/env python3
"""Draw the plots of results beside peers on a CUDA device.

    cuda_peers_plot.py RESULTS.json [FOLDER]      FOLDER: that of the results unless given

time.png      ms a step by shape list, one panel for each optimizer
share.png     the share of the limit, likewise
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import plot as plots
from cuda_peers_report import subtitle
from plot import COLOURS
from report import Results, columns, of_lists


def plot_share(results: Results, path: Path) -> None:
    names = plots.measured(results)
    figure = Figure(figsize=(9, 2.8 * len(names) + 0.8), layout="constrained")
    axes = figure.subplots(len(names), 1, squeeze=False)
    for (axis,), optimizer in zip(axes, names, strict=True):
        _share_panel(axis, results, optimizer)
    plots.add_legend(figure, results["implementations"].values(), 5)
    figure.suptitle(subtitle(results), fontsize=9)
    figure.savefig(path, dpi=150)


def _share_panel(axis: Axes, results: Results, optimizer: str) -> None:
    rows = [row for row in of_lists(results, optimizer) if "limit" in row]
    shown = columns(results, optimizer)
    width = 0.85 / max(len(shown), 1)
    for position, name in enumerate(shown):
        bars = [
            (place - 0.425 + (position + 0.5) * width, row["results"][name]["share"])
            for place, row in enumerate(rows)
            if "share" in row["results"].get(name, {})
        ]
        if bars:
            title = results["implementations"][name]
            axis.bar(*zip(*bars, strict=True), width, label=title, color=COLOURS.get(name))
    axis.axhline(1, color="black", lw=1)
    axis.set_xticks(range(len(rows)), [row["title"] for row in rows], rotation=15, ha="right")
    axis.set_ylabel("share of the limit")
    axis.set_title(optimizer, fontsize=10)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def plot(results: Results, folder: Path) -> None:
    plots.plot_time(results, folder / "time.png", subtitle(results))
    plot_share(results, folder / "share.png")


if __name__ == "__main__":
    plots.main(plot, __doc__)
