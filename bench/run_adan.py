#!/usr/bin/env python3
"""Memory and time of Adan beside Adam, over the 25 sizes of GPT-2 that its authors published.

Memory is the peak of a whole training step, time that of the optimizer's step alone. Results go
into a folder as results.json, README.md (the tables) and plots. They are written after every row:
what was interrupted goes on where it was, if device, torch and fusedstep are the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import adan_memory
import adan_plot
import adan_report
import adan_time
import fusedstep
import output
from adan_check import wrong
from adan_contestants import CONTESTANTS, LR, has_authors, present, problem
from adan_published import PUBLISHED, Published
from adan_time import Effort
from fusedstep import _ops
from gpt2 import GPT2
from machine import this_machine
from processes import progress_over, show
from worker import available_memory, mapped_jemalloc

TABLES = ("memory", "time")
STEPS, SECONDS = 200, 1.0

#: Facts that must be the same for rows to stand in one table.
KEYS = ("device", "torch", "version")

Row = dict[str, Any]


def selected(wanted: str) -> list[Published]:
    """Those whose whole name one of the patterns matches, in the order of the publication."""
    patterns = [re.compile(pattern.strip()) for pattern in wanted.split(",")]
    return [
        published
        for name, published in PUBLISHED.items()
        if any(pattern.fullmatch(name) for pattern in patterns)
    ]


def _configs(text: str) -> list[Published]:
    try:
        found = selected(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"not a regular expression: {error}") from None
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(PUBLISHED)}")
    return found


def _tables(text: str) -> list[str]:
    found = text.split(",")
    if unknown := set(found) - set(TABLES):
        raise argparse.ArgumentTypeError(f"no such table: {', '.join(sorted(unknown))}")
    return found


def _steps(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least one")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--configs",
        type=_configs,
        metavar="NAMES",
        default=list(PUBLISHED.values()),
        help="heads x layers x embedding, with commas between: 6x6x768,12x12x768. "
        "Each is a regular expression over the whole name: .*x24x.*",
    )
    parser.add_argument("--tables", type=_tables, default=list(TABLES), help="memory,time")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there")
    parser.add_argument(
        "--steps", type=_steps, default=STEPS, help=f"of each optimizer (default: {STEPS})"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help=f"for each optimizer and size, if the steps take longer (default: {SECONDS:g})",
    )
    parser.add_argument("--again", action="store_true", help="also what is measured already")
    output.output_arguments(parser)
    return parser.parse_args()


def facts_of(device: torch.device) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if is_cuda else this_machine().cpu,
        "device_type": device.type,
        "torch": torch.__version__,
        "version": fusedstep.__version__,
        "threads": torch.get_num_threads(),
        "allocator": "jemalloc" if mapped_jemalloc() else "glibc",
        "lr": LR,
        "contestants": {name: CONTESTANTS[name].title for name in present(device)},
    }


def rows_before(folder: Path, facts: dict[str, Any]) -> list[Row]:
    """Of an earlier run that measured the same."""
    try:
        before = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return []
    return before["rows"] if all(before.get(key) == facts[key] for key in KEYS) else []


def is_measured(row: Row, table: str, effort: Effort, device: torch.device) -> bool:
    found = row.get(table, {})
    if table == "memory":
        return found.keys() >= set(adan_memory.COMPARED)
    return found.get("effort") == effort.facts() and found["results"].keys() >= {*present(device)}


def lacking(published: Published, parameters: int, table: str) -> str | None:
    """Why a size is not tried on this CPU: a process ended by the system may be any other."""
    # States are there in a later step's forward; for the time there is no forward to speak of.
    peak = 1.2e6 * published.adan_peak + 16 * parameters
    needed = peak if table == "memory" else 40 * parameters
    if needed <= available_memory():
        return None
    return f"needs about {needed / 2**30:.0f} GiB, {available_memory() / 2**30:.0f} are free"


class Bench:
    def __init__(self, device: torch.device, effort: Effort) -> None:
        self._device, self._effort = device, effort
        self._wrong = {name: wrong(name, device) for name in present(device)}

    def row(self, published: Published, tables: list[str]) -> Iterator[tuple[str, Any]]:
        """Tables and what was found for them."""
        with torch.device("meta"):
            model = GPT2(published.config)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        yield "parameters", parameters
        is_cuda, reasons = self._device.type == "cuda", {}
        if not is_cuda:
            reasons = {table: lacking(published, parameters, table) for table in tables}
        try:
            if is_cuda or ("time" in tables and not reasons["time"]):
                with self._device:
                    model = GPT2(published.config)
        except torch.OutOfMemoryError as error:
            reasons = dict.fromkeys(tables, str(error).split(". ")[0])
        for table in tables:
            measure = self._memory if table == "memory" else self._time
            yield table, measure(published, model, reasons.get(table))

    def _memory(self, published: Published, model: GPT2, reason: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in adan_memory.COMPARED:
            try:
                if reason:
                    found[name] = {"out of memory": reason}
                elif self._wrong[name]:
                    found[name] = {"wrong": self._wrong[name]}
                elif self._device.type == "cuda":
                    found[name] = adan_memory.on_cuda(model, name)
                else:
                    found[name] = adan_memory.on_cpu(published.config, name)
            except RuntimeError as error:
                found[name] = problem(error)
        return found

    def _time(self, published: Published, model: GPT2, reason: str | None) -> dict[str, Any]:
        names = present(self._device)
        results = {name: {"wrong": self._wrong[name]} for name in names if self._wrong[name]}
        rest = [name for name in names if name not in results]
        if reason:
            results |= {name: {"out of memory": reason} for name in rest}
        else:
            results |= adan_time.measure(model, rest, self._effort)
        return {"effort": self._effort.facts(), "results": results}


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("bench: torch sees no CUDA device")
    if missing := _ops.missing_on(device.type):
        sys.exit(f"bench: {missing}")
    gc.freeze()  # what is imported: memory is collected in each turn
    collected, effort = output.Collected(), Effort(arguments.steps, arguments.seconds)
    collected.facts = facts_of(device)
    slug = collected.machine.slug
    if device.type == "cuda":
        slug = "-".join(collected.facts["device"].lower().split())
    folder = output.results_folder(arguments, slug, "adan")
    if device.type == "cuda" and not has_authors(device):
        collected.note("the authors' kernel is absent: adan and fused_adan cannot be imported")
    collected.rows = rows_before(folder, collected.facts)
    rows = {row["config"]: row for row in collected.rows}
    planned = {}
    for published in arguments.configs:
        name = str(published.config)
        planned[name] = [
            table
            for table in arguments.tables
            if arguments.again or not is_measured(rows.get(name, {}), table, effort, device)
        ]
    with progress_over(Console(stderr=True)) as progress:
        task = progress.add_task("checking", total=sum(map(len, planned.values())))
        bench = Bench(device, effort) if any(planned.values()) else None
        for published in arguments.configs:
            name = str(published.config)
            if not planned[name]:
                continue
            if name not in rows:
                rows[name] = {"config": name}
                collected.rows.append(rows[name])
            show(progress, task, f"{name}, {published.millions} M")
            for table, found in bench.row(published, planned[name]):
                rows[name][table] = found
                if table in TABLES:
                    results = collected.results()
                    output.write(folder, results, adan_report.markdown(results))
                    progress.advance(task)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    results = collected.results()
    output.write(folder, results, adan_report.markdown(results))
    adan_plot.plot(results, folder)
    tables = [grid.table() for grid in adan_report.grids(results)]
    output.show(tables, [adan_report.subtitle(results), *adan_report.remarks(results)], folder)


if __name__ == "__main__":
    main()
