"""The benchmark measures what it says: shapes, rows, implementations, checks before timing."""

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
import implementations
import kernels
import machine
import rows
import shapes
import subjects
import worker
from benchmark import BENCH, LIBRARIES, needs_kernels
from cases import CASES, PLAIN
from devices import Cpu
from implementations import Implementation, Stepper
from rows import BFLOAT16, FLOAT32, MIXED, Purpose, Row
from suites import SUITES

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


# ---- Rows and implementations --------------------------------------------------------------------

CASES_BY_NAME = {case.name: case for case in PLAIN}


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
    case = dataclasses.replace(CASES_BY_NAME["adam"], name="new", namesake=namesake)
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
        (Row(CASES_BY_NAME["adamw"], NAMED["matrix"]), 28),
        (Row(CASES_BY_NAME["adamw"], NAMED["matrix"], BFLOAT16), 14),
        (Row(CASES_BY_NAME["adamw"], NAMED["matrix"], MIXED), 22),
        (Row(CASES_BY_NAME["adam"], NAMED["sliced"]), 36),
        (Row(CASES_BY_NAME["adam"], NAMED["transposed"]), 28),
        (Row(CASES_BY_NAME["adagrad"], NAMED["matrix"]), 20),
    ],
    ids=str,
)
def test_bytes_of_a_row(row, bytes_per_element):
    assert row.bytes == bytes_per_element * row.shape_list.elements
    assert row.streams.two_phase == (not row.case.elementwise)


def test_row_of_a_layout_knows_the_contiguous_one():
    sliced = Row(CASES_BY_NAME["adam"], NAMED["sliced"])
    assert sliced.contiguous.shape_list.shapes == sliced.shape_list.shapes
    assert sliced.contiguous.streams == Row(CASES_BY_NAME["adam"], NAMED["contiguous"]).streams
    assert Row(CASES_BY_NAME["adam"], NAMED["resnet50"]).contiguous is None


def test_titles_and_names_tell_rows_apart():
    row = Row(CASES_BY_NAME["adam"], NAMED["gpt2"], MIXED, threads=4)
    assert (str(row), row.title) == (
        "adam/gpt2/mixed/4-threads",
        "GPT-2 124 M, bf16, fp32 states, 4 threads",
    )
    sparse = Row(CASES_BY_NAME["adagrad"], shapes.EMBEDDING, gradient="each-row-twice")
    assert (str(sparse), sparse.title) == ("adagrad/embedding/each-row-twice", "each row twice")


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


def test_where_an_update_jumps_a_few_elements_may_go_the_other_way():
    """Takes steps along the sign of the gradient, and turns one or many elements."""

    def sign(weight, grad, state, step, lr):
        return weight - lr * grad.sign(), state

    case = dataclasses.replace(PLAIN[0], reference=sign, options={"lr": 0.1}, elementwise=True)
    shape_list = shapes.ShapeList("some", "some", ((40, 30),))

    def verdict(case, turned, by=1.0):
        (param,) = params = subjects.make(shape_list, torch.float32)
        steps = []

        def step():
            signs = param.grad.sign()
            if not steps:
                signs.view(-1)[:turned] *= -by
            steps.append(param.data.sub_(0.1 * signs))

        check = subjects.Check(case, shape_list, torch.float32)
        return check(types.SimpleNamespace(step=step), params)

    jumps = dataclasses.replace(case, continuous=False)
    assert verdict(case, 0) is None
    assert "off" in verdict(case, 1)
    assert verdict(jumps, 3) is None
    assert "off" in verdict(jumps, 4)
    assert "off" in verdict(jumps, 1, by=9.0)


@pytest.mark.parametrize(("turns", "seconds"), [(5, math.inf), (2500, 0.0)])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_many_steps_leave_no_denormal_numbers(case, turns, seconds):
    params = subjects.make(SOME, torch.float32)
    optimizer = case.build(params)
    gradients = subjects.Gradients(params)
    timer = Cpu(None).timer(optimizer.step, gradients.before)
    contestant = worker.Contestant(timer, gradients.renew)
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


# ---- Clipped and sparse gradients ----------------------------------------------------------------

SEVERAL = ((40, 30), (7, 6), (64, 3, 3, 3))


def stepped(implementation, row):
    """The check's verdict on an implementation."""
    params = subjects.make(row.shape_list, row.precision.weight)
    formula = implementation.formula_of(row)
    options = (implementation.slack, implementation.max_norm)
    check = subjects.Check(formula, row.shape_list, row.precision.weight, *options)
    return check(implementation.build(row, params), params)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "channels-last"])
@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16, MIXED], ids=lambda p: p.name)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_ours_is_right_in_every_precision_and_layout(case, precision, layout):
    row = Row(case, shapes.ShapeList("some", "some", SEVERAL, layout), precision)
    assert stepped(implementations.FUSED, row) is None
    assert stepped(implementations.UNFUSED, row) is None


def test_check_knows_the_formula_of_a_peer():
    """LAMB without correction for bias is right by its own formula, and wrong by the row's."""
    row = Row(CASES_BY_NAME["lamb"], shapes.ShapeList("some", "some", SEVERAL))
    formula = rows.NAMED["lamb-cybertron"]

    def build(row, params):
        return Stepper(formula.build(params, fused=False))

    def implementation(formula):
        return Implementation("x", "x", build, formula=formula)

    assert stepped(implementation("lamb-cybertron"), row) is None
    assert "off" in stepped(implementation(None), row)


def test_slack_does_not_let_a_step_through_that_does_nothing():
    row = Row(CASES_BY_NAME["adamw"], shapes.ShapeList("some", "some", SEVERAL))
    idle = Implementation(
        "idle", "idle", lambda *_: types.SimpleNamespace(step=lambda: None),
        slack=implementations.EIGHT_BITS,
    )  # fmt: skip
    assert "off" in stepped(idle, row)


def test_learning_rate_of_a_tensor_is_set():
    params = subjects.make(shapes.ShapeList("some", "some", SEVERAL), torch.float32)
    optimizer = torch.optim.Adam(params, lr=torch.tensor(0.5), capturable=False, foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    Stepper(optimizer).set_lr(0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25


@pytest.mark.parametrize("implementation", implementations.CLIPPING, ids=lambda i: i.name)
@pytest.mark.parametrize("name", ["adam", "adagrad", "lamb"])
def test_clipped_steps_are_checked_by_the_norm_of_all_gradients(name, implementation):
    row = Row(CASES_BY_NAME[name], shapes.ShapeList("some", "some", SEVERAL))
    if not implementation.exists(row):
        pytest.skip("torch has none")
    assert stepped(implementation, row) is None


def test_a_step_that_clips_to_another_norm_is_wrong():
    """Takes a step that depends on the scale of gradients; Adam's and LAMB's hardly do."""
    row = Row(CASES_BY_NAME["lamb"], shapes.ShapeList("some", "some", SEVERAL))
    one_call = next(i for i in implementations.CLIPPING if i.name == "fused")
    scaled = dataclasses.replace(row.case, reference=lambda w, g, s, step, **_: (w - g, s))
    plain = Implementation(
        "plain", "plain", lambda _, p: Stepper(torch.optim.SGD(p, lr=1.0)),
        max_norm=one_call.max_norm,
    )  # fmt: skip

    def clips(factor):
        def build(row, params):
            stepper = plain.build(row, params)
            step = stepper.step

            def clipped():
                torch.nn.utils.clip_grad_norm_(params, factor * subjects.MAX_NORM)
                step()

            stepper.step = clipped
            return stepper

        return dataclasses.replace(plain, build=build)

    row = dataclasses.replace(row, case=scaled)
    assert stepped(clips(1), row) is None
    assert "off" in stepped(clips(1.01), row)
    assert "off" in stepped(plain, row)


def test_gradients_that_a_step_uses_up_are_restored():
    params = subjects.make(SOME, torch.float32)
    gradients = subjects.Restored(params)
    first = [param.grad.clone() for param in params]
    for param in params:
        param.grad.zero_()
    gradients.before()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, first, strict=True))
    gradients.renew()
    for param in params:
        param.grad.zero_()
    gradients.before()
    assert not any(torch.equal(p.grad, g) for p, g in zip(params, first, strict=True))
    assert all(param.grad.any() for param in params)


TABLE = shapes.ShapeList("embedding", "a table", ((40_000, 8),))


class TableOfFbgemm(torch.nn.Module):
    """Stands for FBGEMM's, which is not installed for tests: it steps in its backward pass."""

    def __init__(self, tables, optimizer, learning_rate, eps):
        super().__init__()
        ((count, columns, place, device),) = tables
        assert (place, device) == ("host", "cpu")
        self.bag = torch.nn.EmbeddingBag(
            count, columns, mode="sum", sparse=True, include_last_offset=True
        )
        self.optimizer = optimizer(self.bag.parameters(), lr=learning_rate, eps=eps)
        self.bag.weight.register_post_accumulate_grad_hook(
            lambda _: self.optimizer.step(zero_grad="none")
        )

    def forward(self, items, begins):
        return self.bag(items, begins)

    def split_embedding_weights(self):
        return [self.bag.weight]

    def set_learning_rate(self, lr):
        self.optimizer.param_groups[0]["lr"] = lr


@pytest.fixture
def fbgemm(monkeypatch):
    of_training = types.SimpleNamespace(
        EmbeddingLocation=types.SimpleNamespace(HOST="host"),
        ComputeDevice=types.SimpleNamespace(CPU="cpu"),
        OptimType={
            "EXACT_ADAGRAD": fusedstep.optim.Adagrad,
            "EXACT_ROWWISE_ADAGRAD": fusedstep.optim.RowWiseAdagrad,
        },
        SplitTableBatchedEmbeddingBagsCodegen=TableOfFbgemm,
    )
    name = "fbgemm_gpu.split_table_batched_embeddings_ops_training"
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", types.ModuleType("fbgemm_gpu"))
    monkeypatch.setitem(sys.modules, name, of_training)


TABLES = {each.name: each for each in SUITES["embedding", "cpu"].implementations}


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize(
    ("row", "implementation"),
    [
        pytest.param(row, each, id=f"{row}-{name}")
        for row in (dataclasses.replace(row, shape_list=TABLE) for row in rows.embedding())
        for name, each in TABLES.items()
        if each.exists(row)
    ],
)
def test_sparse_steps_are_checked_by_the_rows_that_they_touch(row, implementation):
    check = subjects.SparseCheck(row)

    def verdict(change=lambda table: None):
        params = subjects.make(TABLE, torch.float32)
        params[0].grad = None
        stepper = implementation.build(row, params)
        step = stepper.step
        stepper.step = lambda: (step(), change(params[0].data))
        return check(stepper, params)

    assert verdict() is None
    assert "off" in verdict(lambda table: table[check._touched[0]].mul_(1.01))
    untouched = torch.ones(TABLE.elements // 8).index_fill(0, check._touched, 0).argmax()
    told = verdict(lambda table: table[untouched].add_(1))
    assert told == "1 rows without a gradient have moved"


def test_fbgemm_is_beside_others_where_the_backward_pass_is_timed():
    beside = {str(row) for row in rows.embedding() if TABLES["fbgemm"].exists(row)}
    assert beside == {f"{name}/embedding/{rows.BAGS}" for name in ("adagrad", "rowwise_adagrad")}
    assert "fbgemm" not in {each.name for each in SUITES["embedding", "cuda"].implementations}


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("name", ["fused", "fbgemm"])
def test_a_step_over_bags_is_the_backward_pass_too(name):
    """Bags are looked up before it, and their gradients are those of the batch's entries."""
    row = Row(CASES_BY_NAME["adagrad"], TABLE, gradient=rows.BAGS)
    params = subjects.make(TABLE, torch.float32)
    params[0].grad = None
    stepper = TABLES[name].build(row, params)
    before = params[0].detach().clone()
    gradients = worker.gradients_of(TABLES[name], row, params, stepper)
    gradients.before()
    assert torch.equal(params[0], before)
    stepper.step()
    batch = subjects.batch(rows.BAGS, 0, TABLE.shapes[0])
    moved = (params[0] != before).any(dim=1).nonzero()[:, 0]
    assert torch.equal(moved, batch._indices()[0].unique())
    stepper.set_lr(0.0)
    before = params[0].detach().clone()
    gradients.before()
    stepper.step()
    assert torch.equal(params[0], before)


def test_bags_of_a_batch():
    batch = subjects.batch(rows.BAGS, 3, (6000, 8))
    items, begins, grad = subjects.bags_of(batch)
    assert (len(begins), len(items)) == (subjects.TOUCHED, subjects.TOUCHED * subjects.ITEMS)
    table = torch.zeros(6000, 8, requires_grad=True)
    looked_up = torch.nn.functional.embedding_bag(items, table, begins, mode="sum", sparse=True)
    looked_up.backward(grad)
    torch.testing.assert_close(table.grad.to_dense(), batch.to_dense())


def test_a_batch_touches_its_rows_as_often_as_it_says():
    once, twice, coalesced = (
        subjects.batch(name, 3, (6000, 8))
        for name in ("each-row-once", "each-row-twice", "coalesced")
    )
    assert once._nnz() == coalesced._nnz() == subjects.TOUCHED
    assert twice._nnz() == 2 * subjects.TOUCHED
    assert coalesced.is_coalesced()
    assert not once.is_coalesced()
    assert len(twice._indices()[0].unique()) == subjects.TOUCHED
    torch.testing.assert_close(coalesced.to_dense(), once.to_dense())


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
