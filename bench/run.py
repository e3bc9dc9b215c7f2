#!/usr/bin/env python3
"""Time whole optimizer steps from Python, side by side, against the limit of the machine.

Rows are optimizers × shape lists ("lamb/resnet50"); FILTER is a regular expression that selects
some. Each row is measured under glibc's allocator and under jemalloc, in a process for each; then
its kernels alone, by Google Benchmark.
Results go into a folder as results.json, README.md (the tables), time.png and speedup.png.
"""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console
from rich.progress import Progress

import output
import plot
import report
from environment import ALLOCATORS, environments
from kernels import kernels_alone
from machine import Others
from processes import Request, WorkerError, check_allocator, events, progress_over, show

#: Seconds of measuring steps for both allocators together, unless --budget says otherwise. The
#: kernels alone come on top: a fraction of a second for each row.
QUICK_SECONDS, FULL_SECONDS = 150, 1200


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="a few shape lists, in a few minutes")
    extent.add_argument("--full", action="store_true", help="all shape lists (the default)")
    parser.add_argument("--all-cases", action="store_true", help="all variants of the optimizers")
    parser.add_argument("--allocator", choices=ALLOCATORS, action="append", dest="allocators")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float64", "bfloat16", "float16", "mixed"),
        default="float32",
        help="mixed: weights and gradients in bfloat16, states in float32",
    )
    output.add_arguments(parser)
    return parser.parse_args()


def measure(
    allocator: str,
    request: Request,
    env: dict[str, str],
    collected: output.Collected,
    progress: Progress,
) -> None:
    """The rows under one allocator."""
    task = progress.add_task(f"{allocator}: starting", total=None)
    for event in events(request, env):
        match event["event"]:
            case "plan":
                check_allocator(event["facts"], allocator)
                collected.facts = event["facts"]
                progress.update(task, total=len(event["rows"]))
            case "row":
                show(progress, task, f"{allocator}: {event['name']}")
            case "result":
                collected.rows.append({"allocator": allocator} | event["row"])
                progress.advance(task)
            case "note":
                collected.note(event["text"])
    progress.update(task, description=f"{allocator}: done")


def collect(arguments: argparse.Namespace, console: Console) -> output.Collected:
    collected, others = output.Collected(), Others()
    allocators, collected.notes = environments(arguments.allocators or list(ALLOCATORS))
    if not allocators:
        sys.exit(f"nothing to measure: {collected.notes[0]}")
    budget = arguments.budget or (QUICK_SECONDS if arguments.quick else FULL_SECONDS)
    request = {
        "quick": arguments.quick,
        "all_cases": arguments.all_cases,
        "filter": arguments.filter,
        "precision": arguments.dtype,
        "libraries": str(arguments.libraries.resolve()),
    }
    with progress_over(console) as progress:
        for allocator, env in allocators.items():
            until = time.monotonic() + budget / len(allocators)
            measure(allocator, request | {"until": until}, env, collected, progress)
        task = progress.add_task("kernels alone", total=None)
        arrived = kernels_alone(
            arguments.libraries, env, collected.facts, collected.rows, collected.note
        )
        for each in arrived:
            show(progress, task, f"kernels alone: {each['optimizer']}/{each['shapes']}")
            collected.kernels.append(each)
        progress.update(task, description="kernels alone: done")
    collected.note_disturbance(others.share())
    return collected


def main() -> None:
    arguments = parse_arguments()
    output.check_libraries(arguments.libraries)
    try:
        collected = collect(arguments, Console(stderr=True))
    except WorkerError as failure:
        sys.exit(f"bench: {failure}")
    if not collected.rows:
        sys.exit(f"no row matches {arguments.filter!r}: rows are OPTIMIZER/LIST, as lamb/matrix")
    folder = output.results_folder(arguments, collected.machine.slug)
    results = collected.results()
    output.write(folder, results, report.markdown(results))
    plot.plot(results, folder)

    terminal = Console()
    tables = list(report.rich_tables(results, terminal.width if terminal.is_terminal else 1000))
    output.show(tables, report.remarks(results), folder)


if __name__ == "__main__":
    main()
