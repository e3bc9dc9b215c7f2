#!/usr/bin/env python3
"""Time whole optimizer steps from Python, side by side, against the limit of the machine.

Rows are optimizers × shape lists ("lamb/resnet50"); FILTER is a regular expression that selects
some. Each row is measured under glibc's allocator and under jemalloc, in a process for each; then
its kernels alone, by Google Benchmark.
Results go into a folder as results.json, README.md (the tables), time.png and speedup.png.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

import plot
import report
from environment import ALLOCATORS, ROOT, environments
from kernels import NAME as KERNELS
from kernels import Kernels
from machine import Others, this_machine

#: Seconds of measuring steps for both allocators together, unless --budget says otherwise. The
#: kernels alone come on top: a fraction of a second for each row.
QUICK_SECONDS, FULL_SECONDS = 150, 1200

#: Share of the CPUs above which the rest of the system disturbs figures enough to say so.
DISTURBING = 0.1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="a few shape lists, in a few minutes")
    extent.add_argument("--full", action="store_true", help="all shape lists (the default)")
    parser.add_argument("filter", nargs="?", default="", metavar="FILTER", type=_pattern)
    parser.add_argument("--all-cases", action="store_true", help="all variants of the optimizers")
    parser.add_argument("--allocator", choices=ALLOCATORS, action="append", dest="allocators")
    parser.add_argument(
        "--dtype", choices=("float32", "float64", "bfloat16", "float16"), default="float32"
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="time for all steps")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="instead of bench/results/MACHINE"
    )
    parser.add_argument(
        "--libraries",
        type=Path,
        metavar="DIR",
        default=ROOT / "build" / "release" / "bench",
        help="where the native parts of the benchmark were built",
    )
    return parser.parse_args()


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"not a regular expression: {error}") from None
    return text


@dataclass
class Collected:
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class WorkerError(Exception):
    """The process of one allocator did not come to its end."""


def events(request: dict[str, Any], env: dict[str, str]) -> Iterator[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "bench" / "worker.py"), json.dumps(request)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield from map(json.loads, process.stdout)
        finally:
            if sys.exc_info()[0] is not None:
                process.kill()
    if process.returncode != 0:
        raise WorkerError(f"{' '.join(command)} ended with status {process.returncode}")


def show(progress: Progress, task: TaskID, text: str) -> None:
    """Says what is measured: in the task's line, or in a line of its own off a terminal."""
    progress.update(task, description=text)
    if not progress.console.is_terminal:
        progress.console.print(text, highlight=False)


def measure(
    allocator: str,
    request: dict[str, Any],
    env: dict[str, str],
    collected: Collected,
    progress: Progress,
) -> None:
    """The rows under one allocator."""
    task = progress.add_task(f"{allocator}: starting", total=None)
    for event in events(request, env):
        match event["event"]:
            case "plan":
                facts = event["facts"]
                mapped = facts.pop("jemalloc")
                if (mapped is not None) != (allocator == "jemalloc"):
                    raise WorkerError(f"{allocator} was asked for, but {mapped} is mapped")
                collected.facts = facts
                progress.update(task, total=len(event["rows"]))
            case "row":
                show(progress, task, f"{allocator}: {event['name']}")
            case "result":
                collected.rows.append({"allocator": allocator} | event["row"])
                progress.advance(task)
            case "note":
                collected.note(event["text"])
    progress.update(task, description=f"{allocator}: done")


def measure_kernels(
    arguments: argparse.Namespace, env: dict[str, str], collected: Collected, progress: Progress
) -> None:
    """The kernels alone, for each row that was measured and that there is such a benchmark for."""
    if not (arguments.libraries / KERNELS).is_file():
        return collected.note("built without Google Benchmark: the kernels alone are not timed")
    if arguments.dtype != "float32":
        return collected.note("the kernels alone are timed in float32 only")
    isa, threads = collected.facts["isa"], collected.facts["threads"]
    kernels = Kernels(arguments.libraries, env)
    found = {
        name: row
        for row in collected.rows
        if row["plain"]
        and "ms" in row.get("results", {}).get("fused", {})
        and (name := kernels.find(row["class"], row["shapes"], isa, threads))
    }
    if not found:
        return None
    task = progress.add_task("kernels alone: starting", total=len(found))
    for name, row in found.items():
        show(progress, task, f"kernels alone: {row['optimizer']}/{row['shapes']}")
        milliseconds = kernels.milliseconds(name, estimate=row["results"]["fused"]["ms"])
        place = {key: row[key] for key in ("optimizer", "shapes")}
        collected.kernels.append(place | {"name": name, "ms": milliseconds})
        progress.advance(task)
    progress.update(task, description="kernels alone: done")
    return None


def collect(arguments: argparse.Namespace, console: Console) -> Collected:
    allocators, notes = environments(arguments.allocators or list(ALLOCATORS))
    if not allocators:
        sys.exit(f"nothing to measure: {notes[0]}")
    collected, others = Collected(notes=notes), Others()
    budget = arguments.budget or (QUICK_SECONDS if arguments.quick else FULL_SECONDS)
    request = {
        "quick": arguments.quick,
        "all_cases": arguments.all_cases,
        "filter": arguments.filter,
        "dtype": arguments.dtype,
        "seconds": budget / len(allocators),
        "libraries": str(arguments.libraries.resolve()),
    }
    what = TextColumn("{task.description:<40}")
    columns = (what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for allocator, env in allocators.items():
            measure(allocator, request, env, collected, progress)
        try:
            measure_kernels(arguments, env, collected, progress)
        except subprocess.CalledProcessError as failure:
            collected.note(f"the kernels alone were not timed: {failure}")
    if (share := others.share()) > DISTURBING:
        collected.note(
            f"other programs took {100 * share:.0f} % of the CPUs meanwhile: these are the figures "
            "of a busy machine"
        )
    return collected


def main() -> None:
    arguments = parse_arguments()
    if not list(arguments.libraries.glob("libfusedstep_limit.*")):
        sys.exit(
            f"{arguments.libraries} has no libfusedstep_limit.so. Build it: "
            "cmake --preset release && cmake --build --preset release"
        )
    progress_console = Console(stderr=True)
    machine = this_machine()
    try:
        collected = collect(arguments, progress_console)
    except WorkerError as failure:
        sys.exit(f"bench: {failure}")
    if not collected.rows:
        sys.exit(f"no row matches {arguments.filter!r}: rows are OPTIMIZER/LIST, as lamb/matrix")
    results = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.facts(),
        **collected.facts,
        "notes": collected.notes,
        "rows": collected.rows,
        "kernels": collected.kernels,
    }
    folder = arguments.output or ROOT / "bench" / "results" / machine.slug
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(report.markdown(results), encoding="utf-8")
    plot.plot(results, folder)

    terminal = Console()
    tables = list(report.rich_tables(results, terminal.width if terminal.is_terminal else 1000))
    # Figures that are cut off would be worse than lines that wrap.
    console = Console(width=max(terminal.width, *map(report.width_of, tables)))
    for table in tables:
        console.print(table)
    for line in report.remarks(results):
        terminal.print(line, markup=False, highlight=False)
    terminal.print(f"Results, tables and plots are in {folder}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
