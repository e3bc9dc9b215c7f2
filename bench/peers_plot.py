#!/usr/bin/env python3
"""Draw the plots of results beside peers.

    peers_plot.py RESULTS.json [OUTPUT_FOLDER]      OUTPUT_FOLDER: that of the results unless given

time.png      ms a step by shape list, one panel for each optimizer and allocator
share.png     the share of the limit by size
threads.png   ms a step by number of threads
host.png      the host's cost: ms a step by number of tensors
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import peers_report
import plot as plots
from peers_report import of_purpose
from plot import COLOURS, MARKERS
from report import Results, subtitle
from shapes import size_name

STYLES = {"fused": "-", "torch_fused": "--"}


def plot_share(results: Results, path: Path) -> None:
    figure, axis = _axis(results, "elements of one tensor", "share of the limit")
    rows = of_purpose(results, "size")
    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    for name, style in STYLES.items():
        for index, optimizer in enumerate(optimizers):
            points = [
                (row["elements"], row["results"][name]["share"])
                for row in rows
                if row["optimizer"] == optimizer and "share" in row["results"].get(name, {})
            ]
            if points:
                label = f"{optimizer}, {results['implementations'][name]}"
                marker = MARKERS[index % len(MARKERS)]
                axis.plot(
                    *zip(*points, strict=True), style, marker=marker, color=f"C{index}", label=label
                )
    axis.axhline(1, color="black", lw=0.8)
    axis.set_xscale("log", base=2)
    sizes = sorted({row["elements"] for row in rows})
    axis.set_xticks(sizes, [size_name(size) for size in sizes])
    axis.set_ylim(bottom=0)
    _save(figure, axis, path)


def plot_against(purpose: str, key: str, results: Results, path: Path) -> None:
    """Time by what grows from row to row."""
    label = {"threads": "threads", "tensors": "tensors of 64 elements"}[key]
    figure, axis = _axis(results, label, "ms a step")
    rows = of_purpose(results, purpose)
    for name, title in results["implementations"].items():
        points = [
            (row[key], row["results"][name]["ms"])
            for row in rows
            if "ms" in row["results"].get(name, {})
        ]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", color=COLOURS.get(name), label=title)
    limit = [(row[key], row["limit"]["ms"]) for row in rows]
    axis.plot(*zip(*limit, strict=True), color="black", lw=1, label="limit")
    axis.set_xscale("log")
    axis.set_yscale("log")
    counts = sorted({row[key] for row in rows})
    axis.set_xticks(counts, [f"{count:,}" for count in counts])
    axis.xaxis.set_minor_formatter("")
    plots.plain_ticks(axis)
    _save(figure, axis, path)


def _axis(results: Results, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    axis.set_title(subtitle(results), fontsize=8)
    return figure, axis


def _save(figure: Figure, axis: Axes, path: Path) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False)
    figure.savefig(path, dpi=150)


def plot(results: Results, folder: Path) -> None:
    draw = {
        "time": plots.plot_time,
        "share": plot_share,
        "threads": partial(plot_against, "threads", "threads"),
        "host": partial(plot_against, "host", "tensors"),
    }
    for name in peers_report.plots(results):
        draw[name](results, folder / f"{name}.png")


if __name__ == "__main__":
    plots.main(plot, __doc__)
