#!/usr/bin/env python3
"""Time steps of this tree against those of another commit by the classes that both have.

    against.py REFERENCE OUT.json       REFERENCE: a checkout of the other commit, built

`./run.sh bench compare` gives the other commit's library to the harness of this tree, which an old
one does not fit. This probe asks for no more than `optim.Adam(params, lr=..., fused=True)`. Each
round has a process for each tree, in alternating order, with its own PYTHONPATH. A time is the
lower quartile of a process, since what disturbs a step only makes it longer; on a GPU that of the
step and of waiting for it. A ratio is that of one round, this tree's time over that of REFERENCE.
With `--unfused` the steps are those of `fused=False`, in torch operations.

Prints the table of bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from environment import ROOT, environments
from processes import events_of
from shapes import ALL
from tables import rounded, write_table

CLASSES = ("Adam", "AdamW", "Adan", "Adagrad", "Lamb")
LISTS = ("matrix", "transposed", "small", "resnet50", "gpt2")
DTYPES = ("float32", "bfloat16", "float16")

WARM_UP, FEWEST = 3, 5
"""Steps before those that are timed, and how many these are at least."""

RENEWED = 500
"""Steps with the same gradients, at most: means of differences decay to denormal numbers."""

Times = dict[str, float]
"""Milliseconds of a step, by row."""


def measure(asked: argparse.Namespace) -> None:
    """Prints the times of the tree that Python finds, one line of JSON a list."""
    import torch

    from fusedstep import optim

    lists = {each.name: each for each in ALL}
    about = {"threads": torch.get_num_threads()}
    if asked.device == "cuda":
        about = {"gpu": torch.cuda.get_device_name()}
    kind = {"device": asked.device, "dtype": getattr(torch, asked.dtype)}
    for name in asked.lists:
        if lists[name].layout == "transposed":
            weights = [torch.randn(shape[::-1], **kind).t() for shape in lists[name].shapes]
        else:
            weights = [torch.randn(shape, **kind) for shape in lists[name].shapes]
        params = [torch.nn.Parameter(weight) for weight in weights]
        gradients = [torch.randn(param.shape, **kind) for param in params]
        times = {}
        for cls in CLASSES:
            optimizer = getattr(optim, cls)(params, lr=1e-4, fused=not asked.unfused)
            times[f"{cls}/{name}"] = milliseconds(optimizer, params, gradients, asked.seconds)
        print(json.dumps({"times": times, "about": about}), flush=True)


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


def times_of(tree: Path, asked: argparse.Namespace) -> tuple[Times, dict[str, Any]]:
    """The times of one process over a tree, and on what it stepped."""
    envs, _ = environments(["glibc"], tree)
    command = [sys.executable, __file__, "--measure", "--seconds", str(asked.seconds)]
    found = list(events_of([*command, *flags_of(asked), "--lists", *asked.lists], envs["glibc"]))
    return {row: ms for each in found for row, ms in each["times"].items()}, found[0]["about"]


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
    """Milliseconds of this tree, and in brackets its times over those of the reference."""
    rows, titles = results["ms"], {each.name: each.title for each in ALL}
    names = dict.fromkeys(row.partition("/")[0] for row in rows)
    lines = [f"| | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    for name in dict.fromkeys(row.partition("/")[2] for row in rows):
        cells = [rows[f"{cls}/{name}"] for cls in names]
        told = " | ".join(f"{each['now']:.3g} ({each['ratio']:.2f})" for each in cells)
        lines.append(f"| {titles[name]} | {told} |")
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
        measure(asked)
        return
    if asked.threads:
        os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    reference = asked.reference.resolve()
    commit = commit_of(reference)
    trees, rounds = {"reference": reference, "now": ROOT}, []
    for number in range(asked.rounds):
        order = sorted(trees, reverse=number % 2 == 0)
        found = {name: times_of(trees[name], asked) for name in order}
        (before, _), (now, machine) = found["reference"], found["now"]
        rounds.append((before, now))
        about = {"reference": commit, **machine, "dtype": asked.dtype, "rounds": len(rounds)}
        if asked.unfused:
            about["fused"] = False
        if flags := flags_of(asked):
            about["by"] = f"bench/probes/against {' '.join(flags)}"
        results = rounded(about | {"ms": compared(rounds)})
        write_table(asked.output, results)
    print(table(results), end="")


if __name__ == "__main__":
    main()
