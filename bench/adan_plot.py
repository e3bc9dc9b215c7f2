#!/usr/bin/env python3
"""Draw the plots of Adan over the sizes of GPT-2.

    adan_plot.py RESULTS.json [OUTPUT_FOLDER]      OUTPUT_FOLDER: that of the results unless given

memory.png    how much more memory than with Adam, by size, beside the published
time.png      the time beside that of Adam's for-loop, by size, beside the published
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

import plot as plots
from adan_contestants import CONTESTANTS
from adan_published import DEVICE, PUBLISHED
from adan_report import ADANS, difference, ratio, rows_with, subtitle, title
from report import Results

COLOURS = {"adan_multi": "#d62728", "adan_single": "#ff9896", "published": "#8c8c8c"}

#: The authors' "not more than 15 %".
PUBLISHED_MOST = 15

Series = list[float | None]


def _bars(
    results: Results, table: str, label: str, series: dict[str, Series], colours: list[str]
) -> Figure:
    rows = rows_with(results, table)
    figure = Figure(figsize=(max(6, 0.5 * len(rows) + 2), 4.5), layout="constrained")
    axis = figure.subplots()
    width = 0.85 / len(series)
    for position, (name, values) in enumerate(series.items()):
        bars = [
            (place - 0.425 + (position + 0.5) * width, value)
            for place, value in enumerate(values)
            if value is not None
        ]
        if bars:
            axis.bar(*zip(*bars, strict=True), width, label=name, color=colours[position])
    axis.set_xticks(range(len(rows)), [title(row) for row in rows], rotation=60, ha="right")
    axis.set_ylabel(label)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axis.set_title(subtitle(results), fontsize=8)
    return figure


def plot_memory(results: Results, path: Path) -> None:
    rows = rows_with(results, "memory")
    series: dict[str, Series] = {
        f"{CONTESTANTS[name].title}, first step": [difference(row, name, "first") for row in rows]
        for name in ADANS
    }
    colours = [COLOURS[name] for name in ADANS]
    if results["device_type"] == "cuda":
        name = f"{CONTESTANTS['adan_multi'].title}, first step, reserved"
        series[name] = [difference(row, "adan_multi", "first_reserved") for row in rows]
        colours.append("#1f77b4")
    series[f"published, {DEVICE}, reserved"] = [PUBLISHED[row["config"]].difference for row in rows]
    colours.append(COLOURS["published"])
    figure = _bars(results, "memory", "memory beside Adam, %", series, colours)
    low, high = figure.axes[0].get_ylim()
    # Where all are alike, bars of hundredths would fill the plot.
    figure.axes[0].set_ylim(min(low, -1), max(high, PUBLISHED_MOST))
    figure.savefig(path, dpi=150)


def plot_time(results: Results, path: Path) -> None:
    rows = rows_with(results, "time")
    series: dict[str, Series] = {
        CONTESTANTS[name].title: [ratio(row, name) for row in rows] for name in ADANS
    }
    series[f"published, {DEVICE}"] = [PUBLISHED[row["config"]].ratio for row in rows]
    figure = _bars(
        results, "time", "time beside Adam's for-loop", series,
        [*(COLOURS[name] for name in ADANS), COLOURS["published"]],
    )  # fmt: skip
    figure.axes[0].axhline(1, color="black", lw=0.8)
    figure.savefig(path, dpi=150)


def plot(results: Results, folder: Path) -> None:
    for table, draw in (("memory", plot_memory), ("time", plot_time)):
        if rows_with(results, table):
            draw(results, folder / f"{table}.png")


if __name__ == "__main__":
    plots.main(plot, __doc__)
