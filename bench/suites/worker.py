"""Measures rows in this process: under its allocator, with the libraries that it can import.

    worker.py REQUEST       REQUEST: the fields of Request as JSON

Writes events to stdout, one JSON object a line; processes.py reads them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from suites import devices, memory, rows, subjects
from suites.devices import DEVICES, Device, Timer
from suites.implementations import FUSED, Implementation, Stepper, UnavailableError, told
from suites.limit_library import Limit
from suites.rows import Row
from suites.suite import SUITES

#: Turns that each implementation gets in a row, and the seconds of one at least. An implementation
#: whose step takes longer than SLOW gets but one turn when the time is up.
LEAST_ROUNDS, MOST_ROUNDS = 3, 20
LEAST_TURN, SLOW = 0.05, 1.0

#: Runs before those that are timed, which find in the caches what an implementation leaves there
#: and not what the one before it did. A third-level cache takes a dozen to settle.
WARM_RUNS = 12

#: Steps by the same gradients at most. While gradients stay, their difference is zero, and Adan's
#: mean of it decays to denormal numbers, with which some processors are slow.
MOST_STEPS = 500

#: Walks that there is time for where the limit is looked for once more.
LEAST_SEARCH = 30

#: The learning rate while timing: thousands of steps keep weights near where they are.
TIMED_LR = 1e-7


@dataclass(frozen=True)
class Request:
    until: float
    """The end of the time for all rows, by time.monotonic(), which all processes share."""
    suite: str = "steps"
    device: str = "cpu"
    names: tuple[str, ...] = ("fused",)
    """The implementations that are measured, beside ours."""
    filter: str = ""
    quick: bool = False
    all_cases: bool = False
    precision: str = "float32"
    absent: str | None = None
    """Reason why the library of the implementations is not there."""
    shapes: list[str] | None = None
    """Names of the lists that are measured; None: all."""
    skip: list[str] = field(default_factory=list)
    """Rows that are not measured."""
    skip_late: bool = False
    """A row is left out when the time is up, instead of getting the least that tells anything."""
    limits: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Ways of the limit, where they are known, by row."""
    libraries: str | None = None
    """The folder of the native parts. None: no limit."""


#: Seconds of each step, by implementation, and of each walk of the limit.
Samples = dict[Any, list[float]]


def emitter() -> Callable[..., None]:
    """Writes events to the original stdout. What libraries print goes to stderr."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: str, **fields: Any) -> None:
        print(json.dumps({"event": event} | fields), file=stream, flush=True)

    return emit


def mapped_jemalloc() -> str | None:
    """The path of the jemalloc that this process runs on."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split()[-1] for line in lines if "jemalloc" in line), None)


class Contestant:
    """One implementation of one row: what it runs, and the seconds its runs took."""

    def __init__(self, run: Timer, renew: Callable[[], object] | None = None) -> None:
        self.samples: list[float] = []
        (self.estimate,) = run(1)
        self._run, self._renew = run, renew
        self._steps = 1  # since the gradients were renewed

    def take_turn(self, seconds: float) -> None:
        """As many runs as fit, after as many, WARM_RUNS at most, to warm the caches up."""
        count = max(1, int(min(seconds / max(self.estimate, 1e-7), MOST_STEPS)))
        warm = min(count - 1, WARM_RUNS)
        self._steps += warm + count
        if self._steps > MOST_STEPS and self._renew:
            self._renew()
            self._steps = warm + count
        if warm > 0:
            self._run(warm)
        samples = self._run(count)
        self.estimate = statistics.median(samples)
        self.samples += samples


def take_turns(contestants: list[Contestant], deadline: float) -> None:
    """Round robin: what disturbs the machine disturbs all alike."""
    gc.collect()
    gc.disable()
    turn = max((deadline - time.monotonic()) / MOST_ROUNDS / max(len(contestants), 1), LEAST_TURN)
    for number in range(MOST_ROUNDS):
        first = number % max(len(contestants), 1)
        for contestant in contestants[first:] + contestants[:first]:
            least = LEAST_ROUNDS if contestant.estimate < SLOW else 1
            if number < least or time.monotonic() < deadline:
                contestant.take_turn(turn)
    gc.enable()


class Measurement:
    """Measures one row, within some seconds."""

    def __init__(self, bench: Bench, row: Row, seconds: float) -> None:
        self._bench, self._row, self._device = bench, row, bench.device
        self._deadline = time.monotonic() + seconds
        self._threads = row.threads or torch.get_num_threads()
        self._is_first = False  # the first process that measures the row, which finds its limit
        self._problems: dict[str, dict[str, Any]] = {}
        self._candidates = [i for i in bench.implementations if i.exists(row)]
        #: The search for the limit gets as much time as an implementation.
        self._search_seconds = seconds / (len(self._candidates) + 1)

    def run(self) -> dict[str, Any]:
        needed, available = 2 * self._row.arrays_bytes, self._device.available_memory()
        if needed > available:  # foreach has temporaries
            reason = f"needs {needed >> 30} GiB of memory, {available >> 30} are available"
            return {"skipped": reason}
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return self._measure()
        finally:
            torch.set_num_threads(before)

    def _measure(self) -> dict[str, Any]:
        """All in turn; one after the other where their memory does not fit together."""
        limit, row = self._limit_to_begin_with(), self._row
        needed = (len(self._candidates) + 2) * row.arrays_bytes
        fits = needed < 0.6 * self._device.available_memory()
        groups = [self._candidates] if fits else [[each] for each in self._candidates]
        samples: Samples = {}
        for number, group in enumerate(groups):
            left = self._deadline - time.monotonic()
            deadline = time.monotonic() + left / (len(groups) - number)
            self._take_turns(group, limit, deadline, samples)
            self._device.release()
        walks = {key: samples.pop(key) for key in [*samples] if not isinstance(key, str)}
        contiguous = samples.pop("contiguous", None)
        figures = {name: figure(seconds) for name, seconds in samples.items()}
        found: dict[str, Any] = {"results": self._problems | figures}
        if contiguous and "fused" in samples:
            ms = 1e3 * statistics.median(contiguous)
            found["contiguous"] = {"ms": ms, "times": figures["fused"]["ms"] / ms}
        if limit is not None:
            limit = self._never_above(confirmed(limit, walks), samples)
            found["limit"] = devices.described(limit)
            for name, seconds in samples.items():
                figures[name]["share"] = limit.seconds / statistics.median(seconds)
        return found

    def _limit_to_begin_with(self) -> Limit | None:
        if not self._device.has_limit:
            return None
        known = self._bench.request.limits.get(str(self._row))
        self._is_first = known is None
        return self._search(self._search_seconds) if known is None else self._device.restored(known)

    def _search(self, seconds: float, known: Limit | None = None) -> Limit:
        return self._device.search(self._row, self._threads, seconds, known)

    def _never_above(self, limit: Limit, samples: Samples) -> Limit:
        """The limit; looked for once more if a step was faster than it."""
        if all(limit.seconds <= statistics.median(seconds) for seconds in samples.values()):
            return limit
        found = self._search(max(self._search_seconds, LEAST_SEARCH * limit.seconds), limit)
        return min(limit, found, key=lambda each: each.seconds)

    def _take_turns(
        self, group: list[Implementation], limit: Limit | None, deadline: float, samples: Samples
    ) -> None:
        """Adds the seconds of implementations, by name, and of the limit's walks."""
        found = {each.name: self._contestant(each, self._row) for each in group}
        contiguous = self._row.contiguous
        if contiguous is not None and self._is_first and "fused" in found:
            found["contiguous"] = self._contestant(FUSED, contiguous)
        with contextlib.ExitStack() as stack:
            if limit is not None:
                walks = self._device.walks(self._row, limit, self._threads)
                found |= {walk: Contestant(run) for walk, run in stack.enter_context(walks).items()}
            contestants = {name: each for name, each in found.items() if each is not None}
            take_turns([*contestants.values()], deadline)
        for name, each in contestants.items():
            samples.setdefault(name, []).extend(each.samples)

    def _contestant(self, implementation: Implementation, row: Row) -> Contestant | None:
        """A right implementation of this row or another; what is the matter with one is noted."""
        device, check = self._device, self._bench.check(implementation, row)
        try:
            params = subjects.make(row.shape_list, row.precision.weight, device.name)
            if row.gradient != "dense":
                params[0].grad = None
            stepper = implementation.build(row, params)
            if wrong := check(stepper, params):
                self._problems[implementation.name] = {"wrong": wrong}
                return None
            stepper.set_lr(TIMED_LR)
            gradients = gradients_of(implementation, row, params, stepper)
            gradients.before()
            if implementation.in_graph:
                stepper = device.captured(stepper)
            return Contestant(device.timer(stepper.step, gradients.before), gradients.renew)
        except Exception as error:  # whatever another library raises
            device.check()
            self._problems[implementation.name] = problem(error)
            return None


def figure(seconds: list[float]) -> dict[str, Any]:
    low, median, high = (1e3 * np.quantile(seconds, (0.25, 0.5, 0.75))).tolist()
    return {"ms": median, "quartiles": [low, high], "samples": len(seconds)}


def gradients_of(
    implementation: Implementation, row: Row, params: list[torch.nn.Parameter], stepper: Stepper
) -> subjects.Gradients:
    if implementation.uses_up_grads:
        return subjects.Restored(params)
    is_dense = params[0].grad is not None and not params[0].grad.is_sparse
    if is_dense:
        return subjects.Gradients(params)
    return subjects.Batches(stepper, params, row.gradient)


def problem(error: Exception) -> dict[str, str]:
    """The word for an error, and the error in one line."""
    text = told(error).split(". ")[0]
    if isinstance(error, UnavailableError):
        return {"absent": str(error)}
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return {"memory": text}
    return {"failed": text}


def confirmed(limit: Limit, seconds: dict[Any, list[float]]) -> Limit:
    """The limit by its walks' medians, as implementations have theirs: the smallest counts."""
    medians = {walk: statistics.median(samples) for walk, samples in seconds.items()}
    walks = sorted(medians, key=medians.__getitem__)
    return Limit(medians[walks[0]], limit.memory, tuple(walks))


class Bench:
    """Holds the parts that all rows have in common."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.suite = SUITES[request.suite, request.device]
        libraries = Path(request.libraries) if request.libraries and self.suite.has_limit else None
        self.device: Device = DEVICES[request.device](libraries)
        self._check: tuple[tuple, Any] | None = None
        names = (*request.names, "fused")
        self.implementations = [i for i in self.suite.implementations if i.name in names]

    def rows(self) -> list[Row]:
        request = self.request
        found = self.suite.rows(
            device=request.device,
            threads=torch.get_num_threads(),
            quick=request.quick,
            all_cases=request.all_cases,
            precision=rows.PRECISIONS[request.precision],
        )
        return [
            row
            for row in found
            if re.search(request.filter, str(row))
            and self.names(row)
            and str(row) not in request.skip
            and (request.shapes is None or row.shape_list.name in request.shapes)
        ]

    def names(self, row: Row) -> list[str]:
        return [i.name for i in self.implementations
                if i.name in self.request.names and i.exists(row)]  # fmt: skip

    def check(self, implementation: Implementation, row: Row) -> Callable[..., str | None]:
        """The last one is kept: implementations of a row mostly have one formula."""
        formula = implementation.formula_of(row)
        key = (formula.name, row, implementation.slack, implementation.max_norm)
        if self._check is None or self._check[0] != key:
            if row.gradient == "dense":
                dtype = row.precision.weight
                check = subjects.Check(formula, row.shape_list, dtype, *key[2:])
            else:
                check = subjects.SparseCheck(row)
            self._check = (key, check)
        return self._check[1]

    def measured(self, row: Row, seconds: float) -> dict[str, Any]:
        request = self.request
        if request.absent is not None:
            return {"results": {name: {"absent": request.absent} for name in self.names(row)}}
        if seconds < 0 and request.skip_late:
            return {"skipped": "the time was up"}
        found = Measurement(self, row, max(0.0, seconds)).run()
        if request.suite == "adan":
            self._add_peaks(row, found.setdefault("results", {}))
        return found

    def _add_peaks(self, row: Row, results: dict[str, dict[str, Any]]) -> None:
        """Peaks of memory beside the times, which may have failed for lack of it."""
        self.device.release()
        size, is_cpu = row.shape_list.name, self.device.name == "cpu"
        free = self.device.available_memory()
        lack = memory.lacking(size, row.shape_list.elements, free) if is_cpu else None
        for name in memory.COMPARED:
            found = results.setdefault(name, {})
            try:
                if "ms" in found and not lack:
                    found |= memory.peaks(size, name, self.device.name)
                elif lack and not found:
                    found["memory"] = lack
            except RuntimeError as error:
                found |= problem(error)
            self.device.release()

    def facts(self) -> dict[str, Any]:
        """The facts that figures depend on besides the machine."""
        titles = {each.name: each.title for each in self.suite.implementations}
        facts = {"torch": torch.__version__} | self.device.facts()
        return facts | {"jemalloc": mapped_jemalloc(), "implementations": titles}


def main() -> None:
    emit = emitter()
    gc.freeze()  # the libraries live to the end: the collector need not go over them at every row
    bench = Bench(Request(**json.loads(sys.argv[1])))
    chosen = bench.rows()
    planned = {str(row): row.described() | {"names": bench.names(row)} for row in chosen}
    emit("plan", rows=list(planned.values()), facts=bench.facts())
    for number, row in enumerate(chosen):
        emit("row", name=str(row))
        left = sum(later.weight for later in chosen[number:])
        seconds = (bench.request.until - time.monotonic()) * row.weight / left
        try:
            found = bench.measured(row, seconds)
        except torch.AcceleratorError as error:
            sys.exit(told(error))
        emit("result", row=planned[str(row)] | found)
        bench.device.release()


if __name__ == "__main__":
    main()
