"""The two ways to look at a step's tensors: directly, and through operators and Python."""

import sys
from types import SimpleNamespace

import pytest
import torch

from fusedstep._native import ops
from fusedstep._step.plan import Snapshot, same
from support.cases import DTYPES, KINDS, PLAIN
from support.stepping import (
    CHUNK,
    as_parameters,
    assert_same_contents,
    contents,
    make_weights,
    train,
)

SHAPES = ((33, 31), (7,), (2 * CHUNK + 5,), (), (0, 3), (2, 1, 3, 1, 2, 4))

needs_binding = pytest.mark.skipif(ops.bind is None, reason="built without Python's headers")


@pytest.fixture
def calls(monkeypatch):
    """Answers of the binding, asked to bind or to repeat a step."""
    answers = []

    def noting(function):
        def call(*arguments):
            answers.append(function(*arguments))
            return answers[-1]

        return call

    noted = {name: noting(getattr(ops.bind, name)) for name in ("plan_bind", "repeat")}
    monkeypatch.setattr(ops, "bind", SimpleNamespace(**vars(ops.bind) | noted))
    return answers


@needs_binding
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_both_ways_give_the_same_bits(case, dtype, calls, monkeypatch):
    def run():
        params = as_parameters(make_weights(SHAPES, dtype))
        params[0].data = params[0].data.t().contiguous().t()
        optimizer = case.build(params)
        train(optimizer, params, [1, 2, 3])
        return optimizer

    directly = run()
    assert len(calls) >= 3
    assert all(calls)
    monkeypatch.setattr(ops, "bind", None)
    assert_same_contents(contents(run()), contents(directly))


def wrong_shape():
    return torch.ones(5, 4)


def wrong_dtype():
    return torch.ones(4, 5, dtype=torch.int64)


def wrong_device():
    return torch.ones(4, 5, device="meta")


def sparse():
    return torch.ones(4, 5).to_sparse()


@needs_binding
@pytest.mark.parametrize("gradient", [wrong_shape, wrong_dtype, wrong_device, sparse])
def test_errors_are_the_same(gradient, monkeypatch):
    weight = torch.ones(4, 5)
    states = torch.ops.fusedstep.new_states([weight], ["weight"])
    plan = torch.ops.fusedstep.plan_new([weight], states, [torch.zeros(())])
    texts = []
    for bind in (ops.bind.plan_bind, torch.ops.fusedstep.plan_bind):
        try:
            texts.append(bind(plan, [weight], [gradient()]))
        except (RuntimeError, NotImplementedError) as error:
            texts.append(str(error))
    torch.ops.fusedstep.plan_delete(plan)
    # The binding answers False where only the operator has a text for the error.
    assert texts[0] is False or texts[0] == texts[1]
    assert isinstance(texts[1], str)


@needs_binding
@pytest.mark.parametrize("arguments", [(), (1, [], ()), ("plan", [], []), (1, None, [])], ids=str)
def test_other_arguments_are_refused(arguments):
    with pytest.raises(TypeError):
        ops.bind.plan_bind(*arguments)


@needs_binding
def test_what_is_no_tensor_is_left_to_the_operator():
    weight = torch.ones(4)
    states = torch.ops.fusedstep.new_states([weight], ["weight"])
    plan = torch.ops.fusedstep.plan_new([weight], states, [torch.zeros(())])
    assert ops.bind.plan_bind(plan, [1.0], [2.0]) is False
    assert ops.bind.plan_bind(plan, [weight], [torch.ones(4)]) is True
    assert ops.bind.plan_bind(plan, [weight], [2.0]) is False
    assert ops.bind.plan_bind(plan, [1.0], [torch.ones(4)]) is False
    torch.ops.fusedstep.plan_delete(plan)


#: The number of Adam's options, and of whether it maximizes.
COUNT = len(ops.rule_options["adam"]) + 1


@needs_binding
@pytest.mark.parametrize(
    ("optimizer", "plan", "options", "text"),
    [
        ("no_such", 1, (), 'there is no rule "no_such"'),
        ("adam", -1, (0.0,) * COUNT, "plan -1 does not exist"),
        ("adam", -1, (0.0,) * (COUNT - 1), "an option is missing"),
        ("adam", -1, (0.0,) * (COUNT + 1), "one too many"),
        ("adam", -1, (0.0,) * 33, "too many options"),
    ],
)
def test_a_step_that_cannot_be_is_refused(optimizer, plan, options, text):
    with pytest.raises(RuntimeError, match=text):
        ops.bind.prepare(optimizer, plan, options, 1.0, 0)


@needs_binding
@pytest.mark.parametrize("options", [("one",) * COUNT, [0.0] * COUNT])
def test_a_step_takes_a_tuple_of_numbers(options):
    with pytest.raises(TypeError):
        ops.bind.prepare("adam", 1, options, 1.0, 0)


EITHER = pytest.mark.parametrize("directly", [pytest.param(True, marks=needs_binding), False])


@EITHER
def test_lists_of_the_same_objects(directly, monkeypatch):
    if not directly:
        monkeypatch.setattr(ops, "bind", None)
    first, second = [1.5], [1.5]
    assert same([], [])
    assert same([first, second], [first, second])
    assert not same([first, second], [first, first])
    assert not same([first], [first, second])
    assert not same([first, second], [first])


def replace_value(state):
    state["b"]["x"] = [3]


def add_value(state):
    state["b"]["z"] = [3]


def drop_value(state):
    del state["b"]["y"]


def swap_values(state):
    of_b = state["b"]
    of_b["x"], of_b["y"] = of_b["y"], of_b["x"]


def drop_tensor(state):
    del state["b"]


def add_tensor(state):
    state["c"] = {"x": [3]}


def clear(state):
    state.clear()


@EITHER
@pytest.mark.parametrize(
    "change",
    [replace_value, add_value, drop_value, swap_values, drop_tensor, add_tensor, clear],
)
def test_a_snapshot_is_of_one_state(change, directly, monkeypatch):
    if not directly:
        monkeypatch.setattr(ops, "bind", None)
    state = {"a": {"x": [1]}, "b": {"x": [1], "y": [2]}}
    snapshot = Snapshot(state)
    assert snapshot.is_of(state)
    change(state)
    assert not snapshot.is_of(state)


@needs_binding
def test_no_line_of_python_runs_when_a_plan_is_freed():
    """In one a signal's handler would run, whose exception nobody gets."""
    params = as_parameters(make_weights(((4,),), torch.float32))
    optimizer = PLAIN[0].build(params)
    train(optimizer, params, [1])
    handle = optimizer._plans[0, 0].handle
    lines = []
    optimizer._last_step = None
    sys.setprofile(lambda frame, event, _: lines.append(f"{event} {frame.f_code.co_name}"))
    try:
        del optimizer._plans[0, 0]
    finally:
        sys.setprofile(None)
    assert [line for line in lines if line.startswith("call")] == []
    with pytest.raises(RuntimeError, match=f"plan {handle} does not exist"):
        torch.ops.fusedstep.plan_isa(handle)
