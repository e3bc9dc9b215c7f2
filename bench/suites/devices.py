"""The devices that steps are measured on: their clocks, their memory and their limits.

A device times `step` by a function of a number of steps that returns seconds a step. The walks of
its limit are timed likewise, so that they take turns with the steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fusedstep
from fusedstep._native import ops
from suites import limit_library
from suites.implementations import Stepper
from suites.limit_library import Limit, Memory, Walk
from suites.rows import Row

Timer = Callable[[int], list[float]]
"""Seconds a step, of some steps."""


class Device:
    name: str
    walk_type: type
    """A way to go over the limit's arrays."""

    def __init__(self, limit: Any) -> None:
        self._limit = limit
        self.has_limit = limit is not None

    def release(self) -> None:
        gc.collect()

    def check(self) -> None:
        """Raises an error of the device that makes its process useless: a CPU has none."""

    @classmethod
    def restored(cls, known: dict[str, Any]) -> Limit:
        """A limit whose ways are known from another process, but not its time here."""
        memory = known["memory"] and Memory(**known["memory"])
        return Limit(math.inf, memory, tuple(cls.walk_type(**walk) for walk in known["walks"]))


class Cpu(Device):
    name, walk_type = "cpu", Walk

    def __init__(self, libraries: Path | None) -> None:
        super().__init__(limit_library.Library(libraries) if libraries else None)

    def facts(self) -> dict[str, Any]:
        isas = {"isa": None if ops.missing else fusedstep.isa()}
        if self._limit is not None:
            isas["limit_isa"] = self._limit.isa
        return {"threads": torch.get_num_threads()} | isas

    def available_memory(self) -> int:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def timer(self, step: Callable[[], object], before: Callable[[], object]) -> Timer:
        clock = time.perf_counter

        def run(count: int) -> list[float]:
            seconds = []
            for _ in range(count):
                before()
                began = clock()
                step()
                seconds.append(clock() - began)
            return seconds

        return run

    def search(self, row: Row, threads: int, seconds: float, known: Limit | None) -> Limit:
        return limit_library.search(self._limit, row.streams, row.elements, threads, seconds, known)

    @contextlib.contextmanager
    def walks(self, row: Row, limit: Limit, threads: int) -> Iterator[dict[Walk, Timer]]:
        with self._limit.arrays(row.streams, row.elements, limit.memory, threads) as arrays:
            yield {walk: partial(arrays.run, walk) for walk in limit.walks}


# ---- CUDA ----------------------------------------------------------------------------------------

CUDA_LIMIT = "libfusedstep_cuda_limit.so"

#: Steps between two events at most, and the seconds that they should take at most.
BATCH, BATCH_SECONDS = 50, 0.02

#: The seconds of trying a way of the limit.
TRIAL = 0.05


@dataclass(frozen=True)
class Way:
    """A way for the limit to go over its streams on a GPU."""

    batch: int
    """Words that a thread moves at a time."""
    blocks: int
    """In all."""


class Cuda(Device):
    name, walk_type = "cuda", Way

    def __init__(self, libraries: Path | None) -> None:
        if not torch.cuda.is_available():
            sys.exit("bench: torch sees no CUDA device")
        if missing := ops.missing_on("cuda"):
            sys.exit(f"bench: {missing}")
        super().__init__(_cuda_limit(libraries) if libraries else None)

    def facts(self) -> dict[str, Any]:
        return {"threads": torch.get_num_threads(), "device": torch.cuda.get_device_name()}

    def available_memory(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def release(self) -> None:
        super().release()
        torch.cuda.empty_cache()

    def check(self) -> None:
        torch.cuda.synchronize()

    def captured(self, stepper: Stepper) -> Stepper:
        graph, optimizer = torch.cuda.CUDAGraph(), stepper.optimizer
        with torch.cuda.graph(graph):
            stepper.step()

        def replay(_held: object = optimizer) -> None:
            """Holds the optimizer too: a graph reads its states and tables, and keeps neither."""
            graph.replay()

        return Stepper(optimizer, replay)

    def timer(self, step: Callable[[], object], before: Callable[[], object]) -> Timer:
        """Times batches between two events. Work before a step is timed with it."""
        estimate = math.inf

        def run(count: int) -> list[float]:
            nonlocal estimate
            batch = max(1, min(count, BATCH, int(BATCH_SECONDS / estimate)))
            seconds = [timed(batch) / batch for _ in range(-(-count // batch))]
            estimate = max(statistics.median(seconds), 1e-7)
            return seconds

        def timed(steps: int) -> float:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for _ in range(steps):
                before()
                step()
            ended.record()
            ended.synchronize()
            return began.elapsed_time(ended) / 1e3

        return run

    def search(self, row: Row, threads: int, seconds: float, known: Limit | None) -> Limit:
        """The best of all ways that the time allows, one at least, and its rival."""
        end, found = time.monotonic() + seconds, {}
        words = self._words(row)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        tried = tuple(dict.fromkeys([*(known.walks if known else ()), *ways(words, processors)]))
        with self.walks(row, Limit(math.inf, None, tried), threads) as walks:
            for way, run in walks.items():
                if not found or time.monotonic() < end:
                    (first,) = run(1)
                    (first,) = run(1)
                    count = max(3, min(500, int(TRIAL / first)))
                    found[way] = statistics.median(run(count))
        ranked = sorted(found, key=found.__getitem__)
        return Limit(found[ranked[0]], None, tuple(ranked[: limit_library.FINALISTS]))

    @contextlib.contextmanager
    def walks(self, row: Row, limit: Limit, threads: int) -> Iterator[dict[Way, Timer]]:
        words, streams = self._words(row), 2 + row.streams.states
        arrays = [torch.zeros(words * 4, dtype=torch.int32, device="cuda") for _ in range(streams)]
        data = (ctypes.c_void_p * streams)(*(array.data_ptr() for array in arrays))

        def run(way: Way) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            if self._limit(streams - 2, way.batch, way.blocks, data, words, stream):
                sys.exit("bench: the limit could not be launched")

        yield {way: self.timer(partial(run, way), lambda: None) for way in limit.walks}
        arrays.clear()

    def _words(self, row: Row) -> int:
        """As many bytes in streams of one width where a step has several: words have 16 bytes."""
        return -(-row.bytes // 16 // (2 * (2 + row.streams.states) - 1))


def _cuda_limit(libraries: Path) -> Any:
    if not (libraries / CUDA_LIMIT).is_file():
        sys.exit(f"bench: {libraries} has no {CUDA_LIMIT}: build with nvcc")
    run = ctypes.CDLL(str(libraries / CUDA_LIMIT)).fusedstep_cuda_limit_run
    number, size, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    run.argtypes = [number, number, number, pointer, size, pointer]
    return run


def ways(words: int, processors: int) -> Iterator[Way]:
    for batch in (1, 2, 4):
        enough = -(-words // 512 // batch)
        for blocks in (2, 4, 8, 16, -(-enough // processors)):
            yield Way(batch, min(blocks * processors, max(1, enough)))


DEVICES = {device.name: device for device in (Cpu, Cuda)}


def described(limit: Limit) -> dict[str, Any]:
    """For another process, that restores it, and for results."""
    return asdict(limit) | {"ms": 1e3 * limit.seconds}
