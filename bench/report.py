"""Results as tables, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

Results = dict[str, Any]


def optimizers(results: Results) -> list[str]:
    return list(dict.fromkeys(row["optimizer"] for row in results["rows"]))


def columns(results: Results, optimizer: str) -> list[str]:
    """Implementations that have at least a word to say about an optimizer, in their order."""
    rows = [row for row in results["rows"] if row["optimizer"] == optimizer]
    return [
        name
        for name in results["implementations"]
        if any(not set(row.get("results", {}).get(name, {})) <= {"absent"} for row in rows)
    ]


def milliseconds(value: float) -> str:
    """Three digits: 0.0123, 1.23, 123."""
    return f"{value:.4f}" if value < 0.1 else f"{value:#.3g}".rstrip(".")


def header(results: Results, optimizer: str) -> list[str]:
    titles = [results["implementations"][name] for name in columns(results, optimizer)]
    return ["tensors", "allocator", *titles, "limit", "speed-up", "GB/s", "share"]


def lines(results: Results, optimizer: str) -> Iterator[list[str]]:
    """One line a shape list and allocator, the allocators of a list together."""
    names = columns(results, optimizer)
    rows = [row for row in results["rows"] if row["optimizer"] == optimizer]
    order = list(dict.fromkeys(row["shapes"] for row in rows))
    for row in sorted(rows, key=lambda row: order.index(row["shapes"])):
        start = [row["title"], row["allocator"]]
        if "skipped" in row:
            yield [*start, row["skipped"], *[""] * (len(names) + 3)]
            continue
        cells = [_cell(row["results"].get(name, {})) for name in names]
        ours = row["results"].get("fused", {})
        speedup = f"{ours['speedup']:.1f}×" if "speedup" in ours else ""
        gbps = f"{ours['gbps']:.1f}" if "gbps" in ours else ""
        share = f"{ours['share']:.2f}" if "share" in ours else ""
        yield [*start, *cells, milliseconds(row["limit"]["ms"]), speedup, gbps, share]


def _cell(result: dict[str, Any]) -> str:
    if "ms" in result:
        return milliseconds(result["ms"])
    return "wrong" if "wrong" in result else "–"


def rich_tables(results: Results) -> Iterator[Table]:
    for optimizer in optimizers(results):
        table = Table(title=f"{optimizer}: ms a step", title_justify="left", title_style="bold")
        for name in header(results, optimizer):
            is_text = name in ("tensors", "allocator")
            is_ours = name in ("ours fused", "speed-up")
            table.add_column(
                name,
                justify="left" if is_text else "right",
                style="bold" if is_ours else None,
                no_wrap=is_text,
            )
        last = None
        for cells in lines(results, optimizer):
            if last not in (None, cells[0]):
                table.add_section()
            last = cells[0]
            table.add_row(*cells)
        yield table


def limit_line(results: Results) -> str:
    """What the limit's loops reach on this machine, in and out of the caches."""
    rates = [
        (row["bytes"] / row["limit"]["ms"] / 1e6, row["title"])
        for row in results["rows"]
        if "limit" in row and row["elements"] >= 1 << 16
    ]
    if not rates:
        return ""
    (slowest, slow), (fastest, fast) = min(rates), max(rates)
    return (
        f"Limit of this machine, the same reads and writes without the maths: {fastest:,.0f} GB/s "
        f"({fast}) to {slowest:,.0f} GB/s ({slow})."
    )


LEGEND = (
    "speed-up: ours fused against ours unfused; GB/s: bytes that a step must move at least; "
    "share: the limit's time over ours."
)


def wrong_lines(results: Results) -> Iterator[str]:
    for row in results["rows"]:
        for name, result in row.get("results", {}).items():
            if "wrong" in result:
                title = results["implementations"][name]
                where = f"{row['optimizer']}, {row['title']}, {row['allocator']}"
                yield f"Not timed: {title} is wrong for {where}: {result['wrong']}."


def absent_lines(results: Results) -> Iterator[str]:
    """Each implementation that is missing somewhere, with the reason, once."""
    told = {
        f"{results['implementations'][name]}: {result['absent']}."
        for row in results["rows"]
        for name, result in row.get("results", {}).items()
        if "absent" in result
    }
    yield from sorted(told)


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


def markdown(results: Results) -> str:
    parts = [f"# Optimizer steps on {results['machine']['cpu']}", subtitle(results)]
    for optimizer in optimizers(results):
        names = header(results, optimizer)
        table = [names, [":--", ":--"] + ["--:"] * (len(names) - 2), *lines(results, optimizer)]
        text = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
        parts.append(f"## {optimizer}: ms a step\n\n{text}")
    parts.append(" ".join(filter(None, [limit_line(results), LEGEND])))
    told = [*wrong_lines(results), *absent_lines(results), *results["notes"]]
    if told:
        parts.append("\n".join(f"- {line}" for line in told))
    parts.append("\n\n".join(f"![{name}]({name}.png)" for name in ("time", "speedup")))
    return "\n\n".join(parts) + "\n"
