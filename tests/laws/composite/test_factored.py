"""Laws that Adafactor and CAME share: memory, checkpoints and errors."""

import copy

import pytest
import torch

from fusedstep import optim
from fusedstep.memory.plan import Choice, state_bytes
from support.factored import CASES, IDS, assert_same, stepped
from support.stepping import make_gradients, make_weights

#: Matrices, stacks of matrices, vectors and a number.
SHAPES = ((7, 5), (300, 210), (3, 40), (4, 5, 6, 7), (2, 33, 18), (700,), (1, 9), (9, 1), ())

EACH_CASE = pytest.mark.parametrize(("optimizer_class", "options"), CASES, ids=IDS)
EACH_CLASS = pytest.mark.parametrize("optimizer_class", [optim.Adafactor, optim.CAME])

DAMAGES = {
    "missing": (lambda state, row: state.pop(row), "has no {row}"),
    "shape": (lambda state, row: state.update({row: torch.ones(4, 2)}), "{row} .* has the shape"),
    "count": (lambda state, row: state.update(step="one"), "step"),
}


@EACH_CASE
def test_resumes_with_the_same_bits(optimizer_class, options, tmp_path):
    whole, halves = (make_weights(SHAPES, torch.float32) for _ in range(2))
    expected = stepped(optimizer_class(whole, **options), whole, 4)
    half = stepped(optimizer_class(halves, **options), halves, 2)
    torch.save(half.state_dict(), tmp_path / "saved.pt")
    optimizer = optimizer_class(halves)
    optimizer.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))
    stepped(optimizer, halves, 2, begin=2)
    assert_same((halves, optimizer), (whole, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@EACH_CASE
def test_memory_is_told_before(optimizer_class, options, dtype):
    """`python -m fusedstep memory` asks the class on the meta device."""
    weights = make_weights(SHAPES, dtype)
    optimizer = stepped(optimizer_class(weights, **options), weights, 1)
    made = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    choice = Choice(optimizer_class.__name__, dict(options), "default")
    assert state_bytes(tuple(map(torch.Size, SHAPES)), dtype, choice) == (made, 0)


@EACH_CLASS
def test_a_nan_damages_its_weight_only(optimizer_class):
    shapes = [(9, 17), (9, 17)]
    weights, others = (make_weights(shapes, torch.float32) for _ in range(2))
    grads = make_gradients(shapes, torch.float32, 0)
    stepped(optimizer_class(others), others, 1, [grad.clone() for grad in grads])
    grads[0][3, 4] = torch.nan
    stepped(optimizer_class(weights), weights, 1, grads)
    assert weights[0].isnan().all()
    assert torch.equal(weights[1], others[1])


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("optimizer_class", "row"),
    [(optim.Adafactor, "row_var"), (optim.CAME, "exp_avg_sq_row"), (optim.CAME, "exp_avg_res_row")],
)
def test_refuses_damaged_checkpoints(optimizer_class, row, damage):
    weight = torch.randn(4, 6)
    optimizer = stepped(optimizer_class([weight]), [weight], 1)
    dictionary = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(dictionary["state"][0])
    change, text = DAMAGES[damage]
    change(dictionary["state"][0], row)
    with pytest.raises(ValueError, match=text.format(row=row)):
        optimizer.load_state_dict(dictionary)
    assert all(torch.equal(optimizer.state[weight][k], v) for k, v in before.items())


@pytest.mark.parametrize("fused", [True, False])
@EACH_CLASS
def test_nothing_has_changed_after_an_error(optimizer_class, fused):
    weights = make_weights([(4, 6), (5,)], torch.float32)
    optimizer = stepped(optimizer_class(weights, fused=fused), weights, 1)
    before = copy.deepcopy((weights, optimizer.state_dict()))
    weights[0].grad, weights[1].grad = torch.ones(4, 6), torch.ones(5).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    for weight, value in zip(weights, before[0], strict=True):
        assert torch.equal(weight, value)
    for key, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, before[1]["state"][key][name])
