"""Measures rows under the allocator of this process; run.py starts it once for each allocator.

    worker.py REQUEST       REQUEST: the fields of Request as JSON

Writes events to stdout, one JSON object a line; run.py shows them.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cases
import fusedstep
import implementations
import limit_library
import onednn_library
import shapes
import subjects
from implementations import Implementation, Stepper, UnavailableError

#: Turns that each implementation gets in a row, and the seconds of one at least. An implementation
#: whose step takes longer than SLOW gets but one turn when the time is up.
LEAST_ROUNDS, MOST_ROUNDS = 3, 20
LEAST_TURN, SLOW = 0.02, 1.0

#: The learning rate while timing: thousands of steps keep weights near where they are.
TIMED_LR = 1e-7

#: Share of a row's time that the search for the limit may take.
LIMIT_SHARE = 0.2


@dataclass(frozen=True)
class Request:
    quick: bool
    all_cases: bool
    filter: str
    dtype: str
    seconds: float
    libraries: str


#: Seconds of each step, by implementation.
Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Row:
    case: cases.Case
    shape_list: shapes.ShapeList

    def __str__(self) -> str:
        return f"{self.case}/{self.shape_list}"

    @property
    def weight(self) -> float:
        """Its share of the time: models of many elements need more for the same number of steps."""
        return 1 + self.shape_list.elements / 64e6


def emit(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event} | fields), flush=True)


def select(request: Request) -> list[Row]:
    lists = shapes.QUICK if request.quick else shapes.ALL
    plain = [case for case in cases.PLAIN if case.name != "adamw"]  # Adam but for one product
    chosen = cases.CASES if request.all_cases else plain
    rows = [Row(case, shape_list) for case in chosen for shape_list in lists]
    return [row for row in rows if re.search(request.filter, str(row))]


def mapped_jemalloc() -> str | None:
    """The path of the jemalloc that this process runs on."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split()[-1] for line in lines if "jemalloc" in line), None)


def available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Contestant:
    """One implementation of one row: what it runs, and the seconds its runs took."""

    def __init__(self, name: str, run: Callable[[int], list[float]]) -> None:
        self.name = name
        self.samples: list[float] = []
        self.medians: list[float] = []
        """Of each turn."""
        (self.estimate,) = run(1)
        self._run = run

    def take_turn(self, seconds: float) -> None:
        """One run to warm the caches up, unless it takes most of the time, then as many as fit."""
        count = max(1, min(int(seconds / max(self.estimate, 1e-7)), 1000))
        if count > 1:
            self._run(1)
        samples = self._run(count)
        self.estimate = statistics.median(samples)
        self.medians.append(self.estimate)
        self.samples += samples


def step_timer(stepper: Stepper) -> Callable[[int], list[float]]:
    clock = time.perf_counter

    def run(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            began = clock()
            stepper.step()
            seconds.append(clock() - began)
        return seconds

    return run


def take_turns(contestants: list[Contestant], deadline: float) -> None:
    """Round robin: what disturbs the machine disturbs all alike."""
    gc.collect()
    gc.disable()
    turn = max((deadline - time.monotonic()) / MOST_ROUNDS / len(contestants), LEAST_TURN)
    for number in range(MOST_ROUNDS):
        first = number % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            least = LEAST_ROUNDS if contestant.estimate < SLOW else 1
            if number < least or time.monotonic() < deadline:
                contestant.take_turn(turn)
    gc.enable()


class RowRunner:
    """Measures one row within some seconds."""

    def __init__(self, bench: Bench, row: Row, seconds: float) -> None:
        self._bench = bench
        self._row = row
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._threads = torch.get_num_threads()
        self._problems: dict[str, dict[str, str]] = {}
        size = torch.empty((), dtype=bench.dtype).element_size()
        states = len(row.case.states)
        self._streams = limit_library.Streams(states, size, not row.case.elementwise)
        self._elements = [math.prod(shape) for shape in row.shape_list.shapes]
        self._bytes = self._streams.bytes_per_element * row.shape_list.elements
        self._arrays_bytes = (2 + states) * row.shape_list.elements * size

    def run(self) -> dict[str, Any]:
        needed, available = 2 * self._arrays_bytes, available_memory()  # foreach has temporaries
        if needed > available:
            reason = f"needs {needed >> 30} GiB of memory, {available >> 30} are available"
            return self._description() | {"skipped": reason}
        library, budget = self._bench.limit, LIMIT_SHARE * self._seconds
        limit = limit_library.search(library, self._streams, self._elements, self._threads, budget)
        check = subjects.Check(self._row.case, self._row.shape_list, self._bench.dtype)
        candidates = [i for i in self._bench.implementations if i.exists(self._row.case)]
        if (len(candidates) + 2) * self._arrays_bytes < 0.6 * available_memory():
            samples, bursts = self._run_together(candidates, check, limit)
        else:
            samples, bursts = self._run_apart(candidates, check), self._limit_again(limit)
        seconds = min([limit.seconds, *bursts])
        return self._description() | {
            "limit": {"ms": 1e3 * seconds} | asdict(limit.memory) | asdict(limit.walk),
            "results": self._problems | self._figures(samples, seconds),
        }

    def _run_together(
        self,
        candidates: list[Implementation],
        check: subjects.Check,
        limit: limit_library.Limit,
    ) -> tuple[Samples, list[float]]:
        """All implementations in turn, and the limit with them: medians of its bursts of runs."""
        contestants = [c for i in candidates if (c := self._contestant(i, check)) is not None]
        with self._bench.limit.arrays(
            self._streams, self._elements, limit.memory, self._threads
        ) as arrays:
            bare = Contestant("limit", lambda count: arrays.run(limit.walk, count))
            take_turns([*contestants, bare], self._deadline)
        return {c.name: c.samples for c in contestants}, bare.medians

    def _run_apart(self, candidates: list[Implementation], check: subjects.Check) -> Samples:
        """One implementation after the other: their memory does not fit together."""
        samples: Samples = {}
        for number, candidate in enumerate(candidates):
            left = self._deadline - time.monotonic()
            deadline = time.monotonic() + left / (len(candidates) - number)
            samples |= self._run_alone(candidate, check, deadline)
        return samples

    def _limit_again(self, limit: limit_library.Limit) -> list[float]:
        with self._bench.limit.arrays(
            self._streams, self._elements, limit.memory, self._threads
        ) as arrays:
            return [limit_library.measure(arrays, limit.walk) for _ in range(LEAST_ROUNDS)]

    def _run_alone(
        self, candidate: Implementation, check: subjects.Check, deadline: float
    ) -> Samples:
        contestant = self._contestant(candidate, check)
        if contestant is None:
            return {}
        take_turns([contestant], deadline)
        return {contestant.name: contestant.samples}

    def _contestant(
        self, implementation: Implementation, check: subjects.Check
    ) -> Contestant | None:
        """A right implementation; what is the matter with another is noted."""
        params = subjects.make(self._row.shape_list, self._bench.dtype)
        try:
            stepper = implementation.build(self._row.case, params)
            wrong = check(stepper, params)
        except (UnavailableError, RuntimeError) as reason:
            self._problems[implementation.name] = {"absent": str(reason)}
            return None
        if wrong is not None:
            self._problems[implementation.name] = {"wrong": wrong}
            return None
        stepper.set_lr(TIMED_LR)
        return Contestant(implementation.name, step_timer(stepper))

    def _description(self) -> dict[str, Any]:
        shape_list = self._row.shape_list
        return {
            "optimizer": self._row.case.name,
            "class": self._row.case.optimizer.__name__,
            "plain": self._row.case in cases.PLAIN,
            "shapes": shape_list.name,
            "title": shape_list.title,
            "tensors": len(shape_list.shapes),
            "elements": shape_list.elements,
            "bytes": self._bytes,
        }

    def _figures(self, samples: Samples, limit: float) -> dict[str, dict[str, Any]]:
        figures: dict[str, dict[str, Any]] = {}
        for name, seconds in samples.items():
            low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
            figures[name] = {
                "ms": 1e3 * median,
                "ms_quartiles": [1e3 * low, 1e3 * high],
                "samples": len(seconds),
                "gbps": self._bytes / median / 1e9,
                "share": limit / median,
            }
            if "unfused" in samples:
                figures[name]["speedup"] = statistics.median(samples["unfused"]) / median
        return figures


class Bench:
    """What all rows have in common."""

    def __init__(self, request: Request) -> None:
        libraries = Path(request.libraries)
        self.dtype = getattr(torch, request.dtype)
        self.limit = limit_library.Library(libraries)
        onednn = None
        if (libraries / onednn_library.NAME).is_file():
            onednn = onednn_library.OneDnn(libraries)
        else:
            emit("note", text="built without oneDNN: its column is missing")
        self.implementations = implementations.all_implementations(onednn)

    def facts(self) -> dict[str, Any]:
        """What the figures depend on besides the machine."""
        return {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "isa": None if fusedstep._ops.missing else fusedstep.isa(),
            "limit_isa": self.limit.isa,
            "dtype": str(self.dtype).removeprefix("torch."),
            "jemalloc": mapped_jemalloc(),
            "implementations": {i.name: i.title for i in self.implementations},
        }


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    bench = Bench(request)
    rows = select(request)
    emit("plan", rows=[str(row) for row in rows], facts=bench.facts())
    deadline = time.monotonic() + request.seconds
    for number, row in enumerate(rows):
        emit("row", name=str(row))
        left = sum(later.weight for later in rows[number:])
        seconds = max(0.0, deadline - time.monotonic()) * row.weight / left
        emit("result", row=RowRunner(bench, row, seconds).run())
        gc.collect()


if __name__ == "__main__":
    main()
