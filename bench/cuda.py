#!/usr/bin/env python3
"""Time whole optimizer steps of weights on a CUDA device, beside torch's and the device's limit.

Rows are optimizers × shape lists ("lamb/gpt2"); FILTER is a regular expression that selects some.
Results go into a folder as results.json and README.md (the table).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import output
import rows
import shapes
import subjects
from cases import PLAIN
from fusedstep import _ops
from implementations import FLOAT_CORRECTION
from report import milliseconds
from rows import Row

NAME = "libfusedstep_cuda_limit.so"

#: Steps between two events at most, and the milliseconds that they should take; seconds of timing
#: each implementation, and turns that it takes.
BATCH, BATCH_MS, SECONDS, TURNS = 50, 20, 0.4, 8

#: The learning rate while timing: thousands of steps keep weights near where they are.
TIMED_LR = 1e-7


def selected(pattern: str) -> list[Row]:
    named = {case.name: case for case in PLAIN}
    lists = shapes.MODELS
    found = [Row(case, each) for each in lists for case in rows.PLAIN]
    gpt2 = next(each for each in lists if each.name == "gpt2")
    found += [Row(named["adamw"], gpt2, precision) for precision in (rows.BFLOAT16, rows.MIXED)]
    found += [Row(named["adagrad"], gpt2, rows.BFLOAT16)]
    found += [Row(named["adam"], each) for each in shapes.LAYOUTS]
    return rows.matching(found, pattern)


class Limit:
    """The same reads and writes without the maths, the best of some ways to make them."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / NAME))
        self._run = self._library.fusedstep_cuda_limit_run
        self._run.argtypes = [
            ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64,
            ctypes.c_void_p,
        ]  # fmt: skip

    def milliseconds(self, row: Row) -> float:
        streams = row.streams
        # As many bytes in streams of one width where a step has several: words are of 16 bytes.
        words = -(-row.bytes // 16 // (2 * (2 + streams.states) - 1))
        arrays = [
            torch.zeros(words * 4, dtype=torch.int32, device="cuda")
            for _ in range(2 + streams.states)
        ]
        data = (ctypes.c_void_p * len(arrays))(*(array.data_ptr() for array in arrays))
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        best = math.inf
        for batch in (1, 2, 4):
            for blocks in (2, 4, 8, 16, -(-words // 512 // batch // processors)):
                count = min(blocks * processors, max(1, -(-words // 512 // batch)))

                def run(batch: int = batch, count: int = count) -> None:
                    stream = torch.cuda.current_stream().cuda_stream
                    if self._run(streams.states, batch, count, data, words, stream):
                        sys.exit("the limit could not be launched")

                best = min(best, time_steps(run, seconds=0.05))
        return best


@dataclass(frozen=True)
class Implementation:
    title: str
    exists: Callable[[Row], bool]
    build: Callable[[Row, list[torch.nn.Parameter]], torch.optim.Optimizer]
    in_graph: bool = False
    slack: float = 0.0
    """What an update may be off by besides, relative to the largest."""


def _has_namesake(row: Row) -> bool:
    return row.case.namesake is not None and row.precision != rows.MIXED


def _namesake(**options: bool) -> Callable[[Row, list[torch.nn.Parameter]], torch.optim.Optimizer]:
    return lambda row, params: row.case.build_namesake(params, **options)


def _ours(**options: bool) -> Callable[[Row, list[torch.nn.Parameter]], torch.optim.Optimizer]:
    return lambda row, params: row.case.build(params, **row.options, **options)


def _is_capturable(row: Row) -> bool:
    return row.case.name != "adagrad"


IMPLEMENTATIONS = {
    "unfused": Implementation("ours unfused", lambda row: True, _ours(fused=False)),
    "foreach": Implementation("torch foreach", _has_namesake, _namesake(foreach=True)),
    "torch_fused": Implementation(
        "torch fused",
        _has_namesake,
        _namesake(foreach=False, fused=True),
        slack=FLOAT_CORRECTION,
    ),
    "torch_graph": Implementation(
        "torch fused, graph",
        lambda row: _has_namesake(row) and _is_capturable(row),
        _namesake(foreach=False, fused=True, capturable=True),
        in_graph=True,
        slack=FLOAT_CORRECTION,
    ),
    "fused": Implementation("ours fused", lambda row: True, _ours(fused=True)),
    "graph": Implementation(
        "ours, graph",
        _is_capturable,
        _ours(fused=True, capturable=True),
        in_graph=True,
        slack=FLOAT_CORRECTION,
    ),
}


def time_steps(step: Callable[[], object], seconds: float = SECONDS) -> float:
    """Median milliseconds of a step, over batches between two events."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    batch = min(BATCH, max(1, round(BATCH_MS / _milliseconds(step, 1))))
    times: list[float] = []
    while sum(times) * batch < 1e3 * seconds or len(times) < 3:
        times.append(_milliseconds(step, batch) / batch)
    return statistics.median(times)


def _milliseconds(step: Callable[[], object], times: int) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(times):
        step()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended)


class Stepper:
    """An optimizer, or the graph that its step was captured in."""

    def __init__(self, optimizer: torch.optim.Optimizer, in_graph: bool) -> None:
        self._optimizer = optimizer
        self._graph: torch.cuda.CUDAGraph | None = None
        self._in_graph = in_graph

    def step(self) -> None:
        if self._graph:
            self._graph.replay()
        else:
            self._optimizer.step()

    def prepare(self) -> None:
        """To be timed, after the first steps."""
        for group in self._optimizer.param_groups:
            group["lr"] = TIMED_LR
        if self._in_graph:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._optimizer.step()


def measure(row: Row, limit: Limit) -> dict[str, Any]:
    checks = {
        slack: subjects.Check(row.case, row.shape_list, row.precision.weight, slack)
        for slack in {implementation.slack for implementation in IMPLEMENTATIONS.values()}
    }
    steppers: dict[str, Stepper] = {}
    results: dict[str, Any] = {}
    for name, implementation in IMPLEMENTATIONS.items():
        if not implementation.exists(row):
            continue
        params = subjects.make(row.shape_list, row.precision.weight, "cuda")
        stepper = Stepper(implementation.build(row, params), implementation.in_graph)
        try:
            wrong = checks[implementation.slack](stepper, params)
            stepper.prepare()
        except RuntimeError as error:
            results[name] = {"absent": str(error).splitlines()[0]}
            continue
        if wrong:
            results[name] = {"wrong": wrong}
        else:
            steppers[name] = stepper
    samples: dict[str, list[float]] = {name: [] for name in steppers}
    gc.collect()
    for _ in range(TURNS):
        for name, stepper in steppers.items():
            samples[name].append(time_steps(stepper.step, SECONDS / TURNS))
    bound = limit.milliseconds(row)
    for name, times in samples.items():
        median = statistics.median(times)
        results[name] = {
            "ms": median,
            "gbps": row.bytes / median / 1e6,
            "share": bound / median,
        }
    return {
        "row": str(row),
        "optimizer": row.case.name,
        "title": row.title,
        "elements": row.shape_list.elements,
        "bytes": row.bytes,
        "limit": bound,
        "results": results,
    }


def lines(results: dict[str, Any]) -> Iterator[list[str]]:
    for row in results["rows"]:
        cells = []
        for name in IMPLEMENTATIONS:
            found = row["results"].get(name, {})
            cells.append(
                milliseconds(found["ms"]) if "ms" in found else "wrong" if "wrong" in found else "–"
            )
        ours = row["results"].get("fused", {})
        share = f"{ours['share']:.2f}" if "share" in ours else ""
        yield [row["optimizer"], row["title"], *cells, milliseconds(row["limit"]), share]


HEADER = [
    "optimizer",
    "tensors",
    *(implementation.title for implementation in IMPLEMENTATIONS.values()),
    "limit",
    "share",
]
LEGEND = (
    "Milliseconds a step. limit: the same reads and writes without the maths, once each; share: "
    "the limit's time over ours fused. graph: the step captured in a CUDA graph."
)


def markdown(results: dict[str, Any]) -> str:
    table = [HEADER, [":--", ":--"] + ["--:"] * (len(HEADER) - 2), *lines(results)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    facts = f"{results['device']}, torch {results['torch']}, {results['date']}"
    return f"# Optimizer steps on {results['device']}\n\n{facts}\n\n{text}\n\n{LEGEND}\n"


def check_device() -> None:
    """Ends the program with a line if there is nothing to measure."""
    if not torch.cuda.is_available():
        sys.exit("bench: torch sees no CUDA device")
    if missing := _ops.missing_on("cuda"):
        sys.exit(f"bench: {missing}")


def device_slug() -> str:
    """The device's name as that of a folder."""
    return "-".join(torch.cuda.get_device_name().lower().split())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    output.add_arguments(parser)
    arguments = parser.parse_args()
    check_device()
    if not (arguments.libraries / NAME).is_file():
        sys.exit(f"bench: {arguments.libraries} has no {NAME}: build with nvcc")
    limit, collected = Limit(arguments.libraries), output.Collected()
    chosen = selected(arguments.filter)
    if not chosen:
        sys.exit(f"no row matches {arguments.filter!r}: rows are OPTIMIZER/LIST, as lamb/matrix")
    collected.facts = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    folder = output.results_folder(arguments.output, device_slug())
    for row in track(chosen, "timing steps", console=Console(stderr=True)):
        print(row, file=sys.stderr)
        collected.rows.append(measure(row, limit))
        gc.collect()
        torch.cuda.empty_cache()
        results = collected.results()
        output.write(folder, results, markdown(results))
    table = Table(*HEADER, box=box.SIMPLE_HEAD, caption=LEGEND, caption_justify="left")
    for cells in lines(results):
        table.add_row(*cells)
    output.show([table], [], folder)


if __name__ == "__main__":
    main()
