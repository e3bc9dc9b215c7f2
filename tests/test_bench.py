"""The benchmark measures what it says: shapes, streams of the limit, checks, output."""

import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import fusedstep
import implementations
import kernels
import limit_library
import machine
import onednn_library
import report
import shapes
import subjects
from cases import CASES, PLAIN
from limit_library import Memory, Streams, Walk
from rows import Row

BENCH = Path(shapes.__file__).parent
LIBRARIES = BENCH.parent / "build" / "release" / "bench"

needs_limit = pytest.mark.skipif(
    not (LIBRARIES / limit_library.NAME).is_file(), reason="the limit is not built"
)
needs_kernels = pytest.mark.skipif(
    not (LIBRARIES / kernels.NAME).is_file(), reason="built without Google Benchmark"
)
needs_onednn = pytest.mark.skipif(
    not (LIBRARIES / onednn_library.NAME).is_file(), reason="built without oneDNN"
)


# ---- Shapes --------------------------------------------------------------------------------------

NAMED = {shape_list.name: shape_list for shape_list in shapes.ALL}


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("matrix", 1, 1_048_576),
        ("resnet50", 161, 25_557_032),  # torchvision's resnet50
        ("gpt2", 148, 124_439_808),  # transformers' gpt2 and gpt2-large
        ("gpt2-large", 436, 774_030_080),
        ("small", 2000, 4_124_467),
        ("transposed", 1, 4_194_304),
        ("1K", 1, 1 << 10),
        ("64M", 1, 1 << 26),
    ],
)
def test_shape_list(name, tensors, elements):
    assert len(NAMED[name].shapes) == tensors
    assert NAMED[name].elements == elements


def test_shape_lists_have_names_of_their_own():
    assert len(NAMED) == len(shapes.ALL)
    assert set(shapes.QUICK) < set(shapes.ALL)


def test_small_tensors_are_small():
    assert all(64 <= length <= 4096 for (length,) in NAMED["small"].shapes)


def test_header_for_cpp_has_the_same_elements(tmp_path):
    header = tmp_path / "shape_lists.h"
    subprocess.run([sys.executable, BENCH / "shapes.py", header], check=True)
    text = header.read_text()
    arrays = {
        name: [int(count) for count in counts.split(", ")]
        for name, counts in re.findall(r"int64_t (\w+)\[\] = \{([\d, ]+)\};", text)
    }
    lists = dict(re.findall(r'\{"([\w-]+)", (\w+)\}', text))
    assert lists.keys() == {s.name for s in shapes.ALL if s.layout == "contiguous"}
    for name, array in lists.items():
        assert arrays[array] == [math.prod(shape) for shape in NAMED[name].shapes]


# ---- The limit -----------------------------------------------------------------------------------

# Around a cache line, around a chunk of 64 KiB, and not of either.
ELEMENTS = (1, 2, 15, 16, 17, 33, 16_384, 16_385, 50_001)
WEIGHT, GRAD = 0, 1


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
    """Where a stream has what belongs to bytes [begin, end) of the gradient, once or twice.

    With a stride of two, half of it is in one line, half in the next, or in what a tensor has left
    at its end.
    """
    line = limit_library.LINE
    last = begin + (end - begin) // line * line
    whole = np.arange(begin * stride, last * stride).reshape(-1, stride, line)
    rest = np.arange(last * stride, end * stride).reshape(stride, -1)
    return [np.concatenate([whole[:, half].ravel(), rest[half]]) for half in range(stride)]


def places_of(streams, stream):
    """Of all tensors together."""
    found, begin = [[] for _ in range(streams.stride(stream))], 0
    for count in ELEMENTS:
        size = count * streams.grad_size
        for half, where in zip(found, places(begin, begin + size, len(found)), strict=True):
            half.append(where)
        begin += -(-size // limit_library.LINE) * limit_library.LINE
    return [np.concatenate(half) for half in found]


@pytest.fixture(scope="module")
def limit():
    return limit_library.Library(LIBRARIES)


PATTERNS = (
    *(Streams.of_size(states, 4, two_phase=False) for states in range(5)),
    Streams.of_size(3, 2, two_phase=False),
    Streams.of_size(4, 8, two_phase=False),
    Streams.of_size(1, 4, two_phase=True),
    Streams.of_size(2, 4, two_phase=True),
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
    Walk(threads=7, prefetch=256, alternate=True, wave_elements=1),
    Walk(threads=2, prefetch=1024, way=limit_library.TWICE, wave_elements=60_000),
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
        (Streams.of_size(2, 4, two_phase=False), 28, None),  # Adam
        (Streams.of_size(1, 4, two_phase=False), 20, None),  # Adagrad
        (Streams.of_size(2, 2, two_phase=False), 14, None),  # Adam in bf16
        (Streams(2, 2, 2, 4, two_phase=False), 22, None),  # with float32 states
        (Streams.of_size(4, 4, two_phase=False), 44, None),  # Adan
        (Streams(2, 8, 4, 4, two_phase=False), 36, None),  # Adam, every second column
        (Streams.of_size(2, 4, two_phase=True), 28, (40, 40, 44)),  # LAMB
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
    assert limit_library.STORE in Streams.of_size(2, 4, two_phase=True).ways
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
    streams = Streams.of_size(2, 4, two_phase=False)
    with limit.arrays(streams, [4096], Memory(True, offset), threads=1) as arrays:
        assert [arrays.view(s).ctypes.data % (2 << 20) for s in range(4)] == begins


@needs_limit
@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("budget", [0, 0.1])
def test_search_finds_a_limit(limit, two_phase, budget):
    streams = Streams.of_size(2, 4, two_phase)
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
    best = Walk(4, 512, True, limit_library.TWICE, False, 1 << 19)
    memory = Memory(True, 0)

    def cost(tried, walk):
        wrong = sum(getattr(walk, name) != value for name, value in vars(best).items())
        return 1e-3 * (1 + wrong + 3 * (tried != memory))

    recorder = Recorder(cost)
    streams = Streams.of_size(2, 4, two_phase=True)
    found = limit_library.search(recorder, streams, [1 << 18] * 8, threads=4, budget=60)
    assert (found.memory, found.walk) == (memory, best)
    assert {memory for memory, _ in recorder.walks} == set(limit_library.MEMORIES)
    again = Recorder(cost)
    limit_library.search(again, streams, [1 << 18] * 8, threads=4, budget=0, known=found)
    assert set(again.walks) == {(memory, best)}


@needs_limit
def test_one_openmp_runtime(subprocess_environment):
    program = (
        "import sys, pathlib, torch, limit_library\n"
        "library = limit_library.Library(pathlib.Path(sys.argv[1]))\n"
        "streams = limit_library.Streams.of_size(2, 4, False)\n"
        "library.arrays(streams, [1 << 20], limit_library.Memory(), 2)\n"
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line})\n"
    )
    environment = subprocess_environment | {"PYTHONPATH": str(BENCH)}
    command = [sys.executable, "-c", program, str(LIBRARIES)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert len(eval(output.stdout)) == 1, output.stdout


# ---- Checks before timing ------------------------------------------------------------------------

SOME = shapes.ShapeList("some", "some", ((40, 30), (7,), (1000,)))
TRANSPOSED = shapes.ShapeList("transposed", "transposed", ((40, 30),), "transposed")


class WithAnotherRate:
    def __init__(self, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 1.01
        self.step = optimizer.step


@pytest.mark.parametrize("shape_list", [SOME, TRANSPOSED], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_check_accepts_a_right_step_and_no_other(case, shape_list):
    check = subjects.Check(case, shape_list, torch.float32)
    params = subjects.make(shape_list, torch.float32)
    assert check(case.build(params, fused=False), params) is None
    params = subjects.make(shape_list, torch.float32)
    assert "off" in check(WithAnotherRate(case.build(params, fused=False)), params)


def test_subjects_lie_as_their_list_says():
    (param,) = subjects.make(TRANSPOSED, torch.float32)
    assert param.shape == (40, 30)
    assert param.stride() == (1, 40)
    assert param.grad.stride() == (30, 1)


@needs_onednn
@pytest.mark.parametrize(
    "case", [case for case in PLAIN if case.name in onednn_library.ONEDNN_CASES], ids=str
)
@pytest.mark.parametrize("name", ["some", "1M"])
def test_onednn_makes_the_same_step(case, name):
    shape_list = SOME if name == "some" else NAMED[name]
    (implementation,) = (
        i
        for i in implementations.all_implementations(onednn_library.OneDnn(LIBRARIES))
        if i.name == "onednn"
    )
    row = Row(case, shape_list)
    assert implementation.exists(row)
    params = subjects.make(shape_list, torch.float32)
    stepper = implementation.build(row, params)
    assert subjects.Check(case, shape_list, torch.float32)(stepper, params) is None


def test_onednn_is_told_to_be_absent():
    (implementation,) = (i for i in implementations.all_implementations(None) if i.name == "onednn")
    with pytest.raises(implementations.UnavailableError, match="without oneDNN"):
        implementation.build(Row(PLAIN[0], SOME), subjects.make(SOME, torch.float32))


# ---- The kernels alone ---------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("case", [case for case in PLAIN if case.name != "adamw"], ids=str)
def test_there_are_kernels_for_every_dense_list(case):
    program = kernels.Kernels(LIBRARIES, os.environ | {"OMP_NUM_THREADS": "1"})
    rule, isa = case.optimizer.__name__, fusedstep.isa()
    found = {s.name for s in shapes.ALL if program.find(rule, s.name, isa, threads=1)}
    assert found == {s.name for s in shapes.ALL if s.layout == "contiguous"}
    assert program.find(rule, "1K", isa, threads=2) is None


@needs_kernels
def test_figure_of_the_kernels_is_a_median_in_milliseconds(monkeypatch):
    program = kernels.Kernels(LIBRARIES, os.environ | {"OMP_NUM_THREADS": "1"})
    asked = []

    def run(*options):
        asked.extend(options)
        figures = {"mean": 40.0, "median": 30.0}
        runs = [
            {"aggregate_name": k, "real_time": v, "time_unit": "us"} for k, v in figures.items()
        ]
        return json.dumps({"benchmarks": [{"real_time": 60.0, "time_unit": "us"}, *runs]})

    monkeypatch.setattr(program, "_run", run)
    assert program.milliseconds("Adam/1K", estimate=15.0) == pytest.approx(0.03)
    assert "--benchmark_filter=^Adam/1K$" in asked
    assert "--benchmark_repetitions=10" in asked


# ---- The machine ---------------------------------------------------------------------------------

STAT = """\
cpu  0 0 0 0 0 0 0 0 0 0
cpu0 {user} 0 0 {idle} 50 0 0 {stolen} 0 0
cpu1 {user} 0 0 {idle} 50 0 0 {stolen} 0 0
cpu10 9999 0 0 0 0 0 0 0 0 0
"""


def test_others_are_who_took_the_rest_of_our_cpus(monkeypatch):
    """In ten seconds on two CPUs: 8 s used and 1 s stolen on each, 12 s of it in all by us."""
    tick = os.sysconf("SC_CLK_TCK")
    stat = {"user": 0, "idle": 0, "stolen": 0}
    own = types.SimpleNamespace(ru_utime=0.0, ru_stime=0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(machine, "_read", lambda _: STAT.format(**stat))
    monkeypatch.setattr(machine.resource, "getrusage", lambda _: own)
    others = machine.Others()
    assert others.share() == 0
    stat.update(user=8 * tick, idle=1 * tick, stolen=1 * tick)
    own.ru_utime, own.ru_stime = 4.5, 1.5  # twice: this process and its children
    assert others.share() == pytest.approx((2 * 9 - 12) / (2 * 10))


# ---- Output --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A tiny run."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, BENCH / "run.py", "--quick", "--budget", "1", "--output", folder]
    run = subprocess.run(
        [*command, "^(adam|lamb)/(1K|4K)$"], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return run.stdout, folder


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


@needs_limit
def test_results(output):
    _, folder = output
    results = results_of(folder)
    allocators = {row["allocator"] for row in results["rows"]}
    assert "glibc" in allocators
    assert allocators == {"glibc", "jemalloc"} or "no jemalloc" in "".join(results["notes"])
    assert len(results["rows"]) == 4 * len(allocators)
    assert results["machine"]["cores"] >= results["threads"] >= 1
    for row in results["rows"]:
        assert row["bytes"] == 28 * row["elements"]
        for name, result in row["results"].items():
            assert name in results["implementations"]
            low, high = result.get("ms_quartiles", (0, 0))
            assert "absent" in result or low <= result["ms"] <= high, (name, result)
        assert row["results"]["unfused"]["speedup"] == 1


@needs_limit
@needs_kernels
def test_results_have_the_kernels_alone(output):
    printed, folder = output
    results = results_of(folder)
    found = {(each["optimizer"], each["shapes"]): each["ms"] for each in results["kernels"]}
    assert found.keys() == {(o, s) for o in ("lamb", "adam") for s in ("1K", "4K")}
    assert min(found.values()) > 0
    assert "kernels alone" in printed
    for optimizer in ("lamb", "adam"):
        column = report.header(results, optimizer).index("kernels alone")
        for cells in report.lines(results, optimizer):
            shapes_of = {f"{shape} elements": shape for shape in ("1K", "4K")}
            alone = found[optimizer, shapes_of[cells[0]]]
            assert cells[column] == report.milliseconds(alone)


@needs_limit
def test_tables_do_without_the_kernels_alone(output):
    results = results_of(output[1])
    results["kernels"] = [k for k in results["kernels"] if k["optimizer"] != "lamb"]
    assert "kernels alone" not in report.header(results, "lamb")
    assert all(len(c) == len(report.header(results, "lamb")) for c in report.lines(results, "lamb"))
    results["kernels"] = []
    assert "kernels" not in report.markdown(results)


@needs_limit
def test_tables_and_plots(output):
    printed, folder = output
    tables = (folder / "README.md").read_text()
    for text in (printed, tables):
        assert "adam: ms a step" in text
        assert "lamb: ms a step" in text
        assert "4K elements" in text
    assert "| torch foreach |" in tables
    for name in ("time.png", "speedup.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in tables


@needs_limit
def test_plots_can_be_drawn_again(output, tmp_path):
    _, folder = output
    command = [sys.executable, BENCH / "plot.py", folder / "results.json", tmp_path]
    subprocess.run(command, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"time.png", "speedup.png"}


@needs_limit
@pytest.mark.parametrize("width", [40, 80, 100, 1000])
def test_tables_on_a_terminal_lose_columns_but_no_figures(output, width):
    results = results_of(output[1])
    for optimizer, table in zip(
        report.optimizers(results), report.rich_tables(results, width), strict=True
    ):
        console = Console(width=max(width, report.width_of(table)), file=io.StringIO())
        console.print(table)
        shown = console.file.getvalue()
        names = report.header(results, optimizer)
        lost = [name for name in names if name in (table.caption or "")]
        assert bool(lost) == (width in (40, 80)) or width == 100
        assert {"tensors", "ours unfused", "ours fused", "speed-up"}.isdisjoint(lost)
        assert width == 40 or max(map(len, shown.splitlines())) <= width
        for cells in report.lines(results, optimizer):
            figures = [f for name, f in zip(names, cells, strict=True) if name not in lost]
            assert re.search(r"\s+".join(map(re.escape, figures[1:])), shown), figures


@needs_limit
def test_what_is_wrong_or_skipped_is_shown_as_such(output):
    results = results_of(output[1])
    row = next(row for row in results["rows"] if row["optimizer"] == "adam")
    row["results"]["foreach"] = {"wrong": "tensor 0 is 1.0e+00 off"}
    row["results"]["torch_fused"] = {"ms": 3.0}
    row["results"]["fused"] = {"ms": 2.0}
    skipped = {k: v for k, v in row.items() if k not in ("limit", "results")}
    results["rows"] = [row, skipped | {"title": "huge", "shapes": "huge", "skipped": "no memory"}]
    text = report.markdown(results)
    assert "| wrong |" in text
    assert "torch foreach is wrong: tensor 0 is 1.0e+00 off (adam, " in text
    assert f"median over the lists: 1.50× ({row['allocator']})" in text
    assert "| huge |" not in text
    assert f"Skipped: adam, huge, {row['allocator']}: no memory." in text


def test_unknown_rows_and_bad_patterns_are_refused(tmp_path):
    def run(*arguments):
        command = [sys.executable, BENCH / "run.py", "--output", tmp_path, *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    assert "not a regular expression" in run("(").stderr
    missing = run("--libraries", str(tmp_path), "lamb")
    assert missing.returncode != 0
    assert "cmake --preset release" in missing.stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00012, "0.0001"),
        (0.0456, "0.0456"),
        (0.456, "0.456"),
        (4.56, "4.56"),
        (456.7, "457"),
        (999.4, "999"),
        (999.6, "1,000"),
    ],
)
def test_milliseconds(value, text):
    assert report.milliseconds(value) == text
