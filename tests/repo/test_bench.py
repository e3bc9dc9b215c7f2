"""The benchmark measures what it says: shapes, rows, implementations, kernels, the machine."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import types

import pytest
import torch

import fusedstep
from harness import machine
from suites import implementations, kernels, rows, shapes
from suites.rows import BFLOAT16, MIXED, Purpose, Row
from suites.suite import SUITES
from support.benchmark import BENCH, LIBRARIES, needs_kernels
from support.cases import PLAIN

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
    subprocess.run([sys.executable, BENCH / "suites" / "shapes.py", header], check=True)
    text = header.read_text()
    arrays = {
        name: [int(count) for count in counts.split(", ")]
        for name, counts in re.findall(r"int64_t (\w+)\[\] = \{([\d, ]+)\};", text)
    }
    lists = dict(re.findall(r'\{"([\w-]+)", (\w+)\}', text))
    assert lists.keys() == {s.name for s in shapes.ALL if s.layout == "contiguous"}
    for name, array in lists.items():
        assert arrays[array] == [math.prod(shape) for shape in NAMED[name].shapes]


# ---- Rows and implementations --------------------------------------------------------------------


def rows_of(name, device="cpu", suite="peers", threads=16):
    """The rows that an implementation of a suite is timed on."""
    found = {each.name: each for each in SUITES[suite, device].implementations}
    return {str(r) for r in rows.beside_peers(device, threads) if found[name].exists(r)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_have_names_of_their_own_and_the_largest_come_last(device):
    found = list(rows.beside_peers(device, 16))
    assert len({str(row) for row in found}) == len(found)
    sizes = [row.shape_list.elements for row in found]
    count = len(rows.PLAIN)
    assert sizes[-count:] == [774_030_080] * count
    assert max(sizes[:-count]) < 774_030_080


@pytest.mark.parametrize("suite", ["steps", "peers"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_optimizer_is_stepped_on_every_model(suite, device):
    """An optimizer needs no more than its row in the case table."""
    arguments = (device, 16) if suite == "peers" else (device,)
    found = {str(row) for row in SUITES[suite, device].rows(*arguments)}
    for case in PLAIN:
        if case.name != "adamw":
            assert {f"{case}/{shape_list}" for shape_list in shapes.MODELS} <= found


@pytest.mark.parametrize(
    ("threads", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])]
)
def test_scaling_goes_up_to_what_the_machine_has(threads, counts):
    scaling = [r for r in rows.beside_peers("cpu", threads) if r.purpose == Purpose.THREADS]
    assert [row.threads for row in scaling] == counts
    assert not [r for r in rows.beside_peers("cuda", threads) if r.purpose == Purpose.THREADS]


@pytest.mark.parametrize(
    ("device", "name", "has", "lacks"),
    [
        ("cpu", "fused", {"adam/gpt2", "lamb/sliced", "adam/64x5000", "lamb/64M"}, set()),
        ("cpu", "unfused", {"lamb/matrix", "adamw/gpt2/mixed", "adam/1M"}, {"adam/64x1"}),
        ("cpu", "for_loop", {"adam/gpt2-large"}, {"lamb/matrix", "adam/gpt2/4-threads"}),
        ("cpu", "torch_fused", {"adam/64x2000", "adam/gpt2/8-threads", "adamw/gpt2/bfloat16"},
         {"adamw/gpt2/mixed", "lamb/gpt2"}),
        ("cpu", "compiled", {"adam/resnet50"}, {"adam/small", "lamb/matrix"}),
        ("cpu", "deepspeed", {"adagrad/gpt2", "adamw/gpt2/mixed", "adam/gpt2/2-threads"},
         {"lamb/gpt2"}),
        ("cpu", "timm", {"lamb/gpt2-large"}, {"adam/gpt2", "lamb/1M"}),
        ("cpu", "pytorch_optimizer", {"lamb/transposed"}, {"adam/gpt2"}),
        ("cpu", "torchao_8bit", {"adamw/matrix"}, {"adamw/matrix/mixed", "adam/matrix"}),
        ("cpu", "bitsandbytes", {"adamw/matrix", "adamw/gpt2/mixed"}, {"adamw/gpt2/bfloat16"}),
        ("cuda", "fused", {"adam/gpt2", "lamb/gpt2-large", "adamw/gpt2/mixed"}, set()),
        ("cuda", "graph", {"adam/small", "lamb/small"}, {"adagrad/small"}),
        ("cuda", "torch_fused", {"adagrad/gpt2", "adamw/gpt2/bfloat16"},
         {"lamb/gpt2", "adamw/gpt2/mixed"}),
        ("cuda", "torch_graph", {"adam/gpt2"}, {"adagrad/gpt2"}),
        ("cuda", "compiled", {"adam/matrix", "adagrad/resnet50"}, {"adam/small", "lamb/matrix"}),
        ("cuda", "apex", {"lamb/small", "adagrad/gpt2", "adamw/gpt2/mixed"},
         {"adamw/gpt2/bfloat16", "adan/gpt2"}),
        ("cuda", "deepspeed", {"adam/gpt2", "adamw/gpt2/bfloat16"}, {"lamb/gpt2", "adagrad/gpt2"}),
        ("cuda", "deepspeed_lamb", {"lamb/gpt2"}, {"adam/gpt2"}),
        ("cuda", "timm", {"lamb/resnet50"}, {"adam/resnet50"}),
    ],
)  # fmt: skip
def test_implementation_has_the_rows_that_it_can_step(device, name, has, lacks):
    found = rows_of(name, device)
    assert has <= found
    assert not lacks & found


@pytest.mark.parametrize(
    ("namesake", "foreach", "fused", "graph"),
    [
        (torch.optim.SGD, True, True, False),
        (torch.optim.RMSprop, True, False, False),
        (torch.optim.NAdam, True, False, False),
        (torch.optim.AdamW, True, True, True),
        (torch.optim.LBFGS, False, False, False),
    ],
)
def test_torchs_implementations_follow_from_the_namesake(namesake, foreach, fused, graph):
    """An optimizer that torch has needs no line in the benchmark."""
    case = dataclasses.replace(rows.NAMED["adam"], name="new", namesake=namesake)
    row = Row(case, NAMED["matrix"])
    assert implementations.FOR_LOOP.exists(row)
    assert implementations.FOREACH.exists(row) == foreach
    assert implementations.TORCH_FUSED.exists(row) == fused
    assert implementations.TORCH_GRAPH.exists(row) == graph
    assert not implementations.FOR_LOOP.exists(dataclasses.replace(row, precision=MIXED))


@pytest.mark.parametrize(("suite", "device"), SUITES)
def test_every_implementation_is_in_one_process(suite, device):
    found = SUITES[suite, device]
    names = [name for process in found.processes for name in process.names]
    assert sorted(names) == sorted(each.name for each in found.implementations)
    assert found.implementations[-1].name in ("fused", "graph", "authors_multi")


@pytest.mark.parametrize(
    ("row", "bytes_per_element"),
    [
        (Row(rows.NAMED["adamw"], NAMED["matrix"]), 28),
        (Row(rows.NAMED["adamw"], NAMED["matrix"], BFLOAT16), 14),
        (Row(rows.NAMED["adamw"], NAMED["matrix"], MIXED), 22),
        (Row(rows.NAMED["adam"], NAMED["sliced"]), 36),
        (Row(rows.NAMED["adam"], NAMED["transposed"]), 28),
        (Row(rows.NAMED["adagrad"], NAMED["matrix"]), 20),
    ],
    ids=str,
)
def test_bytes_of_a_row(row, bytes_per_element):
    assert row.bytes == bytes_per_element * row.shape_list.elements
    assert row.streams.two_phase == (not row.case.elementwise)


def test_row_of_a_layout_knows_the_contiguous_one():
    sliced = Row(rows.NAMED["adam"], NAMED["sliced"])
    assert sliced.contiguous.shape_list.shapes == sliced.shape_list.shapes
    assert sliced.contiguous.streams == Row(rows.NAMED["adam"], NAMED["contiguous"]).streams
    assert Row(rows.NAMED["adam"], NAMED["resnet50"]).contiguous is None


def test_titles_and_names_tell_rows_apart():
    row = Row(rows.NAMED["adam"], NAMED["gpt2"], MIXED, threads=4)
    assert (str(row), row.title) == (
        "adam/gpt2/mixed/4-threads",
        "GPT-2 124 M, bf16, fp32 states, 4 threads",
    )
    sparse = Row(rows.NAMED["adagrad"], shapes.EMBEDDING, gradient="each-row-twice")
    assert (str(sparse), sparse.title) == ("adagrad/embedding/each-row-twice", "each row twice")


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


@pytest.mark.parametrize(
    ("facts", "slug"),
    [
        (("AMD EPYC", "AuthenticAMD", 25, 17, 2), "amd-zen4-2-cores"),
        (("AMD EPYC", "AuthenticAMD", 25, 1, 8), "amd-zen3-8-cores"),
        (("AMD EPYC", "AuthenticAMD", 26, 2, 2), "amd-zen5-2-cores"),
        (("Intel(R) Xeon(R) Processor", "GenuineIntel", 6, 207, 16),
         "intel-emerald-rapids-16-cores"),
        (("Intel(R) Xeon(R) Gold 9 CPU @ 2.1GHz", "GenuineIntel", 6, 250, 4),
         "intel-xeon-gold-9-6-250-4-cores"),
    ],
)  # fmt: skip
def test_folders_are_named_by_what_the_machine_is(facts, slug):
    cpu, vendor, family, model, cores = facts
    found = machine.Machine(cpu, vendor, family, model, cores, [], {}, 8, "")
    assert found.slug == slug


def test_this_machine_is_told_by_its_first_processor(monkeypatch):
    info = "".join(
        f"processor : {i}\nvendor_id : GenuineIntel\ncpu family : 6\nmodel : {model}\n"
        f"model name : Some CPU\nflags : avx2 fma\n\n"
        for i, model in enumerate((143, 207))
    )
    monkeypatch.setattr(machine, "_read", lambda path: info if path == "/proc/cpuinfo" else "")
    found = machine.this_machine()
    assert (found.cpu, found.family, found.model) == ("Some CPU", 6, 143)
    assert found.flags == ["avx2", "fma"]
