#!/usr/bin/env python3
"""Time our steps of another commit and of the working tree, in turn, and tell the ratios.

REF is checked out and built in a folder under build/, which is removed afterwards. Each round has
four processes: REF, the working tree, the working tree, REF. So what drifts falls on both alike,
and two processes of one tree show the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from harness.environment import ROOT, environments
from harness.processes import WorkerError, events, progress_over, show
from reports.grid import Grid, milliseconds

#: The options of the working tree's configuration that decide how fast the result is.
KEPT = ("Python_EXECUTABLE", "CMAKE_CXX_COMPILER", "CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CXX_FLAGS")

Times = dict[str, float]
"""Milliseconds a step, by row: the lower quartile of a process, since what disturbs a step only
makes it longer."""


Round = tuple[Times, Times, Times, Times]
"""The times of four processes: REF, the working tree, the working tree, REF."""


@dataclass(frozen=True)
class Comparison:
    """The result for one row. The ratio is the working tree's time over that of REF."""

    row: str
    ref: float
    now: float
    ratio: float
    quartiles: tuple[float, float]
    noise: float
    """Factor by which two processes of the same tree differ: three of four differ by less."""

    @property
    def verdict(self) -> str:
        low, high = self.quartiles
        if low <= 1 <= high or max(self.ratio, 1 / self.ratio) <= self.noise:
            return "within the noise"
        return "faster" if self.ratio < 1 else "SLOWER"


def compare(rounds: list[Round]) -> list[Comparison]:
    """Compares the rows that both trees have."""
    ref, now, *_ = rounds[0]
    return [_compare(row, rounds) for row in now if row in ref]


def _compare(row: str, rounds: list[Round]) -> Comparison:
    ref = np.array([[first[row], last[row]] for first, _, _, last in rounds])
    now = np.array([[first[row], last[row]] for _, first, last, _ in rounds])
    low, ratio, high = np.exp(np.quantile(np.log(now / ref), (0.25, 0.5, 0.75))).tolist()
    same = np.abs(np.log(np.concatenate([ref[:, 1] / ref[:, 0], now[:, 1] / now[:, 0]])))
    noise = math.exp(np.quantile(same, 0.75))
    medians = float(np.median(ref)), float(np.median(now))
    return Comparison(row, *medians, ratio, (low, high), noise)


def grid(title: str, compared: list[Comparison]) -> Grid:
    header = ["row", "REF, ms", "now, ms", "now : REF", "quartiles", "noise", ""]
    lines = [
        [
            each.row,
            milliseconds(each.ref),
            milliseconds(each.now),
            f"{each.ratio:.3f}",
            f"{each.quartiles[0]:.3f} to {each.quartiles[1]:.3f}",
            f"±{100 * (each.noise - 1):.1f} %",
            each.verdict,
        ]
        for each in compared
    ]
    return Grid(title, header, lines)


def summary(compared: list[Comparison]) -> str:
    verdicts = [each.verdict for each in compared]
    counts = {word: verdicts.count(word) for word in ("faster", "SLOWER", "within the noise")}
    if counts["within the noise"] == len(compared):
        return f"No difference: all {len(compared)} rows are within the noise."
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    return f"{len(compared)} rows: {told}."


# ---- The trees -----------------------------------------------------------------------------------


@contextlib.contextmanager
def checked_out(ref: str) -> Iterator[Path]:
    """A tree of its own with REF, built; removed afterwards."""
    commit = _run("git", "rev-parse", "--verify", f"{ref}^{{commit}}").strip()
    tree = ROOT / "build" / "compare" / commit[:12]
    shutil.rmtree(tree, ignore_errors=True)  # of a run that was interrupted
    _run("git", "worktree", "add", "--force", "--detach", str(tree), commit)
    try:
        _build(tree)
        yield tree
    finally:
        _run("git", "worktree", "remove", "--force", str(tree))


def _run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}\ncompare: {' '.join(command)} failed")
    return done.stdout


def _build(tree: Path) -> None:
    """The library for the CPU alone: the harness is the working tree's for both."""
    folder = str(tree / "build" / "release")
    options = ["-DFUSEDSTEP_WITH_CUDA=OFF", *_kept_options()]
    _run("cmake", "-S", str(tree), "-B", folder, "--preset", "release", *options)
    _run("cmake", "--build", folder, "--target", "fusedstep_python")


def _kept_options() -> list[str]:
    cache = (ROOT / "build" / "release" / "CMakeCache.txt").read_text(encoding="utf-8")
    found = dict(re.findall(r"^(\w+):\w+=(.+)$", cache, re.MULTILINE))
    return [f"-D{name}={found[name]}" for name in KEPT if name in found]


# ---- Measuring -----------------------------------------------------------------------------------


def times(tree: Path, request: dict, seconds: float) -> Times:
    """The rows of one process over a tree's library."""
    envs, _ = environments(["glibc"], tree)
    until = time.monotonic() + seconds
    rows = [
        event["row"]
        for event in events(request | {"until": until}, envs["glibc"])
        if event["event"] == "result"
    ]
    problems = [f"{r['name']}: {r}" for r in rows if "ms" not in r["results"]["fused"]]
    if problems:
        raise WorkerError("\n".join([f"in {tree}:", *problems]))
    return {row["name"]: row["results"]["fused"]["quartiles"][0] for row in rows}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("ref", metavar="REF", help="a commit: v1.0, main, HEAD~3")
    add("filter", nargs="?", default="", metavar="FILTER",
        help="rows of all lists, as 'adam/gpt2$'; default: those of --quick")  # fmt: skip
    add("--rounds", type=int, default=5, metavar="N", help="default: 5")
    add("--seconds", type=float, default=6, help="for each of the four processes of a round")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    console, rounds = Console(stderr=True), []
    request = {"filter": arguments.filter, "quick": not arguments.filter}
    console.print(f"building {arguments.ref} ...", highlight=False)
    with checked_out(arguments.ref) as tree, progress_over(console) as progress:
        task = progress.add_task("starting", total=4 * arguments.rounds)
        for number in range(arguments.rounds):
            found = []
            for each, name in ((tree, "REF"), (ROOT, "now"), (ROOT, "now"), (tree, "REF")):
                show(progress, task, f"round {number + 1}: {name}")
                try:
                    found.append(times(each, request, arguments.seconds))
                except WorkerError as failure:
                    sys.exit(f"compare: {failure}")
                progress.advance(task)
            rounds.append(tuple(found))
    compared = compare(rounds)
    if not compared:
        sys.exit(f"no row matches {arguments.filter!r}: rows are OPTIMIZER/LIST, as lamb/matrix")
    table = grid(f"The working tree against {arguments.ref}", compared).table()
    Console(width=120).print(table)
    print(summary(compared))


if __name__ == "__main__":
    main()
