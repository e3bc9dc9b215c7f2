#!/usr/bin/env python3
"""Time whole optimizer steps from Python against the limit of the machine, and beside others.

SUITE is one of

    steps      ours, unfused and torch's, under both allocators (the default); cuda: on a GPU
    peers      beside other libraries, each in a process of its own
    clipping   step(max_norm=..., zero_grad=True) against the separate calls
    embedding  sparse gradients of an embedding table
    adan       memory and time of Adan over the sizes of GPT-2 that its authors published

Rows are named as "adam/gpt2", "adamw/gpt2/mixed" or "adam/gpt2/4-threads"; FILTER is a regular
expression that selects some. Results go into a folder as SUITE.json, README.md (the tables) and
SUITE-times.svg.
"""

from __future__ import annotations

import argparse
import datetime
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from harness import peer_packages
from harness.environment import ALLOCATORS, ROOT, Env, environments
from harness.machine import Others, this_machine
from harness.processes import (
    LateError,
    Tell,
    WorkerError,
    check_allocator,
    events,
    progress_over,
    show,
)
from reports import grid, page, plot
from reports.grid import Row
from reports.tables import write_table
from suites.kernels import add_kernels
from suites.rows import PRECISIONS
from suites.suite import SUITES, Process

#: Seconds after its time in which a process may end what it has begun: a first step may be
#: compiled.
PATIENCE = 300

#: Seconds with --quick.
QUICK_SECONDS = 150

#: The lists for which allocators are compared beside peers.
BOTH_ALLOCATORS = ["matrix", "resnet50", "gpt2", "small"]

#: Arguments that a worker is asked with.
ASKED = ("suite", "device", "filter", "quick", "all_cases", "precision")

#: Share of the CPUs above which the rest of the system disturbs figures enough to say so.
DISTURBING = 0.1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="[SUITE] [FILTER]")
    add("--device", choices=("cpu", "cuda"), help="default: cpu; adan: cuda, if there is one")
    add("--quick", action="store_true", help="steps: a few lists, in minutes")
    add("--all-cases", action="store_true", help="steps: all variants")
    add("--dtype", choices=(*PRECISIONS,), default="float32", dest="precision",
        help="steps; mixed: weights and gradients in bfloat16, states in float32")  # fmt: skip
    add("--allocator", choices=ALLOCATORS, action="append", dest="allocators")
    add("--peer", action="append", dest="peers", metavar="NAME", help="peers: one, or several")
    add("--all-rows", action="store_true", help="also those for which no time is left, shortly")
    add("--budget", type=float, metavar="SECONDS", help="time for all steps")
    where = parser.add_mutually_exclusive_group().add_argument
    where("--output", type=Path, metavar="DIR", help="not build/results/MACHINE")
    where("--commit", action="store_true", help="write into bench/results/MACHINE, for the pages")
    add("--packages", type=Path, metavar="DIR", default=peer_packages.FOLDER,
        help="where peer_packages.py has put the libraries")  # fmt: skip
    add("--libraries", type=Path, metavar="DIR", default=ROOT / "build" / "release" / "bench",
        help="where the native parts of the benchmark were built")  # fmt: skip
    arguments = parser.parse_intermixed_args()
    words = arguments.words
    if words and words[0] == "cuda":
        words[0], arguments.device = "steps", "cuda"
    named = words and words[0] in {name for name, _ in SUITES}
    arguments.suite = words.pop(0) if named else "steps"
    arguments.filter = words.pop(0) if words else ""
    if arguments.device is None:
        has_cuda = arguments.suite == "adan" and torch.cuda.is_available()
        arguments.device = "cuda" if has_cuda else "cpu"
    if words:
        parser.error(f"one FILTER at most: {' '.join(words)}")
    try:
        re.compile(arguments.filter)
    except re.error as error:
        parser.error(f"not a regular expression: {error}")
    if (arguments.suite, arguments.device) not in SUITES:
        parser.error(f"{arguments.suite} is not measured on {arguments.device}")
    return arguments


class Run:
    """A suite's processes, one after the other, and what they have found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.suite = SUITES[arguments.suite, arguments.device]
        self.machine = this_machine()  # before this process is pinned to some of its CPUs
        self.facts: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.notes: list[str] = []
        #: The best ways of each row's limit that were found yet.
        self._limits: dict[str, dict[str, Any]] = {}

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def pairs(self) -> list[tuple[Process, str]]:
        """Each process with its allocators; first the one that finds the limits."""
        wanted, peers = self.suite.processes, self.arguments.peers
        if peers:
            wanted = [each for each in wanted if {each.name, *each.names} & {*peers}]
            if not wanted or wanted[0].name != "torch":
                wanted.insert(0, Process("torch", ("fused",)))
        allocators = self.arguments.allocators or self.suite.allocators
        return [(process, allocator) for allocator in allocators for process in wanted]

    def collect(self, keep: Callable[[], object]) -> None:
        """Measures all. `keep` is called with what there is after each process."""
        arguments, others, found = self.arguments, Others(), []
        wanted = {allocator for _, allocator in self.pairs()}
        envs, self.notes = environments([name for name in ALLOCATORS if name in wanted])
        if not envs:
            envs, _ = environments(["glibc"])
        pairs = [(process, a if a in envs else "glibc") for process, a in self.pairs()]
        pairs = list(dict.fromkeys(pair for pair in pairs if pair[1] in envs))
        seconds = QUICK_SECONDS if arguments.quick else self.suite.seconds
        end = time.monotonic() + (seconds if arguments.budget is None else arguments.budget)
        with progress_over(Console(stderr=True)) as progress:
            task = progress.add_task("starting", total=len(pairs))
            for number, (process, allocator) in enumerate(pairs):
                name = f"{process.name}, {allocator}"
                left = end - time.monotonic()
                if left < 0 and self.suite.leaves_out and not arguments.all_rows:
                    self.note(f"{name}: not measured, the time was up")
                    continue
                share = process.share / sum(later.share for later, _ in pairs[number:])
                until = time.monotonic() + left * share
                tell = partial(show, progress, task, f"{name}: ")
                rows = self.measure(process, allocator, envs[allocator], until, tell)
                found += [{"allocator": allocator} | row for row in rows]
                progress.advance(task)
                if not self.facts:
                    break  # none begins where the first could not
                self.rows = merged(found)
                if len(envs) == 1:
                    for row in self.rows:
                        self.facts["allocator"] = row.pop("allocator")
                if self.rows:
                    keep()
            if self.suite.has_limit and self.facts.get("isa"):
                tell = partial(show, progress, task, "kernels alone: ")
                env = next(iter(envs.values()))
                add_kernels(arguments.libraries, env, self.facts, self.rows, self.note, tell)
            progress.update(task, description="done")
        if (share := others.share()) > DISTURBING:
            self.note(
                f"other programs took {100 * share:.0f} % of the CPUs meanwhile: these are the "
                "figures of a busy machine"
            )

    def measure(
        self, process: Process, allocator: str, env: Env, until: float, tell: Tell
    ) -> list[Row]:
        """The rows of a process. Where it crashes, the next row has a process of its own."""
        arguments = self.arguments
        request: dict[str, Any] = {name: getattr(arguments, name) for name in ASKED} | {
            "names": process.names,
            "skip_late": self.suite.leaves_out and not arguments.all_rows,
            "limits": self._limits,
            "libraries": str(arguments.libraries.resolve()),
            "until": until,
        }
        if arguments.suite == "peers" and allocator != "glibc":
            request["shapes"] = BOTH_ALLOCATORS
        if process.package is not None:
            try:
                folder = arguments.packages
                env = peer_packages.environment(process.package, env, folder, arguments.device)
            except peer_packages.AbsentError as reason:
                request["absent"] = str(reason)
        name = f"{arguments.suite}-{arguments.device}-{process.name}-{allocator}"
        log = ROOT / "build" / "logs" / "bench" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        rows: list[Row] = []
        while True:
            planned, begun = {}, None
            request["skip"] = [row["name"] for row in rows]
            patience = PATIENCE + max(0.0, until - time.monotonic())
            most = None if process.name == "torch" else patience
            try:
                for event in events(request, env, log, most):
                    match event["event"]:
                        case "plan":
                            check_allocator(event["facts"], allocator)
                            self.facts = event["facts"]
                            planned = {row["name"]: row for row in event["rows"]}
                        case "row":
                            begun = event["name"]
                            tell(begun)
                        case "result":
                            rows.append(event["row"])
                            if "limit" in event["row"]:
                                self._limits[begun] = event["row"]["limit"]
                            begun = None
            except WorkerError as failure:
                if begun is None:
                    self.note(f"{process.name}, {allocator}: {failure}")
                    return rows
                problem = "late" if isinstance(failure, LateError) else "crashed"
                results = {name: {problem: str(failure)} for name in planned[begun]["names"]}
                rows.append(planned[begun] | {"results": results})
            else:
                return rows

    def results(self) -> dict[str, Any]:
        return {
            "suite": self.arguments.suite,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": asdict(self.machine),
            **self.facts,
            "notes": self.notes,
            "rows": self.rows,
        }


def merged(rows: list[Row]) -> list[Row]:
    """The rows of all processes, those of one name and allocator in one.

    The `times` of an implementation is what its step takes of ours in the same process. Ours and
    the limit are medians over the processes.
    """
    together: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        together.setdefault((row["name"], row["allocator"]), []).append(row)
    return [_merged_row(found) for found in together.values()]


def _merged_row(found: list[Row]) -> Row:
    row = {key: value for key, value in found[-1].items() if key != "names"}
    if all("skipped" in each for each in found):
        return row
    row.pop("skipped", None)
    row["results"] = {}
    for each in found:
        if "contiguous" in each:
            row["contiguous"] = each["contiguous"]
        ours = each.get("results", {}).get("fused", {})
        for name in each["names"]:
            result = {"skipped": each["skipped"]} if "skipped" in each else each["results"][name]
            if "ms" in result and "ms" in ours and name != "fused":
                result = result | {"times": result["ms"] / ours["ms"]}
            row["results"][name] = result
    ours = [each.get("results", {}).get("fused", {}) for each in found]
    timed = [each for each in ours if "ms" in each]
    if len(timed) > 1:
        shared = [key for key in ("ms", "share") if all(key in each for each in timed)]
        medians = {key: statistics.median(each[key] for each in timed) for key in shared}
        row["results"]["fused"] = medians | {"processes": len(timed)}
    elif timed:
        row["results"]["fused"] = timed[0]
    limits = [each["limit"]["ms"] for each in found if "limit" in each]
    if limits:
        row["limit"] = {"ms": statistics.median(limits)}
    return row


# ---- Where results go ----------------------------------------------------------------------------


def folder_of(arguments: argparse.Namespace, name: str) -> Path:
    """The folder that is asked for. Git ignores the usual one, in build/."""
    root = ROOT / ("bench" if arguments.commit else "build") / "results"
    found = arguments.output or root / name
    found.mkdir(parents=True, exist_ok=True)
    return found


def write(folder: Path, results: dict[str, Any]) -> None:
    write_table(folder / f"{results['suite']}.json", results)
    page.write_page(folder)


def show_tables(results: dict[str, Any], folder: Path) -> None:
    """Figures that are cut off would be worse than lines that wrap."""
    terminal = Console()
    tables = [grid.table() for grid in page.grids(results)]
    widths = [Console(width=1000).measure(table).maximum for table in tables]
    console = Console(width=max(terminal.width, *widths))
    for table in tables:
        console.print(table)
    for line in (grid.subtitle(results), *page.remarks(results)):
        terminal.print(line, markup=False, highlight=False)
    terminal.print(f"Results, tables and plots are in {folder}", markup=False, highlight=False)


def main() -> None:
    arguments = parse_arguments()
    run = Run(arguments)
    if run.suite.has_limit and not list(arguments.libraries.glob("libfusedstep_limit.*")):
        sys.exit(
            f"{arguments.libraries} has no libfusedstep_limit.so. Build it: "
            "cmake --preset release && cmake --build --preset release"
        )

    def keep() -> tuple[dict[str, Any], Path]:
        results = run.results()
        name = "-".join(results.get("device", "").lower().split()) or run.machine.slug
        folder = folder_of(arguments, name)
        write(folder, results)
        return results, folder

    run.collect(keep)
    if not run.rows:
        sys.exit("\n".join([f"nothing was measured for {arguments.filter!r}", *run.notes]))
    results, folder = keep()
    # Pages show the plots that a folder of committed results has.
    if not arguments.commit or (folder / f"{arguments.suite}-times.svg").exists():
        plot.draw(folder / f"{arguments.suite}.json", folder)
    page.write_page(folder)  # once more, with the plot
    show_tables(results, folder)


if __name__ == "__main__":
    main()
