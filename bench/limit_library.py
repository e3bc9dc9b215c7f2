"""The limit: a step's reads and writes without its maths, through limit/limit.h.

A step cannot be faster than the best of these loops. The best is looked for over how memory is laid
out (huge pages, where in a page the arrays start) and how it is gone over (threads, prefetch; for a
two-phase rule also waves of tensors, keeping or computing the update again, the second pass
backwards).
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

NAME = "libfusedstep_limit.so"

LINE = 64
"""Each tensor starts at a multiple of this many bytes in each stream."""


class _Streams(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("states", "element_size", "two_phase")]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("huge_pages", "offset")]


class _Walk(ctypes.Structure):
    _fields_ = [
        ("threads", ctypes.c_int32),
        ("prefetch", ctypes.c_int32),
        ("wave_elements", ctypes.c_int64),
        ("store", ctypes.c_int32),
        ("backward", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Streams:
    """What a step goes over: weight, gradient and some states, elementwise or in two phases."""

    states: int
    element_size: int
    two_phase: bool

    @property
    def bytes_per_element(self) -> int:
        """What a step must move at least: each array read, each but the gradient written."""
        return (2 * (2 + self.states) - 1) * self.element_size


@dataclass(frozen=True)
class Memory:
    huge_pages: bool = True
    offset: int = 1024


@dataclass(frozen=True)
class Walk:
    threads: int
    prefetch: int = 256
    wave_elements: int = 0
    store: bool = True
    backward: bool = False


class Library:
    """libfusedstep_limit.so. Import torch first, so that they share one OpenMP."""

    def __init__(self, folder: Path) -> None:
        self._library = library = ctypes.CDLL(str(folder / NAME))
        pointer = ctypes.c_void_p
        library.fusedstep_limit_new.restype = pointer
        library.fusedstep_limit_new.argtypes = [
            pointer, pointer, ctypes.c_int64, pointer, ctypes.c_int32,
        ]  # fmt: skip
        library.fusedstep_limit_delete.argtypes = [pointer]
        library.fusedstep_limit_run.argtypes = [pointer, pointer, ctypes.c_int64, pointer]
        library.fusedstep_limit_traffic.restype = ctypes.c_int64
        library.fusedstep_limit_traffic.argtypes = [pointer, ctypes.c_int32]
        library.fusedstep_limit_data.restype = pointer
        library.fusedstep_limit_data.argtypes = [pointer, ctypes.c_int32]
        library.fusedstep_limit_isa.restype = ctypes.c_char_p

    @property
    def isa(self) -> str:
        return self._library.fusedstep_limit_isa().decode()

    def arrays(
        self, streams: Streams, elements: Sequence[int], memory: Memory, threads: int
    ) -> Arrays:
        return Arrays(self._library, streams, elements, memory, threads)


class Arrays:
    """The arrays of a step over tensors of the given sizes. Close it, or use it in `with`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        streams: Streams,
        elements: Sequence[int],
        memory: Memory,
        threads: int,
    ) -> None:
        self._library = library
        self._element_size = streams.element_size
        self._elements = np.asarray(elements, dtype=np.int64)
        self._handle = library.fusedstep_limit_new(
            ctypes.byref(_Streams(**asdict(streams))),
            ctypes.byref(_Memory(**asdict(memory))),
            len(self._elements),
            self._elements.ctypes.data,
            threads,
        )
        if not self._handle:
            raise MemoryError("no memory for the arrays of the limit")

    def run(self, walk: Walk, repetitions: int = 1) -> list[float]:
        """Seconds of each of some walks."""
        seconds = np.empty(repetitions)
        self._library.fusedstep_limit_run(
            self._handle, ctypes.byref(_Walk(**asdict(walk))), repetitions, seconds.ctypes.data
        )
        return seconds.tolist()

    def traffic(self, walk: Walk) -> int:
        """Bytes read plus bytes written by a walk."""
        return self._library.fusedstep_limit_traffic(self._handle, walk.store)

    def view(self, stream: int) -> np.ndarray:
        """The bytes of one stream (0: weight, 1: gradient, then states), gaps included."""
        sizes = self._elements * self._element_size
        length = int((-(-sizes[:-1] // LINE) * LINE).sum() + sizes[-1])
        data = self._library.fusedstep_limit_data(self._handle, stream)
        return np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_uint8)), (length,))

    def close(self) -> None:
        if self._handle:
            self._library.fusedstep_limit_delete(self._handle)
            self._handle = None

    def __enter__(self) -> Arrays:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Limit:
    """The fastest way found, and the seconds it took."""

    seconds: float
    memory: Memory
    walk: Walk


MEMORIES = tuple(Memory(huge, offset) for offset in (1024, 0) for huge in (True, False))
PREFETCHES = (256, 512, 0)
WAVES = (1 << 20, 1 << 18, 1 << 22)

#: Elements below which one thread is tried first, and above which the whole team only.
ONE_THREAD, WHOLE_TEAM = 1 << 15, 1 << 23

#: Seconds that a walk is repeated for.
BURST = 0.01


def _axes(streams: Streams, elements: Sequence[int], threads: int) -> Iterator[list[dict]]:
    """What can be changed about a walk, one thing after the other."""
    if sum(elements) < WHOLE_TEAM:
        powers = (1 << power for power in range((threads - 1).bit_length()))
        yield [{"threads": count} for count in (*powers, threads)]
    yield [{"prefetch": prefetch} for prefetch in PREFETCHES]
    if streams.two_phase:
        yield [{"store": store} for store in (True, False)]
        if len(elements) > 1:
            yield [{"wave_elements": wave} for wave in WAVES if wave < sum(elements)]
        yield [{"backward": backward} for backward in (False, True)]


def search(
    library: Library, streams: Streams, elements: Sequence[int], threads: int, budget: float
) -> Limit:
    """The best over the memories and walks that `budget` seconds allow, one at least."""
    deadline = time.monotonic() + budget
    best: Limit | None = None
    first = Walk(1 if sum(elements) < ONE_THREAD else threads)
    for memory in MEMORIES:
        if best is not None and time.monotonic() > deadline:
            break
        with library.arrays(streams, elements, memory, threads) as arrays:
            walk = best.walk if best else first
            best = _better(best, arrays, memory, walk)
            for axis in _axes(streams, elements, threads):
                for change in axis:
                    changed = replace(best.walk, **change)
                    if changed != walk and time.monotonic() < deadline:
                        best = _better(best, arrays, memory, changed)
    return best


def _better(best: Limit | None, arrays: Arrays, memory: Memory, walk: Walk) -> Limit:
    seconds = measure(arrays, walk)
    return Limit(seconds, memory, walk) if best is None or seconds < best.seconds else best


def measure(arrays: Arrays, walk: Walk) -> float:
    """Median seconds of a walk, warm."""
    first = min(arrays.run(walk, 2))
    repetitions = min(max(3, int(BURST / max(first, 1e-9))), 5000)
    return statistics.median(arrays.run(walk, repetitions))
