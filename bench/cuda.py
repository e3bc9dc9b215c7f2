#!/usr/bin/env python3
"""Time whole optimizer steps of weights on a CUDA device, beside torch's and the device's limit.

Rows are optimizers × shape lists ("lamb/gpt2"); FILTER is a regular expression that selects some.
Results go into a folder as results.json and README.md (the table).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from implementations import (
    FLOAT_CORRECTION,
    FOREACH,
    FUSED,
    TORCH_FUSED,
    UNFUSED,
    Implementation,
    OfTorch,
    Stepper,
    UnavailableError,
    told,
)
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


@dataclass(frozen=True)
class Way:
    """How the limit goes over its streams."""

    batch: int
    """Words that a thread moves at a time."""
    blocks: int
    """In all."""


class Limit:
    """The same reads and writes without the maths, the best of some ways to make them."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / NAME))
        self._run = self._library.fusedstep_cuda_limit_run
        self._run.argtypes = [
            ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64,
            ctypes.c_void_p,
        ]  # fmt: skip

    def find(self, row: Row, ways: Iterable[Way] | None = None) -> tuple[float, Way]:
        """Milliseconds of the best of all ways, or of the given ones."""
        streams = row.streams
        # As many bytes in streams of one width where a step has several: words are of 16 bytes.
        words = -(-row.bytes // 16 // (2 * (2 + streams.states) - 1))
        arrays = [
            torch.zeros(words * 4, dtype=torch.int32, device="cuda")
            for _ in range(2 + streams.states)
        ]
        data = (ctypes.c_void_p * len(arrays))(*(array.data_ptr() for array in arrays))

        def milliseconds(way: Way) -> float:
            def run() -> None:
                stream = torch.cuda.current_stream().cuda_stream
                if self._run(streams.states, way.batch, way.blocks, data, words, stream):
                    sys.exit("the limit could not be launched")

            return time_steps(run, seconds=0.05)

        processors = torch.cuda.get_device_properties(0).multi_processor_count
        found = {way: milliseconds(way) for way in ways or _ways(words, processors)}
        best = min(found, key=found.__getitem__)
        return found[best], best


def _ways(words: int, processors: int) -> Iterator[Way]:
    for batch in (1, 2, 4):
        enough = -(-words // 512 // batch)
        for blocks in (2, 4, 8, 16, -(-enough // processors)):
            yield Way(batch, min(blocks * processors, max(1, enough)))


def _has_namesake(row: Row) -> bool:
    return row.case.namesake is not None and row.precision != rows.MIXED


def _torch_fused(row: Row, params: list[torch.nn.Parameter], **options: bool) -> OfTorch:
    optimizer = row.case.build_namesake(params, foreach=False, fused=True, **options)
    # torch has a kernel for Adagrad on CUDA, which its class refuses to use.
    if row.case.name == "adagrad":
        optimizer._need_device_dtype_check_for_fused = False
    return OfTorch(optimizer)


def _torch_capturable(row: Row, params: list[torch.nn.Parameter]) -> OfTorch:
    return _torch_fused(row, params, capturable=True)


def _ours_capturable(row: Row, params: list[torch.nn.Parameter]) -> OfTorch:
    return OfTorch(row.case.build(params, fused=True, capturable=True, **row.options))


def _is_capturable(row: Row) -> bool:
    return row.case.name != "adagrad"


IMPLEMENTATIONS = {
    each.name: each
    for each in (
        UNFUSED,
        FOREACH,
        replace(TORCH_FUSED, build=_torch_fused, slack=FLOAT_CORRECTION),
        Implementation(
            "torch_graph", "torch fused, graph",
            lambda row: _has_namesake(row) and _is_capturable(row), _torch_capturable,
            slack=FLOAT_CORRECTION, in_graph=True,
        ),
        FUSED,
        Implementation(
            "graph", "ours, graph", _is_capturable, _ours_capturable,
            slack=FLOAT_CORRECTION, in_graph=True,
        ),
    )
}  # fmt: skip


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


class Captured:
    """A step as a CUDA graph, with what it steps."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            stepper.step()
        self.step = self._graph.replay


class Contestants:
    """Right implementations of a row, ready to be timed, and what is amiss with the others."""

    def __init__(self, row: Row) -> None:
        self.steppers: dict[str, Stepper | Captured] = {}
        self.problems: dict[str, dict[str, str]] = {}
        self._row = row
        self._checks: dict[tuple[str, float], subjects.Check] = {}

    def add(self, implementation: Implementation) -> None:
        name = implementation.name
        try:
            stepper, wrong = self._checked(implementation)
        except UnavailableError as reason:
            self.problems[name] = {"absent": str(reason)}
        except Exception as error:  # whatever another library raises
            if isinstance(error, torch.AcceleratorError):
                torch.cuda.synchronize()  # raises where all that follow in this process would
            self.problems[name] = {"failed": told(error)}
        else:
            if wrong:
                self.problems[name] = {"wrong": wrong}
            else:
                self.steppers[name] = stepper

    def _checked(self, implementation: Implementation) -> tuple[Stepper | Captured, str | None]:
        row = self._row
        params = subjects.make(row.shape_list, row.precision.weight, "cuda")
        stepper = implementation.build(row, params)
        wrong = self._check(implementation)(stepper, params)
        stepper.set_lr(TIMED_LR)
        if wrong or not implementation.in_graph:
            return stepper, wrong
        return Captured(stepper), None

    def _check(self, implementation: Implementation) -> subjects.Check:
        row, formula = self._row, implementation.formula_of(self._row)
        key = (formula.name, implementation.slack)
        if key not in self._checks:
            self._checks[key] = subjects.Check(
                formula, row.shape_list, row.precision.weight, implementation.slack
            )
        return self._checks[key]


def compare(
    row: Row,
    limit: Limit,
    implementations: Mapping[str, Implementation],
    ways: Iterable[Way] | None = None,
    turns: int = TURNS,
) -> tuple[dict[str, Any], float, Way]:
    """What was found for each implementation, and the limit with its best way, of all or some."""
    contestants = Contestants(row)
    for implementation in implementations.values():
        if implementation.exists(row):
            contestants.add(implementation)
    samples: dict[str, list[float]] = {name: [] for name in contestants.steppers}
    gc.collect()
    for _ in range(turns):
        for name, stepper in contestants.steppers.items():
            samples[name].append(time_steps(stepper.step, SECONDS / turns))
    bound, way = limit.find(row, ways)
    results: dict[str, Any] = dict(contestants.problems)
    for name, times in samples.items():
        median = statistics.median(times)
        results[name] = {
            "ms": median,
            "gbps": row.bytes / median / 1e6,
            "share": bound / median,
        }
    return results, bound, way


def measure(row: Row, limit: Limit) -> dict[str, Any]:
    results, bound, _ = compare(row, limit, IMPLEMENTATIONS)
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
    """Ends the program, in one line, where nothing could be measured."""
    if not torch.cuda.is_available():
        sys.exit("bench: torch sees no CUDA device")
    if missing := _ops.missing_on("cuda"):
        sys.exit(f"bench: {missing}")


def check(libraries: Path) -> None:
    """check_device(), and whether there is a limit."""
    check_device()
    if not (libraries / NAME).is_file():
        sys.exit(f"bench: {libraries} has no {NAME}: build with nvcc")


def device_slug() -> str:
    """The device's name as that of a folder."""
    return "-".join(torch.cuda.get_device_name().lower().split())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    output.add_arguments(parser)
    arguments = parser.parse_args()
    check(arguments.libraries)
    limit, collected = Limit(arguments.libraries), output.Collected()
    chosen = selected(arguments.filter)
    if not chosen:
        sys.exit(f"no row matches {arguments.filter!r}: rows are OPTIMIZER/LIST, as lamb/matrix")
    collected.facts = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    folder = output.results_folder(arguments, device_slug())
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
