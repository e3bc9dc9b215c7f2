"""The two ways to bind a plan: tensors read directly, and the operator."""

import pytest
import torch

from cases import CASES, DTYPES
from fusedstep import _ops
from stepping import (
    as_parameters,
    assert_same_contents,
    contents,
    make_weights,
    train,
)

SHAPES = ((33, 31), (7,), (20_000,), (), (0, 3), (2, 1, 3, 1, 2, 4))

needs_binding = pytest.mark.skipif(_ops.bind_lists is None, reason="built without Python's headers")


@pytest.fixture
def calls(monkeypatch):
    """What the direct way has answered."""
    answers = []

    def bind_lists(plan, weights, grads, direct=_ops.bind_lists):
        answers.append(direct(plan, weights, grads))
        return answers[-1]

    monkeypatch.setattr(_ops, "bind_lists", bind_lists)
    return answers


@needs_binding
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_ways_give_the_same_bits(case, dtype, calls, monkeypatch):
    def run():
        params = as_parameters(make_weights(SHAPES, dtype))
        params[0].data = params[0].data.t().contiguous().t()
        optimizer = case.build(params)
        train(optimizer, params, [1, 2, 3])
        return contents(optimizer)

    directly = run()
    assert calls == [True] * 3
    monkeypatch.setattr(_ops, "bind_lists", None)
    assert_same_contents(run(), directly)


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
    states = torch.ops.fusedstep.new_states([weight], 1)
    plan = torch.ops.fusedstep.plan_new([weight], states, [torch.zeros(())])
    texts = []
    for bind in (_ops.bind_lists, torch.ops.fusedstep.plan_bind):
        try:
            texts.append(bind(plan, [weight], [gradient()]))
        except (RuntimeError, NotImplementedError) as error:
            texts.append(str(error))
    torch.ops.fusedstep.plan_delete(plan)
    # What only the operator has words for is left to it.
    assert texts[0] is False or texts[0] == texts[1]
    assert isinstance(texts[1], str)


@needs_binding
@pytest.mark.parametrize("arguments", [(), (1, [], ()), ("plan", [], []), (1, None, [])], ids=str)
def test_other_arguments_are_refused(arguments):
    with pytest.raises(TypeError):
        _ops.bind_lists(*arguments)


@needs_binding
def test_what_is_no_tensor_is_left_to_the_operator():
    assert _ops.bind_lists(1, [1.0], [2.0]) is False
