#!/usr/bin/env python3
"""Time steps of this tree against those of another commit by the classes that both have.

    against.py REFERENCE OUT.json       REFERENCE: a checkout of the other commit, built

`./run.sh bench compare` gives the other commit's library to the harness of this tree, which an old
one does not fit. This probe asks for no more than `optim.Adam(params, lr=..., fused=True)`. A
process for each tree, with its own PYTHONPATH, takes turns with the other's, in alternating order;
after some rounds two others begin. Each round has new tensors, at places of its own. A time is the
lower quartile of a round, since what disturbs a step only makes it longer; on a GPU that of the
step and of waiting for it. A ratio is that of one round, this tree's time over that of REFERENCE.
Steps of less than a millisecond on many threads differ by factors between rounds, which forty of
them leave at some percent: `against.py . OUT.json` compares this tree with itself.
With `--unfused` the steps are those of `fused=False`, in torch operations.

Prints the table of bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness.environment import ROOT, environments
from harness.processes import WorkerError
from reports.tables import rounded, write_table
from suites.shapes import ALL, HOST

CLASSES = ("Adam", "AdamW", "Adan", "Adagrad", "Lamb")
LISTS = ("matrix", "transposed", "small", "64x2000", "resnet50", "gpt2")
TENSORS = {each.name: each for each in (*ALL, *HOST)}
DTYPES = ("float32", "bfloat16", "float16")

WARM_UP, FEWEST = 3, 5
"""Steps before those that are timed, and how many these are at least."""

RENEWED = 500
"""Steps with the same gradients, at most: means of differences decay to denormal numbers."""

ROUNDS_OF_A_PROCESS = 5
"""Where a process has its memory is settled once, and its times depend on it."""

Times = dict[str, float]
"""Milliseconds of a step, by row."""


def serve(asked: argparse.Namespace) -> None:
    """Measures for each line that comes, and prints a line of JSON: imports take as long as ten."""
    for _ in sys.stdin:
        print(json.dumps(measure(asked)), flush=True)


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """The times of the tree that Python finds, and on what it stepped."""
    import torch

    from fusedstep import optim

    kind = {"device": asked.device, "dtype": getattr(torch, asked.dtype)}
    # Moves what follows to other places, relative to pages and to sets of a cache, in each round.
    between = [torch.empty(random.randrange(1 << 14)) for _ in range(64)]
    del between[::2]
    times: Times = {}
    for name in asked.lists:
        if TENSORS[name].layout == "transposed":
            weights = [torch.randn(shape[::-1], **kind).t() for shape in TENSORS[name].shapes]
        else:
            weights = [torch.randn(shape, **kind) for shape in TENSORS[name].shapes]
        params = [torch.nn.Parameter(weight) for weight in weights]
        gradients = [torch.randn(param.shape, **kind) for param in params]
        for cls in asked.classes:
            optimizer = getattr(optim, cls)(params, lr=1e-4, fused=not asked.unfused)
            times[f"{cls}/{name}"] = milliseconds(optimizer, params, gradients, asked.seconds)
    if asked.device == "cuda":
        return {"times": times, "about": {"gpu": torch.cuda.get_device_name()}}
    return {"times": times, "about": {"threads": torch.get_num_threads()}}


def milliseconds(optimizer, params, gradients, seconds: float) -> float:
    import torch

    def step() -> None:
        optimizer.step()
        if params[0].is_cuda:
            torch.cuda.synchronize()

    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone()
    for _ in range(WARM_UP):
        step()
    found: list[float] = []
    until = time.monotonic() + seconds
    while len(found) < FEWEST or time.monotonic() < until:
        if len(found) % RENEWED == RENEWED - 1:
            for param, gradient in zip(params, gradients, strict=True):
                param.grad.copy_(gradient)
        began = time.perf_counter()
        step()
        found.append((time.perf_counter() - began) * 1e3)
    return statistics.quantiles(found, n=4)[0]


def flags_of(asked: argparse.Namespace) -> list[str]:
    """The flags for steps that are not of float32, on a CPU, and fused."""
    flags = ["--device", "cuda"] if asked.device == "cuda" else []
    flags += ["--dtype", asked.dtype] if asked.dtype != "float32" else []
    return flags + ["--unfused"] * asked.unfused


def started(tree: Path, asked: argparse.Namespace) -> subprocess.Popen[str]:
    """A process over a tree that measures when it is told to. Its threads sleep in between."""
    envs, _ = environments(["glibc"], tree)
    command = [sys.executable, __file__, "--measure", "--seconds", str(asked.seconds)]
    command += [*flags_of(asked), "--lists", *asked.lists, "--classes", *asked.classes]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=envs["glibc"], stdin=pipe, stdout=pipe, text=True)


def round_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Has the process measure a round."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise WorkerError(f"ended with status {process.wait()}")
    return json.loads(line)


def compared(rounds: list[tuple[Times, Times]]) -> dict[str, dict[str, float]]:
    """By row: the medians of both trees, and of the ratios with the least and the largest."""
    found = {}
    for row in rounds[0][0]:
        before, now = zip(*((ref[row], ours[row]) for ref, ours in rounds), strict=True)
        ratios = sorted(new / old for old, new in zip(before, now, strict=True))
        found[row] = {
            "reference": statistics.median(before),
            "now": statistics.median(now),
            "ratio": statistics.median(ratios),
            "least": ratios[0],
            "most": ratios[-1],
        }
    return found


def table(results: dict[str, Any]) -> str:
    """Milliseconds of this tree, and in brackets its times over those of the reference.

    Classes are columns, unless they are more than the usual ones.
    """
    rows = results["ms"]
    classes, lists = (dict.fromkeys(row.split("/")[i] for row in rows) for i in (0, 1))
    cells = {row: f"{each['now']:.3g} ({each['ratio']:.2f})" for row, each in rows.items()}
    titles = {name: TENSORS[name].title for name in lists}
    if len(classes) > len(CLASSES):
        return grid(titles.values(), {c: [cells[f"{c}/{name}"] for name in lists] for c in classes})
    return grid(classes, {titles[name]: [cells[f"{c}/{name}"] for c in classes] for name in lists})


def grid(heads: Iterable[str], rows: dict[str, list[str]]) -> str:
    heads = list(heads)
    lines = [f"| | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"


def commit_of(tree: Path) -> str:
    command = ["git", "-c", f"safe.directory={tree}", "-C", str(tree), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout[:7]


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("reference", metavar="REFERENCE", nargs="?", type=Path)
    add("output", metavar="OUT.json", nargs="?", type=Path)
    add("--rounds", type=int, default=2, metavar="N", help="default: 2")
    add("--seconds", type=float, default=0.4, help="for each row of a process; default: 0.4")
    add("--lists", nargs="+", choices=LISTS, default=LISTS, metavar="LIST",
        help=f"of {', '.join(LISTS)}; default: all")  # fmt: skip
    add("--classes", nargs="+", default=CLASSES, metavar="CLASS",
        help=f"of fusedstep.optim; default: {', '.join(CLASSES)}")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and gradients")
    add("--threads", type=int, help="default: one for each core of a socket")
    add("--unfused", action="store_true", help="steps of fused=False")
    add("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if not asked.measure and asked.output is None:
        parser.error("REFERENCE and OUT.json are needed")
    return asked


def main() -> None:
    asked = parse_arguments()
    if asked.measure:
        serve(asked)
        return
    if asked.threads:
        os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    reference = asked.reference.resolve()
    commit = commit_of(reference)
    rounds: list[tuple[Times, Times]] = []
    for first in range(0, asked.rounds, ROUNDS_OF_A_PROCESS):
        with started(reference, asked) as before, started(ROOT, asked) as now:
            for number in range(first, min(first + ROUNDS_OF_A_PROCESS, asked.rounds)):
                order = [before, now] if number % 2 else [now, before]
                found = {process.pid: round_of(process) for process in order}
                rounds.append((found[before.pid]["times"], found[now.pid]["times"]))
                about = {"reference": commit, **found[now.pid]["about"], "dtype": asked.dtype}
                about["rounds"] = len(rounds)
                if asked.unfused:
                    about["fused"] = False
                about["by"] = " ".join(["bench/probes/against", *flags_of(asked)])
                results = rounded(about | {"ms": compared(rounds)})
                write_table(asked.output, results)
    print(table(results), end="")


if __name__ == "__main__":
    main()
