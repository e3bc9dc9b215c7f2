"""The tables of Adan over the sizes of GPT-2, ours beside the published."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from adan_contestants import CONTESTANTS
from adan_memory import COMPARED
from adan_published import DEVICE, PUBLISHED
from report import Grid, Results, document, milliseconds

Row = dict[str, Any]

#: What stands in place of a figure.
AMISS = {"out of memory": "memory", "wrong": "wrong", "failed": "failed"}

ADANS = ("adan_single", "adan_multi")


def rows_with(results: Results, table: str) -> list[Row]:
    """In the order of the publication."""
    order = list(PUBLISHED)
    found = [row for row in results["rows"] if table in row]
    return sorted(found, key=lambda row: order.index(row["config"]))


def title(row: Row) -> str:
    return row["config"].replace("x", " × ")


def difference(row: Row, name: str, step: str) -> float | None:
    """How much more memory than with Adam, in percent."""
    peaks = [row["memory"].get(each, {}).get(step) for each in (name, "adam_for_loop")]
    return 100 * (peaks[0] / peaks[1] - 1) if all(peaks) else None


def ratio(row: Row, name: str = "adan_multi", base: str = "adam_for_loop") -> float | None:
    times = [row["time"]["results"].get(each, {}).get("ms") for each in (name, base)]
    return times[0] / times[1] if all(times) else None


def _cell(found: dict[str, Any], key: str, written: Callable[[float], str]) -> str:
    if key in found:
        return written(found[key])
    return next((word for problem, word in AMISS.items() if problem in found), "–")


def _megabytes(peak: float) -> str:
    return f"{peak / 1e6:,.0f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}" if abs(value) >= 0.005 else "0.00"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _has_reserved(results: Results) -> bool:
    return results["device_type"] == "cuda"


def memory_grid(results: Results, step: str) -> Grid:
    """Peaks of the first step, beside the published ones, or of a later step."""
    titles = {name: CONTESTANTS[name].title for name in COMPARED}
    header = ["heads × layers × embedding", "M", *titles.values()]
    header += [f"{titles[name]} %" for name in ADANS]
    reserved, is_first = _has_reserved(results), step == "first"
    if reserved:
        header += ["reserved, Adam", *(f"reserved, {titles[name]} %" for name in ADANS)]
    if is_first:
        header += ["published, Adam", "published %"]
    lines = []
    for row in rows_with(results, "memory"):
        peaks = {name: row["memory"].get(name, {}) for name in COMPARED}
        line = [title(row), f"{row['parameters'] // 10**6:,}"]
        line += [_cell(found, step, _megabytes) for found in peaks.values()]
        line += [_percent(difference(row, name, step)) for name in ADANS]
        if reserved:
            key = f"{step}_reserved"
            line.append(_cell(peaks["adam_for_loop"], key, _megabytes))
            line += [_percent(difference(row, name, key)) for name in ADANS]
        if is_first:
            published = PUBLISHED[row["config"]]
            line += [f"{published.adam_peak:,}", _percent(published.difference)]
        lines.append(line)
    which = "the first step, which makes the states" if is_first else "a later step"
    return Grid(f"Memory: peak of {which}, MB", header, lines)


def time_grid(results: Results) -> Grid:
    rows = rows_with(results, "time")
    header = ["heads × layers × embedding", "M"]
    header += [contestant.title for contestant in CONTESTANTS.values()]
    header += ["multi / for-loop %", "published %", "multi / foreach %", "multi / fused %"]
    lines = []
    for row in rows:
        line = [title(row), f"{row['parameters'] // 10**6:,}"]
        found = row["time"]["results"]
        line += [_cell(found.get(name, {}), "ms", milliseconds) for name in CONTESTANTS]
        line += [_share(ratio(row)), _share(PUBLISHED[row["config"]].ratio)]
        line += [_share(ratio(row, base=base)) for base in ("adam_foreach", "adam_fused")]
        lines.append(line)
    return Grid("Time: ms of a step", header, lines)


def grids(results: Results) -> list[Grid]:
    found = []
    if rows_with(results, "memory"):
        found += [memory_grid(results, step) for step in ("first", "later")]
    if rows_with(results, "time"):
        found.append(time_grid(results))
    return found


def subtitle(results: Results) -> str:
    facts = [results["device"], f"torch {results['torch']}", f"fusedstep {results['version']}"]
    if not _has_reserved(results):
        facts += [f"{results['threads']} threads", results["allocator"]]
    return ", ".join([*facts, results["date"]])


def _memory_remarks(results: Results) -> Iterator[str]:
    rows = rows_with(results, "memory")
    kinds = {"first": "handed out"}
    if _has_reserved(results):
        kinds["first_reserved"] = "reserved"
    for key, told in kinds.items():
        for name in ADANS:
            found = {row["config"]: difference(row, name, key) for row in rows}
            found = {config: value for config, value in found.items() if value is not None}
            if not found:
                continue
            above = [c for c, value in found.items() if value > PUBLISHED[c].difference + 0.005]
            yield (
                f"{CONTESTANTS[name].title}, memory {told} in the first step: "
                f"at most {_percent(max(found.values()))} % beside Adam, "
                f"above the published in {len(above)} of {len(found)} rows"
                + f" ({', '.join(above)})." * bool(above)
                + "." * (not above)
            )


def _time_remarks(results: Results) -> Iterator[str]:
    rows = rows_with(results, "time")
    medians = {
        base: [value for row in rows if (value := ratio(row, base=base)) is not None]
        for base in ("adam_for_loop", "adam_foreach", "adam_fused", "authors_multi")
    }
    for base, found in medians.items():
        if found:
            yield (
                f"Fused multi Adan takes {_share(statistics.median(found))} % of the time of "
                f"{CONTESTANTS[base].title}, median of {len(found)} rows "
                f"({_share(min(found))} to {_share(max(found))})."
            )
    published = [PUBLISHED[row["config"]].ratio for row in rows]
    if published:
        yield (
            f"Published on one {DEVICE}: {_share(statistics.median(published))} % of the time of "
            "Adam, for-loop, median of these rows."
        )
    timed = [
        (found["steps"], row["time"]["effort"]["steps"])
        for row in rows
        for found in row["time"]["results"].values()
        if "steps" in found
    ]
    if fewer := [steps for steps, wanted in timed if steps < wanted]:
        yield (
            f"{len(fewer)} of {len(timed)} times are of fewer steps than asked for, as the seconds "
            f"were over: of {min(fewer)} at least. results.json says of how many."
        )


def _problems(results: Results) -> Iterator[str]:
    """What has no figure: a line for each problem, with the first row that has it and how many."""
    places: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for table in ("memory", "time"):
        for row in rows_with(results, table):
            found = row[table] if table == "memory" else row[table]["results"]
            here: dict[str, list[str]] = {}
            for name, result in found.items():
                for problem in AMISS.keys() & result.keys():
                    told = f"{problem}: {result[problem]}"
                    here.setdefault(told, []).append(CONTESTANTS[name].title)
            for told, titles in here.items():
                places.setdefault((table, told, tuple(titles)), []).append(title(row))
    for (table, told, titles), rows in places.items():
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        yield f"Not measured: {table} of {rows[0]}{more}: {told} ({'; '.join(titles)})."


def remarks(results: Results) -> Iterator[str]:
    yield from _memory_remarks(results)
    yield from _time_remarks(results)
    yield from _problems(results)
    yield from results["notes"]


def markdown(results: Results) -> str:
    parts = [f"# Adan over sizes of GPT-2 on {results['device']}", subtitle(results)]
    parts += [grid.markdown() for grid in grids(results)]
    plots = [table for table in ("memory", "time") if rows_with(results, table)]
    return document(parts, list(remarks(results)), plots)
