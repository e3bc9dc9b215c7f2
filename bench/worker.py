"""Measures rows in this process: under its allocator, with the libraries that it can import.

    worker.py REQUEST       REQUEST: the fields of Request as JSON

Writes events to stdout, one JSON object a line; processes.py reads them.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cases
import fusedstep
import implementations
import limit_library
import onednn_library
import peer_optimizers
import rows
import subjects
from implementations import Implementation, Stepper, UnavailableError, told
from limit_library import Limit, Memory, Walk
from rows import Row

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
    filter: str = ""
    quick: bool = False
    all_cases: bool = False
    precision: str = "float32"
    peer: str | None = None
    """Measure the rows of this peer, beside ours, instead of those of `./run.sh bench`."""
    absent: str | None = None
    """Why the peer's library is not there."""
    shapes: list[str] | None = None
    """Names of the lists that are measured; None: all."""
    skip: list[str] = field(default_factory=list)
    """Rows that are not measured."""
    skip_late: bool = False
    """Whether a row is left out when the time is up, or gets the least that tells anything."""
    limits: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Memory and walk of the limit, where they are known, by row."""
    libraries: str | None = None
    """The folder of the native parts. None: no limit, and no oneDNN."""
    only_ours: bool = False


#: Seconds of each step, by implementation.
Samples = dict[str, list[float]]


class Events:
    """What is told: by the original stdout. What libraries print goes to stderr."""

    def __init__(self) -> None:
        self._stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def emit(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event} | fields), file=self._stream, flush=True)


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

    def __init__(
        self,
        name: str,
        run: Callable[[int], list[float]],
        renew: Callable[[], object] | None = None,
    ) -> None:
        self.name = name
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


class Measurement:
    """Of one row, within some seconds."""

    def __init__(self, bench: Bench, row: Row, seconds: float) -> None:
        self._bench = bench
        self._row = row
        self._deadline = time.monotonic() + seconds
        self._threads = row.threads or torch.get_num_threads()
        self._problems: dict[str, dict[str, str]] = {}
        self._arrays_bytes = row.arrays_bytes
        self._contiguous: Contestant | None = None
        self._candidates = [i for i in bench.implementations if i.exists(row)]
        #: The search for the limit gets as much time as an implementation.
        self._search_seconds = seconds / (len(self._candidates) + 1)

    def run(self) -> dict[str, Any]:
        needed, available = 2 * self._arrays_bytes, available_memory()  # foreach has temporaries
        if needed > available:
            reason = f"needs {needed >> 30} GiB of memory, {available >> 30} are available"
            return {"skipped": reason}
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return self._measure()
        finally:
            torch.set_num_threads(before)

    def _measure(self) -> dict[str, Any]:
        limit = self._limit_to_begin_with()
        if (len(self._candidates) + 2) * self._arrays_bytes < 0.6 * available_memory():
            samples, limit = self._run_together(limit)
        else:
            samples, limit = self._run_apart(), limit and self._limit_again(limit)
        if limit is None:
            return {"results": self._problems | self._figures(samples)}
        contiguous = self._against_contiguous(samples)
        limit = self._never_above(limit, samples)
        figures = self._figures(samples)
        for name, figure in figures.items():
            figure["share"] = limit.seconds / statistics.median(samples[name])
        return contiguous | {
            "limit": asdict(limit) | {"ms": 1e3 * limit.seconds},
            "results": self._problems | figures,
        }

    def _against_contiguous(self, samples: Samples) -> dict[str, Any]:
        """What ours takes of the time of contiguous weights that took turns with it."""
        if self._contiguous is None or "fused" not in samples:
            return {}
        time = statistics.median(self._contiguous.samples)
        times = statistics.median(samples["fused"]) / time
        return {"contiguous": {"ms": 1e3 * time, "times": times}}

    # The limit

    def _limit_to_begin_with(self) -> Limit | None:
        if self._bench.limit is None:
            return None
        known = self._bench.request.limits.get(str(self._row))
        if known is None:
            return self._search(self._search_seconds)
        walks = tuple(Walk(**walk) for walk in known["walks"])
        return Limit(math.inf, Memory(**known["memory"]), walks)

    def _search(self, seconds: float, known: Limit | None = None) -> Limit:
        row, library = self._row, self._bench.limit
        return limit_library.search(
            library, row.streams, row.elements, self._threads, seconds, known
        )

    def _limit_arrays(self, limit: Limit) -> limit_library.Arrays:
        row = self._row
        return self._bench.limit.arrays(row.streams, row.elements, limit.memory, self._threads)

    def _limit_again(self, limit: Limit) -> Limit:
        with self._limit_arrays(limit) as arrays:
            bursts = {
                walk: [limit_library.measure(arrays, walk) for _ in range(LEAST_ROUNDS)]
                for walk in limit.walks
            }
        return confirmed(limit, bursts)

    def _never_above(self, limit: Limit, samples: Samples) -> Limit:
        """The limit; looked for once more if a step was faster than it."""
        if all(limit.seconds <= statistics.median(seconds) for seconds in samples.values()):
            return limit
        found = self._search(max(self._search_seconds, LEAST_SEARCH * limit.seconds), limit)
        return min(limit, self._limit_again(found), key=lambda each: each.seconds)

    # The implementations

    def _run_together(self, limit: Limit | None) -> tuple[Samples, Limit | None]:
        """All implementations in turn, and the limit with them."""
        contestants = [c for i in self._candidates if (c := self._contestant(i)) is not None]
        samples = {contestant.name: contestant.samples for contestant in contestants}
        if self._bench.request.peer == "fused" and self._row.contiguous is not None:
            self._contiguous = self._contestant(implementations.FUSED, self._row.contiguous)
            contestants += filter(None, [self._contiguous])
        if limit is None:
            take_turns(contestants, self._deadline)
            return samples, None
        with self._limit_arrays(limit) as arrays:
            bare = {walk: Contestant("limit", partial(arrays.run, walk)) for walk in limit.walks}
            take_turns([*contestants, *bare.values()], self._deadline)
        return samples, confirmed(limit, {walk: each.samples for walk, each in bare.items()})

    def _run_apart(self) -> Samples:
        """One implementation after the other: their memory does not fit together."""
        samples: Samples = {}
        for number, candidate in enumerate(self._candidates):
            left = self._deadline - time.monotonic()
            deadline = time.monotonic() + left / (len(self._candidates) - number)
            samples |= self._run_alone(candidate, deadline)
        return samples

    def _run_alone(self, candidate: Implementation, deadline: float) -> Samples:
        contestant = self._contestant(candidate)
        if contestant is None:
            return {}
        take_turns([contestant], deadline)
        return {contestant.name: contestant.samples}

    def _contestant(
        self, implementation: Implementation, row: Row | None = None
    ) -> Contestant | None:
        """A right implementation of this row or another; what is the matter with one is noted."""
        row = row or self._row
        dtype = row.precision.weight
        params = subjects.make(row.shape_list, dtype)
        formula = implementation.formula_of(row)
        check = self._bench.check(formula, row, implementation.slack)
        try:
            stepper = implementation.build(row, params)
            wrong = check(stepper, params)
        except UnavailableError as reason:
            self._problems[implementation.name] = {"absent": str(reason)}
            return None
        except Exception as error:  # whatever another library raises
            self._problems[implementation.name] = {"failed": told(error)}
            return None
        if wrong is not None:
            self._problems[implementation.name] = {"wrong": wrong}
            return None
        stepper.set_lr(TIMED_LR)
        return Contestant(
            implementation.name, step_timer(stepper), subjects.Gradients(params).renew
        )

    def _figures(self, samples: Samples) -> dict[str, dict[str, Any]]:
        figures: dict[str, dict[str, Any]] = {}
        for name, seconds in samples.items():
            low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
            figures[name] = {
                "ms": 1e3 * median,
                "ms_quartiles": [1e3 * low, 1e3 * high],
                "samples": len(seconds),
                "gbps": self._row.bytes / median / 1e9,
            }
            if "unfused" in samples:
                figures[name]["speedup"] = statistics.median(samples["unfused"]) / median
        return figures


def confirmed(limit: Limit, seconds: dict[Walk, list[float]]) -> Limit:
    """The limit by its walks' medians, as implementations have theirs: the smallest counts."""
    medians = {walk: statistics.median(samples) for walk, samples in seconds.items()}
    walks = sorted(medians, key=medians.__getitem__)
    return Limit(medians[walks[0]], limit.memory, tuple(walks))


def described(row: Row) -> dict[str, Any]:
    return {
        "name": str(row),
        "optimizer": row.case.name,
        "class": row.case.optimizer.__name__,
        "plain": row.case in cases.PLAIN,
        "shapes": row.shape_list.name,
        "title": row.title,
        "precision": row.precision.name,
        "threads": row.threads,
        "purpose": row.purpose.value,
        "tensors": len(row.shape_list.shapes),
        "elements": row.shape_list.elements,
        "bytes": row.bytes,
    }


class Bench:
    """What all rows have in common."""

    def __init__(self, request: Request, events: Events) -> None:
        self.request = request
        self.limit: limit_library.Library | None = None
        self._check: tuple[tuple, subjects.Check] | None = None
        onednn = None
        if request.libraries is not None:
            folder = Path(request.libraries)
            self.limit = limit_library.Library(folder)
            if (folder / onednn_library.NAME).is_file():
                onednn = onednn_library.OneDnn(folder)
            elif request.peer is None:
                events.emit("note", text="built without oneDNN: its column is missing")
        if request.only_ours:
            known = (implementations.FUSED,)
        elif request.peer is None:
            known = implementations.all_implementations(onednn)
        else:
            known = tuple(peer_optimizers.PEERS.values())
        self.titles = {i.name: i.title for i in known}
        self.implementations = [
            i for i in known if request.peer is None or i.name in (request.peer, "fused")
        ]

    def rows(self) -> list[Row]:
        request = self.request
        if request.peer is None:
            precision = rows.PRECISIONS[request.precision]
            all_rows = rows.of_lists(
                quick=request.quick, all_cases=request.all_cases, precision=precision
            )
        else:
            peer = peer_optimizers.PEERS[request.peer]
            all_rows = filter(peer.exists, rows.beside_peers(torch.get_num_threads()))
        return [
            row
            for row in rows.matching(all_rows, request.filter)
            if str(row) not in request.skip
            and (request.shapes is None or row.shape_list.name in request.shapes)
        ]

    def check(self, formula: cases.Case, row: Row, slack: float) -> subjects.Check:
        """The last one is kept: implementations of a row mostly have one formula."""
        key = (formula.name, row.shape_list, row.precision, slack)
        if self._check is None or self._check[0] != key:
            check = subjects.Check(formula, row.shape_list, row.precision.weight, slack)
            self._check = (key, check)
        return self._check[1]

    def facts(self) -> dict[str, Any]:
        """What the figures depend on besides the machine."""
        return {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "isa": None if fusedstep._ops.missing else fusedstep.isa(),
            "limit_isa": self.limit.isa if self.limit else None,
            "dtype": self.request.precision,
            "jemalloc": mapped_jemalloc(),
            "implementations": self.titles,
        }


def main() -> None:
    events = Events()
    request = Request(**json.loads(sys.argv[1]))
    bench = Bench(request, events)
    chosen = bench.rows()
    events.emit("plan", rows=[described(row) for row in chosen], facts=bench.facts())
    for number, row in enumerate(chosen):
        events.emit("row", name=str(row))
        left = sum(later.weight for later in chosen[number:])
        seconds = (request.until - time.monotonic()) * row.weight / left
        if request.absent is not None:
            found = {"results": {request.peer: {"absent": request.absent}}}
        elif seconds < 0 and request.skip_late:
            found = {"skipped": "the time was up"}
        else:
            found = Measurement(bench, row, max(0.0, seconds)).run()
        events.emit("result", row=described(row) | found)
        gc.collect()


if __name__ == "__main__":
    main()
