"""A table of results, and the figures in its cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

Results = dict[str, Any]
Row = dict[str, Any]

#: Ours, which others are compared with, and in a CUDA graph.
OURS = ("fused", "graph")


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


def cell(result: dict[str, Any]) -> str:
    """A figure with how many times ours it is, or what is the matter."""
    if "ms" in result:
        times = f" ({result['times']:.2f}×)" if "times" in result else ""
        return milliseconds(result["ms"]) + times
    return next(iter(result), "–")


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
