"""Prints the bytes of a run: as a table, as bars, as JSON and as a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from fusedstep.memory.fit import Fit, Found, code
from fusedstep.memory.plan import Choice, Need

#: The characters that draw the parts in a bar.
_SHADES = {
    "weights": "█",
    "copies": "▓",
    "masters": "▒",
    "states": "░",
    "scratch": ":",
    "gradients": "+",
    "activations": "·",
}
_BAR = 50
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Row(NamedTuple):
    """A choice, what it needs on a rank, and its totals under other stages of ZeRO."""

    choice: Choice
    need: Need
    stages: dict[int, int]


def size(number: float) -> str:
    """Bytes in the unit that gives four digits or fewer."""
    unit = 0
    while abs(number) >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return (
        f"{number:.0f} B" if unit == 0 else f"{number:.{2 if number < 100 else 0}f} {_UNITS[unit]}"
    )


def label(choice: Choice) -> str:
    options = ",".join(f"{name}={value}" for name, value in choice.options.items())
    return f"{choice.optimizer}{':' if options else ''}{options}"


def _title(names: str, states: str) -> str:
    return names if states == "default" else f"{names} ({states})"


def merged(rows: list[Row]) -> list[tuple[str, str, Row]]:
    """The rows with those together that need the same as written: names, state dtype, row."""
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        written = *map(size, row.need), *map(size, row.stages.values())
        alike.setdefault((row.choice.states, written), []).append(row)
    return [
        (", ".join(label(row.choice) for row in some), some[0].choice.states, some[0])
        for some in alike.values()
    ]


def table(rows: list[Row], inference: bool) -> str:
    """One line for each choice. Columns in which all is 0 are left out."""
    parts = [name for name in Need._fields if any(getattr(row.need, name) for row in rows)]
    stages = sorted({stage for row in rows for stage in row.stages})
    head = [] if inference else ["optimizer", "state_dtype"]
    head += [*parts, "total", *(f"total, ZeRO {stage}" for stage in stages)]
    lines = [head]
    for names, states, row in merged(rows):
        line = [] if inference else [names, states]
        line += [size(getattr(row.need, name)) for name in parts]
        line += [size(row.need.total), *(size(row.stages[stage]) for stage in stages)]
        lines.append(line)
    return _aligned(lines, 0 if inference else 2)


def _aligned(lines: list[list[str]], left: int) -> str:
    """Columns, the first ones to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def table_of_ways(fits: list[Fit]) -> str:
    """A line for each way, numbered. Columns in which all is 0 are left out."""
    parts = [name for name in Need._fields if any(getattr(fit.need, name) for fit in fits)]
    is_on_host = any(fit.host for fit in fits)
    lines = [["", "way", *parts, "total", *["host"] * is_on_host]]
    for number, fit in enumerate(fits, 1):
        line = [str(number), fit.way.title, *(size(getattr(fit.need, part)) for part in parts)]
        lines.append([*line, size(fit.need.total), *[size(fit.host)] * is_on_host])
    return _aligned(lines, 2)


def code_of_ways(fits: list[Fit]) -> str:
    return "\n\n".join(
        "\n".join([f"# {number}. {fit.way.title}", *code(fit.way)])
        for number, fit in enumerate(fits, 1)
    )


def named(rows: list[Row]) -> dict[str, Need]:
    """What each choice needs, those together that need the same."""
    return {_title(names, states): row.need for names, states, row in merged(rows)}


def bars(needs: dict[str, Need], limit: int | None) -> str:
    """A bar for each need, the parts one after another; a mark where the memory ends."""
    most = max([need.total for need in needs.values()] + [limit or 0]) or 1
    width = max(map(len, needs))
    lines = []
    for name, need in needs.items():
        bar, until = "", 0
        for part, shade in _SHADES.items():
            until += getattr(need, part)
            bar += shade * (round(_BAR * until / most) - len(bar))
        bar = bar.ljust(_BAR + 1)
        if limit:
            mark = round(_BAR * limit / most)
            bar = f"{bar[:mark]}|{bar[mark + 1 :]}"
        lines.append(f"{name:<{width}}  {bar.rstrip()}".rstrip())
    used = [part for part in _SHADES if any(getattr(need, part) for need in needs.values())]
    legend = "  ".join(f"{_SHADES[part]} {part}" for part in used)
    return "\n".join([*lines, legend + ("  | limit" if limit else "")])


def as_json(facts: dict[str, Any], rows: list[Row]) -> str:
    """Everything, in bytes; each choice apart."""
    found = [
        _facts_of(row.choice, row.need)
        | ({"zero": {str(k): total for k, total in row.stages.items()}} if row.stages else {})
        for row in rows
    ]
    return json.dumps(facts | {"choices": found}, indent=2)


def ways_as_json(facts: dict[str, Any], found: Found) -> str:
    """The best ways that fit and the smallest way, in bytes, with their lines of code."""

    def of(fit: Fit) -> dict[str, Any]:
        way = fit.way
        return _facts_of(way.choice, fit.need) | {
            "way": way.title,
            "weights": str(way.run.weights).removeprefix("torch."),
            "masters": way.run.masters,
            "step_in_backward": way.run.bucket is not None and not way.is_offloaded,
            "offload": way.is_offloaded,
            "lora": way.adapters,
            "checkpointing": way.checkpointing,
            "host": fit.host,
            "lines": code(way),
        }

    ways = {"fits": [of(fit) for fit in found.best], "smallest": of(found.smallest)}
    return json.dumps(facts | ways | {"notes": found.notes}, indent=2)


def _facts_of(choice: Choice, need: Need) -> dict[str, Any]:
    return {
        "optimizer": choice.optimizer,
        "options": choice.options,
        "states": choice.states,
        "bytes": need._asdict() | {"total": need.total},
    }


def plot(path: Path, title: str, needs: dict[str, Need], limit: int | None) -> None:
    """Draws the bars into a file.

    Raises:
        ValueError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    names = list(needs)[::-1]
    figure = Figure(figsize=(9, 1.5 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(names)
    for part in Need._fields:
        values = [getattr(needs[name], part) / 2**30 for name in names]
        if any(values):
            axes.barh(names, values, left=left, label=part)
            left = [a + b for a, b in zip(left, values, strict=True)]
    if limit:
        axes.axvline(limit / 2**30, color="black", linestyle="--", label="limit")
    axes.set(xlabel="GiB", title=title)
    axes.legend()
    figure.savefig(path)
