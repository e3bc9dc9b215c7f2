#!/usr/bin/env python3
"""Time whole optimizer steps beside other libraries' and the limit of the machine.

Each peer has a process of its own, in which ours and the limit are measured with it: what is
compared was measured together. Rows are named as "adam/gpt2", "adamw/gpt2/mixed" or
"adam/gpt2/4-threads"; FILTER is a regular expression that selects some. With --device cuda, weights
are on a GPU, and torch's optimizers share one process.
Results go into a folder as results.json, README.md (the tables) and plots.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

import cuda_peers_plot
import cuda_peers_report
import output
import peer_packages
import peers_plot
import peers_report
from environment import ALLOCATORS, ROOT, environments
from kernels import kernels_alone
from machine import Others
from processes import LateError, WorkerError, check_allocator, events, progress_over, show

#: How long after its time a process may still be measuring what it has begun: a first step may be
#: compiled.
PATIENCE = 60

#: The lists for which allocators are compared.
BOTH_ALLOCATORS = ["matrix", "resnet50", "gpt2", "small"]


@dataclass(frozen=True)
class Process:
    peer: str
    """As in peer_optimizers.py."""
    package: str | None = None
    allocates: bool = False
    """Whether a step makes temporaries: then its time depends on the allocator."""
    share: float = 1
    """Of the time."""


@dataclass(frozen=True)
class Target:
    """What measures on a device, and what tells of it."""

    processes: tuple[Process, ...]
    program: str
    """Of a process."""
    seconds: float
    """For all, unless told."""
    allocators: tuple[str, ...]
    report: ModuleType
    plot: Callable[[dict[str, Any], Path], None]


OURS = Process("fused", share=5)
"""Also looks for the limit of each row: the others begin with what was best here."""

PROCESSES = (
    OURS,
    Process("torch_fused", share=2),
    Process("unfused", allocates=True, share=1.5),
    Process("for_loop", allocates=True),
    Process("foreach", allocates=True),
    Process("compiled"),
    Process("deepspeed", "deepspeed", share=2),
    Process("timm", "timm", allocates=True),
    Process("pytorch_optimizer", "pytorch_optimizer", allocates=True),
    Process("torchao_8bit", "torchao"),
    Process("torchao", "torchao"),
    Process("bitsandbytes_8bit", "bitsandbytes"),
    Process("bitsandbytes", "bitsandbytes"),
)

#: Of weights on a GPU, as in cuda_peers.py. The first looks for the limits.
CUDA_PROCESSES = (
    Process("torch", share=7),
    Process("apex", "apex", share=3),
    Process("deepspeed", "deepspeed", share=3),
    Process("timm", "timm", share=2),
    Process("compiled", share=4),
)

TARGETS = {
    "cpu": Target(PROCESSES, "worker.py", 1500, ALLOCATORS, peers_report, peers_plot.plot),
    "cuda": Target(
        CUDA_PROCESSES, "cuda_worker.py", 600, ("glibc",), cuda_peers_report, cuda_peers_plot.plot
    ),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=TARGETS, default="cpu")
    names = {process.peer: None for each in TARGETS.values() for process in each.processes}
    parser.add_argument(
        "--peer", choices=names, action="append", dest="peers", help="one of them, or several"
    )
    parser.add_argument("--allocator", choices=ALLOCATORS, action="append", dest="allocators")
    parser.add_argument(
        "--all-rows", action="store_true", help="also those for which no time is left, shortly"
    )
    parser.add_argument(
        "--packages",
        type=Path,
        metavar="DIR",
        default=peer_packages.FOLDER,
        help="where peer_packages.py has put the libraries",
    )
    output.add_arguments(parser)
    return parser.parse_args()


#: The process, the allocator and the rows of each that has come to an end.
Parts = list[tuple[str, str, list[dict[str, Any]]]]


@dataclass
class Run:
    """What the processes of a run have in common."""

    request: dict[str, Any]
    device: str
    packages: Path
    logs: Path
    note: Callable[[str], None]
    facts: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The best way of each row's limit that was found yet."""

    def measure(
        self,
        process: Process,
        allocator: str,
        env: dict[str, str],
        until: float,
        tell: Callable[[str], None],
    ) -> list[dict[str, Any]]:
        """The rows of a peer. Where it crashes, the next row has a process of its own."""
        request = self.request | {"peer": process.peer, "limits": self.limits, "until": until}
        if allocator != "glibc":
            request["shapes"] = BOTH_ALLOCATORS
        if process.package is not None:
            try:
                env = peer_packages.environment(process.package, env, self.packages, self.device)
            except peer_packages.AbsentError as reason:
                request["absent"] = str(reason)
        program = TARGETS[self.device].program
        log = self.logs / f"{self.device}-{process.peer}-{allocator}.log"
        rows: list[dict[str, Any]] = []
        while True:
            planned, begun = {}, None
            request["skip"] = [row["name"] for row in rows]
            patience = max(0.0, until - time.monotonic()) + PATIENCE
            try:
                for event in events(request, env, log, patience, program):
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
                            begun = None
                        case "note":
                            self.note(event["text"])
            except WorkerError as failure:
                if begun is None:
                    self.note(f"{process.peer}, {allocator}: {failure}")
                    return rows
                problem = "late" if isinstance(failure, LateError) else "crashed"
                names = planned[begun].get("peers", [process.peer])
                results = {name: {problem: str(failure)} for name in names}
                rows.append(planned[begun] | {"results": results})
            else:
                return rows

    def remember_limits(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if "limit" in row:
                times = ("ms", "seconds")
                way = {key: value for key, value in row["limit"].items() if key not in times}
                self.limits[row["name"]] = way


def chosen(arguments: argparse.Namespace) -> list[tuple[Process, str]]:
    """Each process with its allocator; ours first."""
    target = TARGETS[arguments.device]
    wanted = [p for p in target.processes if p == OURS or p.peer in (arguments.peers or [p.peer])]
    allocators = arguments.allocators or target.allocators
    pairs = [(process, "glibc") for process in wanted]
    pairs += [(process, "jemalloc") for process in wanted if process.allocates]
    return [pair for pair in pairs if pair[1] in allocators or pair[0] == OURS]


def merged(parts: Parts) -> list[dict[str, Any]]:
    """The rows of all processes, those of one name and allocator in one.

    A peer's `times` is what its step takes of ours in the same process. Ours and the limit are
    medians over the processes.
    """
    together: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for peer, allocator, rows in parts:
        for row in rows:
            together.setdefault((row["name"], allocator), []).append((peer, row))
    return [_merged_row(allocator, found) for (_, allocator), found in together.items()]


def _merged_row(allocator: str, found: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    row = {"allocator": allocator} | found[-1][1]
    measured = [each for _, each in found if "limit" in each]
    if all("skipped" in each for _, each in found):
        return row
    for key in ("skipped", "peers"):
        row.pop(key, None)
    row["results"] = {}
    for process, each in found:
        if "contiguous" in each:
            row["contiguous"] = each["contiguous"]
        ours = each.get("results", {}).get("fused", {})
        for peer in each.get("peers", [process]):
            result = {"skipped": each["skipped"]} if "skipped" in each else each["results"][peer]
            if "ms" in result and "ms" in ours and peer != "fused":
                result = result | {"times": result["ms"] / ours["ms"]}
            row["results"][peer] = result
    ours = [each["results"]["fused"] for each in measured if "ms" in each["results"]["fused"]]
    if ours:
        medians = {
            key: statistics.median(each[key] for each in ours) for key in ("ms", "gbps", "share")
        }
        row["results"]["fused"] = medians | {"processes": len(ours)}
        unfused = row["results"].get("unfused", {})
        if "times" in unfused:
            row["results"]["fused"]["speedup"] = unfused["times"]
    if measured:
        row["limit"] = {"ms": statistics.median(each["limit"]["ms"] for each in measured)}
    return row


def collect(
    arguments: argparse.Namespace,
    console: Console,
    keep: Callable[[output.Collected, Parts], object],
) -> tuple[output.Collected, Parts]:
    """What all processes measure. What there is after each of them is given to `keep`."""
    collected, others = output.Collected(), Others()
    target = TARGETS[arguments.device]
    envs, collected.notes = environments(list(target.allocators))
    pairs = [pair for pair in chosen(arguments) if pair[1] in envs]
    logs = ROOT / "build" / "logs" / "peers"
    logs.mkdir(parents=True, exist_ok=True)
    libraries = str(arguments.libraries.resolve())
    request = {
        "filter": arguments.filter,
        "libraries": libraries,
        "skip_late": not arguments.all_rows,
    }
    run = Run(request, arguments.device, arguments.packages, logs, collected.note)
    budget = target.seconds if arguments.budget is None else arguments.budget
    end = time.monotonic() + budget
    parts: Parts = []
    with progress_over(console) as progress:
        task = progress.add_task("starting", total=len(pairs))
        for number, (process, allocator) in enumerate(pairs):
            left = sum(later.share for later, _ in pairs[number:])
            seconds = end - time.monotonic()
            until = time.monotonic() + seconds * process.share / left
            if seconds < 0 and not arguments.all_rows:
                collected.note(f"{process.peer}, {allocator}: not measured, the time was up")
                continue

            def tell(row: str, peer: str = process.peer, allocator: str = allocator) -> None:
                show(progress, task, f"{peer}, {allocator}: {row}")

            rows = run.measure(process, allocator, envs[allocator], until, tell)
            parts.append((process.peer, allocator, rows))
            run.remember_limits(rows)
            progress.advance(task)
            if not run.facts:
                break  # none begins where the first could not
            collected.facts, collected.rows = run.facts, merged(parts)
            if arguments.device == "cuda":
                for row in collected.rows:
                    del row["allocator"]  # that of the host's memory
            if collected.rows:
                keep(collected, parts)
        if arguments.device == "cpu":
            for each in kernels_alone(
                arguments.libraries, envs["glibc"], run.facts, collected.rows, collected.note
            ):
                show(progress, task, f"kernels alone: {each['optimizer']}/{each['shapes']}")
                collected.kernels.append(each)
        progress.update(task, description="done")
    collected.note_disturbance(others.share())
    return collected, parts


def main() -> None:
    arguments = parse_arguments()
    target = TARGETS[arguments.device]
    if arguments.device == "cpu":
        output.check_libraries(arguments.libraries)

    def keep(collected: output.Collected, parts: Parts) -> tuple[dict[str, Any], Path]:
        results = collected.results() | {
            "processes": [
                {"peer": peer, "allocator": allocator, "rows": rows}
                for peer, allocator, rows in parts
            ]
        }
        slug = collected.machine.slug
        if arguments.device == "cuda":
            slug = "-".join(results["device"].lower().split())
        folder = output.results_folder(arguments, slug, "peers")
        output.write(folder, results, target.report.markdown(results))
        return results, folder

    collected, parts = collect(arguments, Console(stderr=True), keep)
    if not collected.rows:
        sys.exit("\n".join([f"nothing was measured for {arguments.filter!r}", *collected.notes]))
    results, folder = keep(collected, parts)
    target.plot(results, folder)
    output.show(target.report.tables(results), target.report.remarks(results), folder)


if __name__ == "__main__":
    main()
