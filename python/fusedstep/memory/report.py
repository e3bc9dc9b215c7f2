"""Prints the bytes of a run: as a table, as bars, as JSON and as a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from fusedstep.memory.plan import Choice, Need

#: The characters that draw the parts in a bar.
_SHADES = {
    "weights": "█",
    "copies": "▓",
    "masters": "▒",
    "states": "░",
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


def table(rows: list[Row], limit: int | None, inference: bool) -> str:
    """One line for each choice. Columns in which all is 0 are left out."""
    parts = [name for name in Need._fields if any(getattr(row.need, name) for row in rows)]
    stages = sorted({stage for row in rows for stage in row.stages})
    head = [] if inference else ["optimizer", "state_dtype"]
    head += [*parts, "total", *(f"total, ZeRO {stage}" for stage in stages)]
    head += ["fits"] if limit else []
    lines = [head]
    for names, states, row in merged(rows):
        line = [] if inference else [names, states]
        line += [size(getattr(row.need, name)) for name in parts]
        line += [size(row.need.total), *(size(row.stages[stage]) for stage in stages)]
        line += ["yes" if row.need.total <= limit else "no"] if limit else []
        lines.append(line)
    left = 0 if inference else 2
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def bars(rows: list[Row], limit: int | None) -> str:
    """A bar for each choice, the parts one after another; a mark where the memory ends."""
    together = merged(rows)
    most = max([row.need.total for row in rows] + [limit or 0]) or 1
    names = [_title(names, states) for names, states, _ in together]
    width = max(map(len, names))
    lines = []
    for name, (_, _, row) in zip(names, together, strict=True):
        bar, until = "", 0
        for part, shade in _SHADES.items():
            until += getattr(row.need, part)
            bar += shade * (round(_BAR * until / most) - len(bar))
        bar = bar.ljust(_BAR + 1)
        if limit:
            mark = round(_BAR * limit / most)
            bar = f"{bar[:mark]}|{bar[mark + 1 :]}"
        lines.append(f"{name:<{width}}  {bar.rstrip()}".rstrip())
    used = [part for part in _SHADES if any(getattr(row.need, part) for row in rows)]
    legend = "  ".join(f"{_SHADES[part]} {part}" for part in used)
    return "\n".join([*lines, legend + ("  | limit" if limit else "")])


def as_json(facts: dict[str, Any], rows: list[Row], limit: int | None) -> str:
    """Everything, in bytes; each choice apart."""
    found = [
        {
            "optimizer": row.choice.optimizer,
            "options": row.choice.options,
            "states": row.choice.states,
            "bytes": row.need._asdict() | {"total": row.need.total},
        }
        | ({"zero": {str(k): total for k, total in row.stages.items()}} if row.stages else {})
        | ({"fits": row.need.total <= limit} if limit else {})
        for row in rows
    ]
    return json.dumps(facts | {"choices": found}, indent=2)


def plot(path: Path, title: str, rows: list[Row], limit: int | None) -> None:
    """Draws the bars into a file.

    Raises:
        ValueError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    together = merged(rows)[::-1]
    names = [_title(names, states) for names, states, _ in together]
    figure = Figure(figsize=(9, 1.5 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(names)
    for part in Need._fields:
        values = [getattr(row.need, part) / 2**30 for *_, row in together]
        if any(values):
            axes.barh(names, values, left=left, label=part)
            left = [a + b for a, b in zip(left, values, strict=True)]
    if limit:
        axes.axvline(limit / 2**30, color="black", linestyle="--", label="limit")
    axes.set(xlabel="GiB", title=title)
    axes.legend()
    figure.savefig(path)
