#!/usr/bin/env python3
"""Draw the plots of a benchmark's results.

    plot.py RESULTS.json [OUTPUT_FOLDER]      OUTPUT_FOLDER: that of the results unless given

time.png      ms a step by shape list, one panel for each optimizer and allocator
speedup.png   speed-up of the fused step over the unfused one, by size
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report import columns, kernels, of_lists, optimizers, subtitle
from shapes import SIZES, size_name

COLOURS = {
    "unfused": "#8c8c8c",
    "for_loop": "#c5b0d5",
    "foreach": "#9467bd",
    "compiled": "#17becf",
    "torch_fused": "#1f77b4",
    "onednn": "#2ca02c",
    "deepspeed": "#bcbd22",
    "timm": "#8c564b",
    "pytorch_optimizer": "#c49c94",
    "torchao_8bit": "#e377c2",
    "torchao": "#f7b6d2",
    "bitsandbytes_8bit": "#ff7f0e",
    "bitsandbytes": "#ffbb00",
    "fused_keep_grad": "#ffbb78",
    "torch_graph": "#aec7e8",
    "apex": "#2ca02c",
    "deepspeed_lamb": "#bcbd22",
    "fused": "#d62728",
    "graph": "#ff9896",
}
STYLES = {"glibc": "--", "jemalloc": "-"}
LINES = {"kernels alone": "dotted", "limit": "solid"}
MARKERS = "osD^v"

#: What stands in place of a bar.
AMISS = ("wrong", "failed", "crashed", "late")

_SIZE_NAMES = {size.name for size in SIZES}


def _rows(results: dict[str, Any], optimizer: str, allocator: str | None) -> list[dict[str, Any]]:
    rows = of_lists(results, optimizer)
    return [row for row in rows if row.get("allocator") == allocator and "limit" in row]


def _allocators(results: dict[str, Any]) -> list[str | None]:
    """Those under which anything was measured. None: weights on a GPU."""
    return list(dict.fromkeys(row.get("allocator") for row in results["rows"] if "limit" in row))


def measured(results: dict[str, Any]) -> list[str]:
    """The optimizers of which at least a limit was measured."""
    return [
        name
        for name in optimizers(results)
        if any("limit" in row for row in of_lists(results, name))
    ] or optimizers(results)


def add_legend(figure: Figure, titles: Iterable[str], ncols: int) -> None:
    """Below the panels: what any of them shows of `titles`."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        handles |= dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    shown = [title for title in titles if title in handles]
    figure.legend(
        [handles[title] for title in shown],
        shown,
        loc="outside lower center",
        ncols=min(len(shown), ncols) or 1,
        frameon=False,
    )


def plot_time(results: dict[str, Any], path: Path, title: str | None = None) -> None:
    """Bars by shape list, with the limit and the kernels alone as lines across each group.

    Single sizes have their own plot.
    """
    names, allocators = measured(results), _allocators(results) or ["nothing measured"]
    size = (7 * len(allocators), 3.2 * len(names) + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(names), len(allocators), squeeze=False, sharey="row")
    for line, optimizer in zip(axes, names, strict=True):
        for axis, allocator in zip(line, allocators, strict=True):
            _time_panel(axis, results, optimizer, allocator)
    titles = [*results["implementations"].values(), *LINES]
    add_legend(figure, titles, 4 * len(allocators) if len(allocators) > 1 else 3)
    figure.suptitle(title or subtitle(results), fontsize=9)
    figure.savefig(path, dpi=150)


def _time_panel(axis: Axes, results: dict[str, Any], optimizer: str, allocator: str | None) -> None:
    found = _rows(results, optimizer, allocator)
    rows = [row for row in found if row["shapes"] not in _SIZE_NAMES] or found
    shown = columns(results, optimizer)
    width = 0.85 / max(len(shown), 1)
    for position, name in enumerate(shown):
        bars = []
        for place, row in enumerate(rows):
            middle = place - 0.425 + (position + 0.5) * width
            result = row["results"].get(name, {})
            if "ms" in result:
                bars.append((middle, result["ms"]))
            elif problem := next((word for word in result if word in AMISS), None):
                limit = row["limit"]["ms"]
                axis.text(middle, 1.2 * limit, problem, rotation=90, ha="center", fontsize=8)
        if bars:
            title = results["implementations"][name]
            axis.bar(*zip(*bars, strict=True), width, label=title, color=COLOURS.get(name))
    alone = kernels(results, optimizer)
    for place, row in enumerate(rows):
        levels = {"kernels alone": alone.get(row["shapes"]), "limit": row["limit"]["ms"]}
        for name, level in levels.items():
            if level is not None:
                ends = (place - 0.46, place + 0.46)
                axis.hlines(level, *ends, "black", LINES[name], lw=1.2, label=name)
    axis.set_yscale("log")
    plain_ticks(axis)
    axis.set_xticks(range(len(rows)), [row["title"] for row in rows], rotation=15, ha="right")
    axis.set_ylabel("ms a step")
    axis.set_title(", ".join(filter(None, (optimizer, allocator))), fontsize=10)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def plain_ticks(axis: Axes) -> None:
    """Of a logarithmic axis: numbers as one writes them."""
    axis.yaxis.set_major_formatter(_plain)
    axis.yaxis.set_minor_formatter(_two_or_five)


def _plain(value: float, _: int) -> str:
    return f"{value:,g}"


def _two_or_five(value: float, _: int) -> str:
    """Of the lesser ticks of a logarithmic axis, those that are labelled: 0.2, 0.5, 20, 50."""
    return _plain(value, _) if f"{value:.0e}"[0] in "25" else ""


def plot_speedup(results: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axis = figure.subplots()
    for index, optimizer in enumerate(optimizers(results)):
        for allocator in _allocators(results):
            points = [
                (row["elements"], row["results"]["fused"]["speedup"])
                for row in _rows(results, optimizer, allocator)
                if row["shapes"] in _SIZE_NAMES and "speedup" in row["results"].get("fused", {})
            ]
            if points:
                axis.plot(
                    *zip(*sorted(points), strict=True),
                    STYLES.get(allocator, ":"),
                    marker=MARKERS[index % len(MARKERS)],
                    color=f"C{index}",
                    label=f"{optimizer}, {allocator}",
                )
    axis.axhline(1, color="black", lw=0.8)
    axis.set_xscale("log", base=2)
    measured = {row["elements"] for row in results["rows"]}
    sizes = [size.elements for size in SIZES if size.elements in measured]
    axis.set_xticks(sizes, [size_name(size) for size in sizes])
    axis.set_yscale("log")
    plain_ticks(axis)
    axis.set_xlabel("elements of one tensor")
    axis.set_ylabel("speed-up, fused over unfused, ×")
    axis.grid(alpha=0.3, which="both")
    if axis.lines[1:]:
        axis.legend(frameon=False)
    axis.set_title(subtitle(results), fontsize=8)
    figure.savefig(path, dpi=150)


def plot(results: dict[str, Any], folder: Path) -> None:
    plot_time(results, folder / "time.png")
    plot_speedup(results, folder / "speedup.png")


def main(draw: Callable[[dict[str, Any], Path], None], usage: str) -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(usage)
    source = Path(sys.argv[1])
    results = json.loads(source.read_text(encoding="utf-8"))
    draw(results, Path(sys.argv[2]) if len(sys.argv) == 3 else source.parent)


if __name__ == "__main__":
    main(plot, __doc__)
