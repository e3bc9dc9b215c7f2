"""The limit: a step's reads and writes without its maths, through limit/limit.cpp.

A step cannot be faster than the best of these loops. The best is looked for over how memory is laid
out (huge pages, where in a page the arrays start) and how it is gone over (threads, prefetch,
direction; for a two-phase rule also waves of tensors, and whether the update is kept or computed
again).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

NAME = "libfusedstep_limit.so"

LINE = 64
"""Each tensor starts at a multiple of this many bytes in each stream."""

STORE, RECOMPUTE, TWICE = range(3)
"""Ways of a two-phase step to bring the update from one pass to the next, as in limit.cpp."""


@functools.cache
def _struct(value: Streams | Memory | Walk) -> Any:
    """As limit.cpp has it: members of 32 bits, but for numbers of elements."""
    members = asdict(value)
    sizes = {name: ctypes.c_int64 if "elements" in name else ctypes.c_int32 for name in members}
    kind = type("Struct", (ctypes.Structure,), {"_fields_": list(sizes.items())})
    return ctypes.byref(kind(**members))


@dataclass(frozen=True)
class Streams:
    """The arrays of a step: weight, gradient and some states, elementwise or in two phases.

    Sizes are the bytes by which a stream gets on with each element: of a weight of which every
    second column is updated, twice its element's, since whole lines are moved.
    """

    states: int
    weight_size: int
    grad_size: int
    state_size: int
    two_phase: bool

    @property
    def arrays_bytes(self) -> int:
        """The bytes of an element in all streams."""
        return self.weight_size + self.grad_size + self.states * self.state_size

    @property
    def bytes_per_element(self) -> int:
        """The bytes that a step must move: each array read, each but the gradient written."""
        return 2 * self.arrays_bytes - self.grad_size

    @property
    def ways(self) -> tuple[int, ...]:
        """An update is in float at least: a gradient of 16 bits has no room for it."""
        return (STORE, RECOMPUTE, TWICE) if self.grad_size >= 4 else (RECOMPUTE, TWICE)


@dataclass(frozen=True)
class Memory:
    huge_pages: bool = True
    offset: int = 1024


@dataclass(frozen=True)
class Walk:
    threads: int
    prefetch: int = 256
    take: bool = True
    alternate: bool = False
    way: int = RECOMPUTE
    backward: bool = True
    wave_elements: int = 0


class Library:
    """libfusedstep_limit.so. Import torch first, so that they share one OpenMP."""

    def __init__(self, folder: Path) -> None:
        self._library = library = ctypes.CDLL(str(folder / NAME))
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        library.fusedstep_limit_new.restype = pointer
        library.fusedstep_limit_new.argtypes = [pointer, pointer, size, pointer, ctypes.c_int32]
        library.fusedstep_limit_delete.argtypes = [pointer]
        library.fusedstep_limit_run.argtypes = [pointer, pointer, size, pointer]
        library.fusedstep_limit_isa.restype = ctypes.c_char_p

    @property
    def isa(self) -> str:
        return self._library.fusedstep_limit_isa().decode()

    def arrays(self, *arguments: Any, **named: Any) -> Arrays:
        return Arrays(self._library, *arguments, **named)


class Arrays:
    """The arrays of a step over tensors of the given sizes, to be used in `with`."""

    def __init__(
        self, library: Any, streams: Streams, elements: Sequence[int], memory: Memory, threads: int
    ) -> None:
        self._library, self._streams = library, streams
        self._elements = sizes = np.asarray(elements, dtype=np.int64)
        self._handle = library.fusedstep_limit_new(
            _struct(streams), _struct(memory), len(sizes), sizes.ctypes.data, threads
        )
        if not self._handle:
            raise MemoryError("no memory for the arrays of the limit")

    def run(self, walk: Walk, repetitions: int = 1) -> list[float]:
        """Seconds of each of some walks."""
        seconds = np.empty(repetitions)
        data = seconds.ctypes.data
        self._library.fusedstep_limit_run(self._handle, _struct(walk), repetitions, data)
        return seconds.tolist()

    def __enter__(self) -> Arrays:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.fusedstep_limit_delete(self._handle)


@dataclass(frozen=True)
class Limit:
    """The fastest way found, and the seconds it took."""

    seconds: float
    memory: Memory
    walks: tuple[Walk, ...]
    """The best one and its nearest rival, which may have been disturbed."""


#: Offsets: apart in the page, apart in the caches' sets and in the huge page, and all alike.
MEMORIES = (
    Memory(True, 1024), Memory(False, 1024), Memory(True, 65 << 10), Memory(True, 0),
    Memory(False, 0),
)  # fmt: skip
PREFETCHES = (256, 512, 1024, 64, 0)
WAVES = tuple(1 << power for power in range(18, 24))

#: Elements below which one thread is tried first, and above which the whole team only.
ONE_THREAD, WHOLE_TEAM = 1 << 15, 1 << 23

#: Seconds that a walk is repeated for, in how many bursts: one may be disturbed.
BURST, BURSTS = 0.005, 2

#: Walks that a limit has.
FINALISTS = 2


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def _axes(streams: Streams, elements: Sequence[int], threads: int) -> Iterator[list[dict]]:
    """The changes that a walk can have, one after the other. Those that matter most come first."""
    if sum(elements) < WHOLE_TEAM:
        yield [{"threads": count} for count in powers_of_two(threads)]
    if streams.two_phase:
        yield [{"way": way} for way in streams.ways]
        if len(elements) > 1:
            yield [{"wave_elements": wave} for wave in WAVES if wave < sum(elements)]
    yield [{"prefetch": prefetch} for prefetch in PREFETCHES]
    yield [{"take": take} for take in (False, True)]
    yield [{"alternate": alternate} for alternate in (True, False)]
    if streams.two_phase:
        yield [{"backward": backward} for backward in (False, True)]


def search(
    library: Library,
    streams: Streams,
    elements: Sequence[int],
    threads: int,
    budget: float,
    known: Limit | None = None,
) -> Limit:
    """The best over the walks and memories that `budget` seconds allow, one at least.

    First the walks, from those that are `known` from before if there are any; then the best walk in
    the other memories; then the walks again in the best memory.
    """
    end = time.monotonic() + budget
    found: dict[tuple[Memory, Walk], float] = {}

    def best() -> tuple[Memory, Walk]:
        return min(found, key=found.__getitem__)

    def attempt(arrays: Arrays, memory: Memory, walk: Walk) -> None:
        if not found or time.monotonic() < end:
            before = found.get((memory, walk), math.inf)
            found[memory, walk] = min(before, measure(arrays, walk))

    def over_walks(memory: Memory, walks: Sequence[Walk]) -> None:
        """The walks, then one change after the other of the best one yet."""
        with library.arrays(streams, elements, memory, threads) as arrays:
            for walk in walks:
                attempt(arrays, memory, walk)
            for change in itertools.chain(*_axes(streams, elements, threads)):
                if (changed := replace(best()[1], **change)) != best()[1]:
                    attempt(arrays, memory, changed)

    memory = known.memory if known else MEMORIES[0]
    first = Walk(1 if sum(elements) < ONE_THREAD else threads, way=streams.ways[0])
    over_walks(memory, known.walks if known else [first])
    for other in MEMORIES:
        if other != memory and time.monotonic() < end:
            with library.arrays(streams, elements, other, threads) as arrays:
                attempt(arrays, other, best()[1])
    if best()[0] != memory and time.monotonic() < end:
        over_walks(best()[0], [best()[1]])
    memory, walk = best()
    ranked = sorted(found, key=found.__getitem__)
    walks = [each for place, each in ranked if place == memory]
    return Limit(found[memory, walk], memory, tuple(walks[:FINALISTS]))


def measure(arrays: Arrays, walk: Walk) -> float:
    """Seconds of a walk, warm: the smaller median of two bursts."""
    first = min(arrays.run(walk, 2))
    repetitions = min(max(2, int(BURST / max(first, 1e-9))), 5000)
    return min(statistics.median(arrays.run(walk, repetitions)) for _ in range(BURSTS))
