"""The benchmark checks steps before it times them, with gradients of all kinds."""

import dataclasses
import math
import sys
import types

import pytest
import torch

import fusedstep
from suites import implementations, rows, shapes, subjects, worker
from suites.devices import Cpu
from suites.implementations import Implementation, Stepper
from suites.rows import BFLOAT16, FLOAT32, MIXED, Row
from suites.suite import SUITES
from support.cases import CASES, PLAIN

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
    row = Row(rows.NAMED["lamb"], shapes.ShapeList("some", "some", SEVERAL))
    formula = rows.NAMED["lamb-cybertron"]

    def build(row, params):
        return Stepper(formula.build(params, fused=False))

    def implementation(formula):
        return Implementation("x", "x", build, formula=formula)

    assert stepped(implementation("lamb-cybertron"), row) is None
    assert "off" in stepped(implementation(None), row)


def test_slack_does_not_let_a_step_through_that_does_nothing():
    row = Row(rows.NAMED["adamw"], shapes.ShapeList("some", "some", SEVERAL))
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
    row = Row(rows.NAMED[name], shapes.ShapeList("some", "some", SEVERAL))
    if not implementation.exists(row):
        pytest.skip("torch has none")
    assert stepped(implementation, row) is None


def test_a_step_that_clips_to_another_norm_is_wrong():
    """Takes a step that depends on the scale of gradients; Adam's and LAMB's hardly do."""
    row = Row(rows.NAMED["lamb"], shapes.ShapeList("some", "some", SEVERAL))
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
    row = Row(rows.NAMED["adagrad"], TABLE, gradient=rows.BAGS)
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
