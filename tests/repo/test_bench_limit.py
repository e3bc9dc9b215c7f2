"""The limit of the benchmark goes over what a step goes over, and the best way is found."""

import contextlib
import ctypes
import subprocess
import sys
import types

import numpy as np
import pytest

from suites import limit_library, worker
from suites.limit_library import Memory, Streams, Walk
from support.benchmark import BENCH, LIBRARIES, needs_limit

# Around a cache line, around a chunk of 64 KiB, and not of either.
ELEMENTS = (1, 2, 15, 16, 17, 33, 16_384, 16_385, 50_001)
WEIGHT, GRAD = 0, 1


def of_size(states, size, two_phase):
    """Streams of elements of one size."""
    return Streams(states, size, size, size, two_phase)


def stride(streams, stream):
    """The bytes that a stream gets on by while the gradient's gets on by one."""
    sizes = (streams.weight_size, streams.grad_size, streams.state_size)
    return sizes[min(stream, 2)] // streams.grad_size


def expected_passes(streams, walk):
    """The streams that each pass reads and those that it writes."""
    states = list(range(2, 2 + streams.states))
    everything = [WEIGHT, GRAD, *states]
    if not streams.two_phase:
        return [(everything, [WEIGHT, *states])]
    return {
        limit_library.STORE: [(everything, [GRAD, *states]), ([WEIGHT, GRAD], [WEIGHT])],
        limit_library.RECOMPUTE: [(everything, states), ([WEIGHT, *states], [WEIGHT])],
        limit_library.TWICE: [(everything, []), (everything, [WEIGHT, *states])],
    }[walk.way]


def places(begin, end, stride):
    """The places in a stream that belong to bytes [begin, end) of the gradient, once or twice.

    With a stride of two, half of it is in one line, half in the next, or in what a tensor has left
    at its end.
    """
    line = limit_library.LINE
    last = begin + (end - begin) // line * line
    whole = np.arange(begin * stride, last * stride).reshape(-1, stride, line)
    rest = np.arange(last * stride, end * stride).reshape(stride, -1)
    return [np.concatenate([whole[:, half].ravel(), rest[half]]) for half in range(stride)]


def places_of(streams, stream):
    """The places of all tensors together."""
    found, begin = [[] for _ in range(stride(streams, stream))], 0
    for count in ELEMENTS:
        size = count * streams.grad_size
        for half, where in zip(found, places(begin, begin + size, len(found)), strict=True):
            half.append(where)
        begin += -(-size // limit_library.LINE) * limit_library.LINE
    return [np.concatenate(half) for half in found]


class Arrays(limit_library.Arrays):
    """Arrays whose bytes can be looked at."""

    def traffic(self, walk):
        """Bytes read plus bytes written by a walk."""
        return self._library.fusedstep_limit_traffic(self._handle, walk.way)

    def sum(self):
        """The exclusive or of all words of two bytes that passes without writes have read."""
        return self._library.fusedstep_limit_sum(self._handle)

    def view(self, stream):
        """The bytes of one stream (0: weight, 1: gradient, then states), gaps included."""
        sizes = self._elements * self._streams.grad_size
        line = limit_library.LINE
        length = int((-(-sizes[:-1] // line) * line).sum() + sizes[-1])
        data = self._library.fusedstep_limit_data(self._handle, stream)
        pointer = ctypes.cast(data, ctypes.POINTER(ctypes.c_uint8))
        return np.ctypeslib.as_array(pointer, (length * stride(self._streams, stream),))


class Library(limit_library.Library):
    def __init__(self, folder):
        super().__init__(folder)
        self._library.fusedstep_limit_traffic.restype = ctypes.c_int64
        self._library.fusedstep_limit_traffic.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        self._library.fusedstep_limit_data.restype = ctypes.c_void_p
        self._library.fusedstep_limit_data.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        self._library.fusedstep_limit_sum.restype = ctypes.c_uint16
        self._library.fusedstep_limit_sum.argtypes = [ctypes.c_void_p]

    def arrays(self, *arguments, **named):
        return Arrays(self._library, *arguments, **named)


@pytest.fixture(scope="module")
def limit():
    return Library(LIBRARIES)


PATTERNS = (
    *(of_size(states, 4, two_phase=False) for states in range(5)),
    of_size(3, 2, two_phase=False),
    of_size(4, 8, two_phase=False),
    of_size(1, 4, two_phase=True),
    of_size(2, 4, two_phase=True),
    Streams(2, 2, 2, 4, two_phase=False),  # 16-bit weights with float32 states
    Streams(1, 2, 2, 4, two_phase=True),
    Streams(1, 8, 4, 4, two_phase=False),  # sliced weights
    Streams(2, 8, 4, 4, two_phase=True),
    Streams(2, 4, 2, 4, two_phase=True),  # both
)
WALKS = (
    Walk(threads=1, prefetch=0, way=limit_library.STORE, backward=False),
    Walk(threads=2, prefetch=256, alternate=True),
    Walk(threads=3, prefetch=512, way=limit_library.STORE, wave_elements=20_000),
    Walk(threads=7, prefetch=256, take=False, alternate=True, wave_elements=1),
    Walk(threads=2, prefetch=1024, take=False, way=limit_library.TWICE, wave_elements=60_000),
)


@needs_limit
@pytest.mark.parametrize("walk", WALKS, ids=range(len(WALKS)))
@pytest.mark.parametrize("streams", PATTERNS, ids=str)
@pytest.mark.parametrize("memory", [Memory(True, 1024), Memory(False, 0)], ids=["huge", "small"])
def test_walk_goes_over_its_streams_once_and_over_nothing_else(limit, streams, walk, memory):
    where = [places_of(streams, stream) for stream in range(2 + streams.states)]
    with limit.arrays(streams, ELEMENTS, memory, threads=2) as arrays:
        expected = [arrays.view(stream).copy() for stream in range(len(where))]
        for content, inside in zip(expected, where, strict=True):
            gaps = np.ones(len(content), dtype=bool)
            gaps[np.concatenate(inside)] = False
            assert not content[gaps].any(), "gaps are not empty"
            assert content[~gaps].any()

        only_read, traffic = 0, 0
        for _ in range(2):  # there and, if they alternate, back
            for reads, writes in expected_passes(streams, walk):
                key = 0
                for stream in set(reads) - set(writes):
                    for half in where[stream]:
                        key = key ^ expected[stream][half]
                for stream in writes:
                    for half in where[stream]:
                        expected[stream][half] ^= key
                if not writes:
                    only_read ^= np.bitwise_xor.reduce(key.view(np.uint16))
                moved = sum(len(where[stream]) for stream in [*reads, *writes])
                traffic += moved * sum(ELEMENTS) * streams.grad_size

        arrays.run(walk, 2)
        for stream, content in enumerate(expected):
            np.testing.assert_array_equal(arrays.view(stream), content, f"stream {stream}")
        assert arrays.sum() == only_read
        assert 2 * arrays.traffic(walk) == traffic


@needs_limit
@pytest.mark.parametrize(
    ("streams", "at_least", "in_two_passes"),
    [
        (of_size(2, 4, two_phase=False), 28, None),  # Adam
        (of_size(1, 4, two_phase=False), 20, None),  # Adagrad
        (of_size(2, 2, two_phase=False), 14, None),  # Adam in bf16
        (Streams(2, 2, 2, 4, two_phase=False), 22, None),  # with float32 states
        (of_size(4, 4, two_phase=False), 44, None),  # Adan
        (Streams(2, 8, 4, 4, two_phase=False), 36, None),  # Adam, every second column
        (of_size(2, 4, two_phase=True), 28, (40, 40, 44)),  # LAMB
        (Streams(2, 2, 2, 4, two_phase=True), 22, (None, 32, 34)),
    ],
)
def test_bytes_of_an_element(limit, streams, at_least, in_two_passes):
    assert streams.bytes_per_element == at_least
    with limit.arrays(streams, [1000], Memory(), threads=1) as arrays:
        for way in streams.ways:
            expected = in_two_passes[way] if in_two_passes else at_least
            assert arrays.traffic(Walk(threads=1, way=way)) == 1000 * expected


def test_no_room_for_the_update_in_gradients_of_16_bits():
    assert limit_library.STORE in of_size(2, 4, two_phase=True).ways
    assert limit_library.STORE not in Streams(2, 2, 2, 4, two_phase=True).ways


@needs_limit
def test_memory_is_the_same_every_time(limit):
    streams = Streams(2, 4, 4, 8, two_phase=False)
    with (
        limit.arrays(streams, ELEMENTS, Memory(True, 1024), threads=2) as one,
        limit.arrays(streams, ELEMENTS, Memory(False, 0), threads=1) as other,
    ):
        for stream in range(4):
            np.testing.assert_array_equal(one.view(stream), other.view(stream))


@needs_limit
@pytest.mark.parametrize(
    ("offset", "begins"),
    [(0, [0, 0, 0, 0]), (1024, [0, 1024, 2048, 3072]), (65 << 10, [0, 66560, 133120, 199680])],
)
def test_streams_start_apart(limit, offset, begins):
    streams = of_size(2, 4, two_phase=False)
    with limit.arrays(streams, [4096], Memory(True, offset), threads=1) as arrays:
        assert [arrays.view(s).ctypes.data % (2 << 20) for s in range(4)] == begins


@needs_limit
@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("budget", [0, 0.1])
def test_search_finds_a_limit(limit, two_phase, budget):
    streams = of_size(2, 4, two_phase)
    found = limit_library.search(limit, streams, [1000, 50], threads=2, budget=budget)
    assert found.seconds > 0
    assert found.memory in limit_library.MEMORIES


class Recorder:
    """A limit's library in which a walk takes as long as `cost` says."""

    def __init__(self, cost):
        self.walks, self._cost = [], cost

    def arrays(self, streams, elements, memory, threads):
        def run(walk, repetitions=1):
            self.walks.append((memory, walk))
            return [self._cost(memory, walk)] * repetitions

        return contextlib.nullcontext(types.SimpleNamespace(run=run))


def test_search_finds_the_best_of_each_thing():
    best = Walk(4, 512, False, True, limit_library.TWICE, False, 1 << 19)
    memory = Memory(True, 0)

    def cost(tried, walk):
        wrong = sum(getattr(walk, name) != value for name, value in vars(best).items())
        return 1e-3 * (1 + wrong + 3 * (tried != memory))

    recorder = Recorder(cost)
    streams = of_size(2, 4, two_phase=True)
    found = limit_library.search(recorder, streams, [1 << 18] * 8, threads=4, budget=60)
    assert (found.memory, found.walks[0]) == (memory, best)
    assert len(set(found.walks)) == limit_library.FINALISTS
    assert {memory for memory, _ in recorder.walks} == set(limit_library.MEMORIES)
    again = Recorder(cost)
    limit_library.search(again, streams, [1 << 18] * 8, threads=4, budget=0, known=found)
    assert set(again.walks) == {(memory, best)}


def test_limit_is_the_smallest_median_of_its_walks():
    disturbed, fast = Walk(threads=1), Walk(threads=2)
    limit = limit_library.Limit(1.0, Memory(), (disturbed, fast))
    found = worker.confirmed(limit, {disturbed: [1.5, 4.0, 4.0], fast: [9.0, 2.0, 3.0]})
    assert found == limit_library.Limit(3.0, Memory(), (fast, disturbed))


@pytest.mark.parametrize(("step", "seconds"), [(2.0, 1.0), (3.5, 3.0)])
def test_limit_above_a_step_is_looked_for_again(monkeypatch, step, seconds):
    limit, better = (limit_library.Limit(each, Memory(), (Walk(1),)) for each in (3.0, 1.0))
    measurement = object.__new__(worker.Measurement)
    monkeypatch.setattr(measurement, "_search_seconds", 0.0, raising=False)
    monkeypatch.setattr(measurement, "_search", lambda seconds, known: better)
    found = measurement._never_above(limit, {"fused": [step, step], "unfused": [9.0]})
    assert found.seconds == seconds


@needs_limit
def test_one_openmp_runtime(subprocess_environment):
    program = (
        "import sys, pathlib, torch\nfrom suites import limit_library\n"
        "library = limit_library.Library(pathlib.Path(sys.argv[1]))\n"
        "streams = limit_library.Streams(2, 4, 4, 4, False)\n"
        "library.arrays(streams, [1 << 20], limit_library.Memory(), 2)\n"
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line})\n"
    )
    environment = subprocess_environment | {"PYTHONPATH": str(BENCH)}
    command = [sys.executable, "-c", program, str(LIBRARIES)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert len(eval(output.stdout)) == 1, output.stdout
