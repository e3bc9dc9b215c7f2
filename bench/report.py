"""Results as tables, for the terminal and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Results = dict[str, Any]


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
        return f"## {self.title}\n\n{text}"

    def table(self, left_out: Iterable[str] = ()) -> Table:
        """For the terminal, without some columns."""
        table = Table(
            title=self.title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        if left_out:
            table.caption = f"Without {'; '.join(left_out)}: the terminal is too narrow."
            table.caption_justify = "left"
        columns = zip(self.header, *self.lines, strict=True)
        shown = [cells for cells in columns if cells[0] not in left_out]
        for name, *cells in shown:
            # As wide as its longest figure or word: headers wrap, figures do not.
            table.add_column(
                name,
                justify="left" if name in self.header[: self.words] else "right",
                style="bold" if name in ("ours fused", "speed-up") else None,
                width=max(map(len, [*name.split(" "), *cells])),
            )
        last = None
        for title, *cells in zip(*(cells for _, *cells in shown), strict=True):
            table.add_row("" if title == last else title, *cells)
            last = title
        return table


def of_lists(results: Results, optimizer: str) -> list[dict[str, Any]]:
    """The rows of an optimizer's table. Beside peers, others are measured for their plots."""
    return [
        row
        for row in results["rows"]
        if row["optimizer"] == optimizer and row.get("purpose", "list") == "list"
    ]


def optimizers(results: Results) -> list[str]:
    return list(dict.fromkeys(row["optimizer"] for row in results["rows"]))


def columns(results: Results, optimizer: str) -> list[str]:
    """Implementations that have at least a word to say about an optimizer, in their order."""
    rows = of_lists(results, optimizer)
    return [
        name
        for name in results["implementations"]
        if any(row.get("results", {}).get(name) for row in rows)
    ]


def milliseconds(value: float) -> str:
    """Three digits, where there are three: 0.0012, 0.0123, 1.23, 123, 1,234."""
    if value < 0.1:
        return f"{value:.4f}"
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"


def kernels(results: Results, optimizer: str) -> dict[str, float]:
    """Milliseconds of the kernels alone by shape list. Results of old may have none."""
    found = results.get("kernels", [])
    return {each["shapes"]: each["ms"] for each in found if each["optimizer"] == optimizer}


def header(results: Results, optimizer: str) -> list[str]:
    titles = [results["implementations"][name] for name in columns(results, optimizer)]
    if kernels(results, optimizer):
        titles.append("kernels alone")
    return ["tensors", "allocator", *titles, "limit", "speed-up", "GB/s", "share"]


def lines(results: Results, optimizer: str) -> Iterator[list[str]]:
    """One line a shape list and allocator, the allocators of a list together."""
    names, alone = columns(results, optimizer), kernels(results, optimizer)
    rows = [row for row in of_lists(results, optimizer) if "results" in row]
    order = list(dict.fromkeys(row["shapes"] for row in rows))
    for row in sorted(rows, key=lambda row: order.index(row["shapes"])):
        cells = [cell(row["results"].get(name, {})) for name in names]
        if alone:
            cells.append(milliseconds(alone[row["shapes"]]) if row["shapes"] in alone else "–")
        ours = row["results"].get("fused", {})
        yield [
            row["title"],
            row["allocator"],
            *cells,
            milliseconds(row["limit"]["ms"]) if "limit" in row else "–",
            f"{ours['speedup']:.1f}×" if "speedup" in ours else "",
            f"{ours['gbps']:.1f}" if "gbps" in ours else "",
            f"{ours['share']:.2f}" if "share" in ours else "",
        ]


def cell(result: dict[str, Any]) -> str:
    """A figure, beside peers with how many times ours it is; or what is the matter."""
    if "ms" in result:
        times = f" ({result['times']:.2f}×)" if "times" in result else ""
        return milliseconds(result["ms"]) + times
    return next(iter(result), "–")


#: Columns that a narrow terminal does without, the first to go first.
EXPENDABLE = (
    "torch for-loop", "torch foreach", "ours, keep_grad", "GB/s", "oneDNN", "kernels alone",
    "share", "limit",
)  # fmt: skip


def grid(results: Results, optimizer: str) -> Grid:
    title = f"{optimizer}: ms a step"
    return Grid(title, header(results, optimizer), list(lines(results, optimizer)), words=2)


def rich_tables(results: Results, width: int) -> Iterator[Table]:
    """A table for each optimizer that fits, if it can, into so many characters of width."""
    for optimizer in optimizers(results):
        left_out: list[str] = []
        found = grid(results, optimizer)
        for name in EXPENDABLE:
            if width_of(found.table(left_out)) <= width:
                break
            if name in found.header:
                left_out.append(name)
        yield found.table(left_out)


def width_of(table: Table) -> int:
    console = Console(width=1000)
    return console.measure(table).maximum


def limit_line(results: Results) -> str:
    """What the limit's loops reach on this machine, in and out of the caches."""
    rates = [
        (row["bytes"] / row["limit"]["ms"] / 1e6, row["title"])
        for optimizer in optimizers(results)
        for row in of_lists(results, optimizer)
        if "limit" in row and row["elements"] >= 1 << 16
    ]
    if not rates:
        return ""
    (slowest, slow), (fastest, fast) = min(rates), max(rates)
    return (
        f"Limit of this machine, the same reads and writes without the maths: {fastest:,.0f} GB/s "
        f"({fast}) to {slowest:,.0f} GB/s ({slow})."
    )


def legend(results: Results) -> str:
    told = (
        "speed-up: ours fused against ours unfused; GB/s: bytes that a step must move at least; "
        "share: the limit's time over ours."
    )
    if results.get("kernels"):
        told = f"kernels alone: ours fused without torch and Python, under any allocator; {told}"
    return told


def subtitle(results: Results) -> str:
    threads = results["threads"]
    facts = (
        results["machine"]["cpu"],
        f"{threads} thread{'s' * (threads != 1)}",
        results["isa"] or "no native library",
        f"torch {results['torch']}",
        results["dtype"],
        results["date"],
    )
    return ", ".join(facts)


def against_torch(results: Results) -> Iterator[str]:
    """How much faster than torch's fused step, median over the lists, by allocator."""
    for optimizer in optimizers(results):
        ratios: dict[str, list[float]] = {}
        for row in of_lists(results, optimizer):
            ours, torch = (row.get("results", {}).get(n, {}) for n in ("fused", "torch_fused"))
            if "ms" in ours and "ms" in torch:
                times = torch.get("times", torch["ms"] / ours["ms"])
                ratios.setdefault(row["allocator"], []).append(times)
        medians = [f"{statistics.median(found):.2f}× ({name})" for name, found in ratios.items()]
        if medians:
            yield f"{optimizer} against torch fused, median over the lists: {', '.join(medians)}."


#: What may be the matter with an implementation, as said behind its name.
PROBLEMS = {
    "wrong": "is wrong",
    "failed": "failed",
    "crashed": "crashed",
    "late": "took too long",
    "absent": "is absent",
    "skipped": "was skipped",
}


def problems(results: Results) -> Iterator[str]:
    """What is not timed, with the reason and where; and notes."""
    titles = results["implementations"]
    places: dict[str, list[str]] = {}
    skipped: dict[str, list[str]] = {}
    for row in results["rows"]:
        threads = f" on {row['threads']} threads" if row.get("threads") else ""
        words = (row["optimizer"], f"{row['title']}{threads}", row.get("allocator"))
        where = ", ".join(filter(None, words))
        if "skipped" in row:
            skipped.setdefault(row["skipped"], []).append(where)
        for name, result in row.get("results", {}).items():
            for problem, reason in result.items():
                if problem in PROBLEMS:
                    told = f"{titles[name]} {PROBLEMS[problem]}: {reason}"
                    places.setdefault(told, []).append(where)
    for reason, found in skipped.items():
        yield f"Skipped: {'; '.join(found)}: {reason}."
    for told, found in places.items():
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield f"Not timed: {told} ({found[0]}{more})."
    yield from results["notes"]


def remarks(results: Results) -> Iterator[str]:
    """What belongs below the tables."""
    yield subtitle(results)
    yield from filter(None, [limit_line(results)])
    yield legend(results)
    yield from against_torch(results)
    yield from problems(results)


def markdown(results: Results) -> str:
    parts = [f"# Optimizer steps on {results['machine']['cpu']}", subtitle(results)]
    parts += [grid(results, optimizer).markdown() for optimizer in optimizers(results)]
    parts.append(" ".join(filter(None, [limit_line(results), legend(results)])))
    return document(parts, [*against_torch(results), *problems(results)], ("time", "speedup"))


def document(parts: list[str], remarks: list[str], plots: Iterable[str]) -> str:
    if remarks:
        parts.append("\n".join(f"- {line}" for line in remarks))
    parts.append("\n\n".join(f"![{name}]({name}.png)" for name in plots))
    return "\n\n".join(parts) + "\n"
