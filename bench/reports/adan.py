"""The two published tables of Adan over the sizes of GPT-2, ours beside the published."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from reports import steps
from reports.grid import Grid, Results, Row, cell
from suites.adan_published import ADAM, ADANS, DEVICE, PUBLISHED


def rows_with(results: Results, key: str) -> list[Row]:
    """In the order of the publication."""
    found = [row for row in results["rows"] if any(key in r for r in row["results"].values())]
    return sorted(found, key=lambda row: list(PUBLISHED).index(row["shapes"]))


def difference(row: Row, name: str, key: str) -> float | None:
    """The memory above that of Adam, in percent."""
    quotient = ratio(row, name, ADAM, key)
    return None if quotient is None else 100 * (quotient - 1)


def ratio(row: Row, name: str = "adan_multi", base: str = ADAM, key: str = "ms") -> float | None:
    found = [row["results"].get(each, {}).get(key) for each in (name, base)]
    return found[0] / found[1] if all(found) else None


def _peak(row: Row, name: str, key: str) -> str:
    result = row["results"].get(name, {})
    return f"{result[key] / 1e6:,.0f}" if key in result else cell(result)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}" if abs(value) >= 0.005 else "0.00"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _memory_grid(results: Results, step: str) -> Grid:
    """Peaks of the first step, beside the published ones, or of a later step."""
    titles = results["implementations"]
    header = ["heads × layers × embedding", "M", titles[ADAM], *(f"{titles[n]} %" for n in ADANS)]
    keys = [step]
    if rows_with(results, f"{step}_reserved"):
        keys.append(f"{step}_reserved")
        header += ["reserved, Adam", *(f"reserved, {titles[n]} %" for n in ADANS)]
    if step == "first":
        header += ["published, Adam", "published %"]
    lines = []
    for row in rows_with(results, step):
        line = _beginning(row)
        for key in keys:
            line.append(_peak(row, ADAM, key))
            line += [_percent(difference(row, name, key)) for name in ADANS]
        if step == "first":
            published = PUBLISHED[row["shapes"]]
            line += [f"{published.adam_peak:,}", _percent(published.difference)]
        lines.append(line)
    which = "the first step, which makes the states" if step == "first" else "a later step"
    return Grid(f"Memory: peak of {which}, MB", header, lines)


def _beginning(row: Row) -> list[str]:
    return [row["title"], f"{row['elements'] // 10**6:,}"]


def _time_grid(results: Results) -> Grid:
    rows, names = rows_with(results, "ms"), results["implementations"]
    header = ["heads × layers × embedding", "M", *names.values()]
    header += ["multi / for-loop %", "published %", "multi / foreach %", "multi / fused %"]
    lines = [
        _beginning(row)
        + [cell(row["results"].get(name, {})) for name in names]
        + [_share(ratio(row)), _share(PUBLISHED[row["shapes"]].ratio)]
        + [_share(ratio(row, base=base)) for base in ("adam_foreach", "adam_fused")]
        for row in rows
    ]
    return Grid("Time: ms of a step", header, lines)


def grids(results: Results) -> list[Grid]:
    memory = [_memory_grid(results, step) for step in ("first", "later")]
    return [each for each in (*memory, _time_grid(results)) if each.lines]


def remarks(results: Results) -> Iterator[str]:
    titles = results["implementations"]
    for key, told in (("first", "handed out"), ("first_reserved", "reserved")):
        for name in ADANS:
            found = {row["shapes"]: difference(row, name, key) for row in rows_with(results, key)}
            found = {config: value for config, value in found.items() if value is not None}
            above = [c for c, value in found.items() if value > PUBLISHED[c].difference + 0.005]
            if found:
                yield (
                    f"{titles[name]}, memory {told} in the first step: "
                    f"at most {_percent(max(found.values()))} % beside Adam, above the published "
                    f"in {len(above)} of {len(found)} rows" + f" ({', '.join(above)})" * bool(above)
                )
    for base in (ADAM, "adam_foreach", "adam_fused", "authors_multi"):
        found = [ratio(row, base=base) for row in rows_with(results, "ms")]
        if times := [each for each in found if each is not None]:
            yield (
                f"Fused multi Adan takes {_share(statistics.median(times))} % of the time of "
                f"{titles[base]}, median of {len(times)} rows "
                f"({_share(min(times))} to {_share(max(times))})."
            )
    published = [PUBLISHED[row["shapes"]].ratio for row in rows_with(results, "ms")]
    if published:
        yield (
            f"Published on one {DEVICE}: {_share(statistics.median(published))} % of the time of "
            "Adam, for-loop, median of these rows."
        )
    yield from steps.problems(results)


command = steps.command
