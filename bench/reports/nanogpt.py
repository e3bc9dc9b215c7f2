"""The tables of `./run.sh nanogpt`: attention and torch.compile in the training of a small GPT."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from reports.grid import Grid, Results, Row

#: Figures of a row: title of the column, and how one is written.
COLUMNS = {
    "all_ms": ("ms an iteration", "{:,.1f}"),
    "ms": ("without the first", "{:,.1f}"),
    "first_ms": ("first, ms", "{:,.0f}"),
    "compile_ms": ("compilation, ms", "{:,.0f}"),
    "peak": ("peak, MiB", "{:,.0f}"),
    "peak_reserved": ("reserved, MiB", "{:,.0f}"),
    "loss": ("final loss", "{:.3f}"),
    "optimizer_ms": ("optimizer, ms", "{:,.2f}"),
    "share": ("its share, %", "{:.2f}"),
}

#: Factors from figures to what is shown.
FACTORS = {"peak": 2**-20, "peak_reserved": 2**-20, "share": 100}


def rows_of(results: Results) -> dict[str, list[Row]]:
    """Returns the rows by optimizer."""
    found: dict[str, list[Row]] = {}
    for row in results["rows"]:
        found.setdefault(row["optimizer"], []).append(row)
    return found


def grids(results: Results) -> list[Grid]:
    """Returns a table for each optimizer, with the columns that have figures."""
    return [_grid(optimizer, rows) for optimizer, rows in rows_of(results).items()]


def _grid(optimizer: str, rows: list[Row]) -> Grid:
    shown = [key for key in COLUMNS if any(key in row for row in rows)]
    header = ["attention", "kernel", "compiled", *(COLUMNS[key][0] for key in shown)]
    return Grid(optimizer, header, [_line(row, shown) for row in rows], words=3)


def _line(row: Row, shown: list[str]) -> list[str]:
    words = [row["attn_type"], row.get("kernel", "failed"), "yes" if row["compile"] else "no"]
    for key in shown:
        value = row.get(key)
        text = "–" if value is None else COLUMNS[key][1].format(value * FACTORS.get(key, 1))
        words.append(text)
    return words


def shares(results: Results) -> dict[str, float]:
    """Returns the median of each optimizer's share over the rows that all of them have."""
    measured = {
        optimizer: shares
        for optimizer, rows in rows_of(results).items()
        if (shares := {_case(row): row["share"] for row in rows if "share" in row})
    }
    common = set.intersection(*map(set, measured.values())) if measured else set()
    return {
        optimizer: statistics.median(found[case] for case in common)
        for optimizer, found in measured.items()
        if common
    }


def _case(row: Row) -> tuple[str, bool]:
    return row["attn_type"], row["compile"]


def remarks(results: Results) -> Iterator[str]:
    """Yields the lines below the tables."""
    settings = results["settings"]
    sizes = (
        f"{settings['n_layer']} layers, {settings['n_head']} heads, {settings['n_embd']} wide",
        f"sequences of {settings['block_size']}",
        f"batches of {settings['batch_size']} × {settings['gradient_accumulation_steps']}",
        f"{settings['max_iters']} iterations",
        *sorted({row["dtype"] for row in results["rows"] if "dtype" in row}),
    )
    yield f"{', '.join(sizes)}."
    if (backend := settings["compile_backend"]) != "inductor":
        yield f"torch.compile by {backend}, which makes no kernels."
    if "device" in results:
        yield "Peak: of torch's allocator, handed out and reserved."
    else:
        yield (
            "Peak: of the process's resident memory. A CPU has one fused kernel, which flash_attn "
            "and efficient_attn both take."
        )
    found = shares(results)
    if len(found) > 1:
        told = ", ".join(f"{name} {100 * share:.2f} %" for name, share in found.items())
        yield f"The optimizer's share of an iteration, median over the rows of all: {told}."
    for row in results["rows"]:
        if "failed" in row:
            yield f"Not measured: {', '.join(row['name'].split('/'))}: {row['failed']}."
    yield from results["notes"]


def command(_table: str, results: Results) -> str:
    options = "".join(f" --optimizer {name}" for name in rows_of(results))
    return f"`./run.sh nanogpt --preset {results['preset']}{options}`"
