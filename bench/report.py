#!/usr/bin/env python3
"""Results as tables: for the terminal, and as the page of a machine.

report.py FOLDER...      writes the README.md of these folders anew, from their JSON files
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

import adan_report
import nanogpt_report

Results = dict[str, Any]
Row = dict[str, Any]

#: The tables of a machine's page in their order, by the names of their files.
TITLES = {
    "steps": "Steps",
    "peers": "Beside other libraries",
    "adan": "Adan over sizes of GPT-2",
    "clipping": "Clipping and clearing in the step",
    "embedding": "Sparse gradients of an embedding table",
    "nanogpt": "Training a small GPT",
}

#: Ours, which others are compared with, and in a CUDA graph.
OURS = ("fused", "graph")

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


@dataclass(frozen=True)
class Grid:
    """A table: the first columns are words, the others figures."""

    title: str
    header: list[str]
    lines: list[list[str]]
    words: int = 1

    def markdown(self) -> str:
        marks = [":--"] * self.words + ["--:"] * (len(self.header) - self.words)
        lines = (self.header, marks, *self.lines)
        text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return f"### {self.title}\n\n{text}"

    def table(self) -> Table:
        """For the terminal: a column is as wide as its longest figure or word."""
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        columns = list(zip(self.header, *self.lines, strict=True))
        for name, *cells in columns:
            justify = "left" if name in self.header[: self.words] else "right"
            style = "bold" if name in ("ours fused", "speed-up") else None
            width = max(map(len, [*name.split(" "), *cells]))
            table.add_column(name, justify=justify, style=style, width=width)
        for cells in self.lines:
            table.add_row(*cells)
        return table


def milliseconds(value: float) -> str:
    """Three digits, where there are three: 0.0012, 0.0123, 1.23, 123, 1,234."""
    if value < 0.1:
        return f"{value:.4f}"
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"


def rows_of(results: Results, optimizer: str, purpose: str) -> list[Row]:
    """The allocators of a list follow one another."""
    found = [
        row
        for row in results["rows"]
        if (row["optimizer"], row["purpose"]) == (optimizer, purpose) and "results" in row
    ]
    order = list(dict.fromkeys(row["name"] for row in found))
    return sorted(found, key=lambda row: order.index(row["name"]))


def columns(results: Results, rows: list[Row]) -> list[str]:
    """Implementations that have at least a word to say about some rows, in their order."""
    return [n for n in results["implementations"] if any(row["results"].get(n) for row in rows)]


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


def cell(result: dict[str, Any]) -> str:
    """A figure with how many times ours it is, or what is the matter."""
    if "ms" in result:
        times = f" ({result['times']:.2f}×)" if "times" in result else ""
        return milliseconds(result["ms"]) + times
    return next(iter(result), "–")


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
    if results["suite"] == "adan":
        return adan_report.grids(results)
    if results["suite"] == "nanogpt":
        return nanogpt_report.grids(results)
    found = [grid(results, *subject) for subject in subjects(results)]
    return [each for each in found if each.lines]


# ---- What is said around the tables --------------------------------------------------------------


def subtitle(results: Results) -> str:
    threads = results.get("threads")
    facts = (
        results.get("device") or results["machine"]["cpu"],
        threads and "device" not in results and f"{threads} thread{'s' * (threads != 1)}",
        results.get("isa"),
        f"torch {results['torch']}",
        results["date"],
    )
    return ", ".join(filter(None, facts))


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
    """The lines below the tables."""
    if results["suite"] == "nanogpt":
        yield from nanogpt_report.remarks(results)
        return
    if results["suite"] == "adan":
        yield from adan_report.remarks(results)
    else:
        yield legend(results)
        yield from ratios(results)
    yield from problems(results)


# ---- The page of a machine -----------------------------------------------------------------------


def page(folder: Path) -> str:
    """All tables that a folder has the results of, and its plots."""
    found = {
        name: json.loads(file.read_text(encoding="utf-8"))
        for name in TITLES
        if (file := folder / f"{name}.json").is_file()
    }
    parts = [f"# Optimizer steps on {folder.name}"]
    for table, results in found.items():
        parts += [f"## {TITLES[table]}", f"{subtitle(results)}; {command(table, results)}."]
        parts += [each.markdown() for each in grids(results)]
        parts.append("\n".join(f"- {line}" for line in remarks(results)))
        parts += [f"![{plot.stem}]({plot.name})" for plot in sorted(folder.glob(f"{table}-*.svg"))]
    for file in sorted({*folder.glob("*.json")} - {folder / f"{name}.json" for name in TITLES}):
        parts.append(f"[{file.name}]({file.name}) is from `{maker(file)}`.")
    return "\n\n".join(parts) + "\n"


def maker(file: Path) -> str:
    """The command that a file names as `by`, or else the probe of the file's name."""
    results = json.loads(file.read_text(encoding="utf-8"))
    return results.get("by", f"bench/probes/{file.stem}")


def command(table: str, results: Results) -> str:
    if table == "nanogpt":
        return nanogpt_report.command(results)
    name = {"steps": "cuda" if "device" in results else ""}.get(table, table)
    device = " --device cuda" if "device" in results and table in ("peers", "embedding") else ""
    return f"`./run.sh bench{' ' * bool(name)}{name}{device}`"


def write_page(folder: Path) -> None:
    (folder / "README.md").write_text(page(folder), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for each in sys.argv[1:]:
        write_page(Path(each))
