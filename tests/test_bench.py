"""The benchmark measures what it says: shapes, streams of the limit, checks, output."""

import io
import json
import math
import os
import re
import subprocess
import sys
import types

import pytest
import torch
from rich.console import Console

import fusedstep
import implementations
import kernels
import machine
import onednn_library
import report
import shapes
import subjects
import worker
from benchmark import BENCH, LIBRARIES, needs_kernels, needs_limit, needs_onednn
from cases import CASES, PLAIN
from rows import Row

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


@pytest.mark.parametrize(("turns", "seconds"), [(5, math.inf), (2500, 0.0)])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_many_steps_leave_no_denormal_numbers(case, turns, seconds):
    params = subjects.make(SOME, torch.float32)
    optimizer = case.build(params)
    contestant = worker.Contestant(
        "ours", worker.step_timer(optimizer), subjects.Gradients(params).renew
    )
    for _ in range(turns):
        contestant.take_turn(seconds)
    assert len(contestant.samples) >= 2500
    tiny = torch.finfo(torch.float32).tiny
    for state in optimizer.state.values():
        for name, value in state.items():
            assert not ((value != 0) & (value.abs() < tiny)).any(), name


@pytest.mark.parametrize(
    ("layout", "weight", "grad"),
    [
        ("contiguous", (60, 12, 4, 1), (60, 12, 4, 1)),
        ("transposed", (1, 2, 10, 30), (60, 12, 4, 1)),
        ("sliced", (120, 24, 8, 2), (60, 12, 4, 1)),
        ("channels-last", (60, 1, 20, 5), (60, 1, 20, 5)),
    ],
)
def test_subjects_lie_as_their_list_says(layout, weight, grad):
    shape_list = shapes.ShapeList("one", "one", ((2, 5, 3, 4),), layout)
    (param,) = subjects.make(shape_list, torch.float32)
    assert param.shape == (2, 5, 3, 4)
    assert param.stride() == weight
    assert param.grad.stride() == grad
    (other,) = subjects.make(shapes.ShapeList("one", "one", ((2, 5, 3, 4),)), torch.float32)
    torch.testing.assert_close(param, other, rtol=0, atol=0)
    torch.testing.assert_close(param.grad, other.grad, rtol=0, atol=0)


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
    by_threads = row | {
        "purpose": "threads",
        "results": {"fused": {"ms": 1}, "torch_fused": {"ms": 9}},
    }
    huge = skipped | {"title": "huge", "shapes": "huge", "skipped": "no memory"}
    results["rows"] = [row, by_threads, huge]
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
