#!/usr/bin/env python3
"""Time Adagrad on an embedding table of which a batch touches some rows.

Writes embedding.json beside the other results of this machine or GPU, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import cycle

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import cases
import cuda
import output
from fusedstep import _ops
from machine import this_machine
from report import milliseconds

SHAPE = (1_000_000, 128)
TOUCHED = 4096

#: Batches that follow one another, each with rows of its own: a training does not find them in the
#: cache.
BATCHES = 16

CASE = next(case for case in cases.PLAIN if case.name == "adagrad")


def batch(seed: int, times: int, shape: tuple[int, int], touched: int) -> Tensor:
    """A gradient as an embedding makes it: `times` entries for each row, in disorder."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(shape[0], generator=generator)[:touched].repeat(times)
    rows = rows[torch.randperm(len(rows), generator=generator)]
    values = torch.randn(len(rows), shape[1], generator=generator)
    return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False)


GRADIENTS: dict[str, Callable[..., Tensor]] = {
    "each row once": lambda seed, *sizes: batch(seed, 1, *sizes),
    "each row twice": lambda seed, *sizes: batch(seed, 2, *sizes),
    "coalesced": lambda seed, *sizes: batch(seed, 1, *sizes).coalesce(),
}

CONTESTANTS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "ours unfused": lambda params: CASE.build(params, fused=False),
    "torch": CASE.build_namesake,
    "ours": CASE.build,
    "ours, dense gradient": CASE.build,
}


class Contestant:
    """An optimizer over a table of its own."""

    def __init__(self, title: str, gradients: list[Tensor]) -> None:
        self.is_dense = "dense" in title
        self._gradients = cycle(gradients)
        self.table = torch.nn.Parameter(torch.ones_like(gradients[0], layout=torch.strided))
        if self.is_dense:
            self.table.grad = torch.zeros_like(self.table)
        self._optimizer = CONTESTANTS[title]([self.table])

    def take_gradient(self) -> None:
        """The next one."""
        gradient = next(self._gradients)
        if self.is_dense:
            self.table.grad.zero_().add_(gradient)
        else:
            self.table.grad = gradient

    def step(self) -> float:
        """The seconds of a step with the next gradient."""
        self.take_gradient()
        began = time.perf_counter()
        self._optimizer.step()
        return time.perf_counter() - began

    def step_on_device(self) -> None:
        """With the next gradient, unless it takes longer to make than a step."""
        if not self.is_dense:
            self.take_gradient()
        self._optimizer.step()


def measure(gradients: list[Tensor], seconds: float) -> dict[str, float]:
    """Milliseconds by title: medians of steps taken in turns, after some that are checked."""
    contestants = {title: Contestant(title, gradients) for title in CONTESTANTS}
    for contestant in contestants.values():
        for _ in range(3):
            contestant.step()
    check({title: contestant.table for title, contestant in contestants.items()})
    samples: dict[str, list[float]] = {title: [] for title in contestants}
    deadline = time.monotonic() + seconds
    if gradients[0].is_cuda:
        for _ in range(cuda.TURNS):
            for title, contestant in contestants.items():
                each = seconds / cuda.TURNS / len(contestants)
                samples[title].append(cuda.time_steps(contestant.step_on_device, each))
        return {title: statistics.median(times) for title, times in samples.items()}
    while time.monotonic() < deadline or len(samples["ours"]) < BATCHES:
        for title, contestant in contestants.items():
            # One batch after another where the step is short: the dense one clears the caches.
            for _ in range(1 if contestant.is_dense else BATCHES):
                samples[title].append(contestant.step())
    return {title: 1e3 * statistics.median(times) for title, times in samples.items()}


def check(tables: dict[str, Tensor]) -> None:
    """After as many steps all must have come to the same weights."""
    expected = tables["torch"]
    for title, table in tables.items():
        torch.testing.assert_close(
            table, expected, rtol=1e-5, atol=1e-6, msg=lambda text, t=title: f"{t}: {text}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=SHAPE[0], help=f"default: {SHAPE[0]:,}")
    parser.add_argument("--columns", type=int, default=SHAPE[1], help=f"default: {SHAPE[1]}")
    parser.add_argument("--touched", type=int, default=TOUCHED, help=f"default: {TOUCHED:,}")
    parser.add_argument("--seconds", type=float, default=20, help="for each row (default: 20)")
    parser.add_argument("--device", choices=_ops.DEVICES, default="cpu", help="default: cpu")
    output.output_arguments(parser)
    arguments = parser.parse_args()
    if not 0 < arguments.touched <= arguments.rows:
        parser.error(f"--touched must be from 1 to {arguments.rows}")
    if arguments.device == "cuda":
        cuda.check_device()
    shape = (arguments.rows, arguments.columns)
    rows = []
    for title, make in GRADIENTS.items():
        gradients = [
            make(seed, shape, arguments.touched).to(arguments.device) for seed in range(BATCHES)
        ]
        rows.append({"gradient": title, "ms": measure(gradients, arguments.seconds)})
    machine = this_machine()
    name = cuda.device_slug() if arguments.device == "cuda" else machine.slug
    folder = output.results_folder(arguments, name)
    results = {
        "machine": machine.facts(),
        "device": arguments.device,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "shape": shape,
        "touched": arguments.touched,
        "rows": rows,
    }
    (folder / "embedding.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    title = f"Adagrad, [{shape[0]:,}, {shape[1]}], {arguments.touched:,} rows touched: ms a step"
    table = Table("entries", *CONTESTANTS, "to torch", "to dense", title=title)
    for row in rows:
        ms = row["ms"]
        ratios = [f"{ms[other] / ms['ours']:.1f}×" for other in ("torch", "ours, dense gradient")]
        table.add_row(row["gradient"], *(milliseconds(ms[name]) for name in CONTESTANTS), *ratios)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
