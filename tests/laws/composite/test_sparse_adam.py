"""Laws of SparseAdam: its formula, bits, checkpoints and errors."""

import copy

import pytest
import torch

import fusedstep
from fusedstep import optim
from reference.sparse_adam import sparse_adam
from support.layouts import Layout
from support.stepping import ISAS, forced_isa, make_weights, threads

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

SHAPES = ((60, 20), (7, 5, 3), (9,), (50, 1))
OPTIONS = (
    {"lr": 1e-2},
    {"lr": 1e-2, "eps": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1, "maximize": True},
)


def gradients(shapes, dtype, step):
    """Sparse ones: rows in disorder, some of them several times, some never."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for shape in shapes:
        entries = 2 * shape[0] // 3 + 1
        rows = torch.randint(shape[0], (1, entries), generator=generator)
        values = torch.randn(entries, *shape[1:], generator=generator, dtype=torch.float64)
        found.append(torch.sparse_coo_tensor(rows, values.to(dtype), shape))
    return found


def steps_of(weights, steps=3, **options):
    optimizer = optim.SparseAdam(weights, **{"fused": True} | options)
    for step in range(steps):
        grads = gradients([weight.shape for weight in weights], weights[0].dtype, step)
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "all"])
def test_is_the_formula(options, dtype, fused):
    weights = make_weights(SHAPES, dtype)
    expected = [weight.double() for weight in weights]
    states = [{k: torch.zeros_like(w) for k in ("exp_avg", "exp_avg_sq")} for w in expected]
    for step in range(3):
        for i, grad in enumerate(gradients(SHAPES, dtype, step)):
            grad = grad.to(torch.float64).coalesce()
            rows = grad.indices()[0]
            expected[i] = sparse_adam(
                expected[i], rows, grad.values(), states[i], step + 1.0, **options
            )
    optimizer = steps_of(weights, fused=fused, **options)
    eps = torch.finfo(dtype).eps
    for weight, value, state in zip(weights, expected, states, strict=True):
        torch.testing.assert_close(weight.double(), value, rtol=8 * eps, atol=8 * eps)
        for name, moment in state.items():
            found = optimizer.state[weight][name].double()
            torch.testing.assert_close(found, moment, rtol=8 * eps, atol=8 * eps)
        assert optimizer.state[weight]["step"] == 3


def test_rows_without_entries_stand_still():
    (weight,) = make_weights([(50, 8)], torch.float32)
    before = weight.clone()
    optimizer = steps_of([weight], 1, lr=0.1, weight_decay=0.5)
    (grad,) = gradients([(50, 8)], torch.float32, 0)
    is_there = torch.zeros(50, dtype=torch.bool)
    is_there[grad._indices()[0]] = True
    assert torch.equal(weight[~is_there], before[~is_there])
    assert (weight[is_there] != before[is_there]).any(1).all()
    assert not optimizer.state[weight]["exp_avg"][~is_there].any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_same_bits_on_every_isa_and_number_of_threads(dtype, isa):
    shapes = ((3000, 40), (5, 4))
    expected, weights = make_weights(shapes, dtype), make_weights(shapes, dtype)
    with threads(1), forced_isa("base"):
        steps_of(expected, 2)
    with threads(5), forced_isa(isa):
        steps_of(weights, 2)
    assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize("strides", [(20, 1), (1, 60), (41, 2)], ids=str)
def test_same_bits_in_every_layout(strides):
    (values,) = make_weights([(60, 20)], torch.float32)
    placed = Layout("", (60, 20), strides, offset=3).place(values)
    steps_of([placed.view])
    steps_of([values])
    assert torch.equal(placed.view, values)
    placed.assert_outside_untouched("weight")


@pytest.mark.parametrize("maximize", [False, True])
def test_goes_on_from_torchs_and_torch_from_it(maximize, tmp_path):
    weights, others = (make_weights(SHAPES, torch.float32) for _ in range(2))
    options = {"lr": 0.05, "maximize": maximize}
    ours, theirs = optim.SparseAdam(weights, **options), torch.optim.SparseAdam(others, **options)
    for step in range(4):
        if step == 2:
            torch.save([theirs.state_dict(), ours.state_dict()], tmp_path / "saved.pt")
            saved = torch.load(tmp_path / "saved.pt", weights_only=True)
            ours = optim.SparseAdam(weights, fused=True)
            theirs = torch.optim.SparseAdam(others)
            ours.load_state_dict(saved[0])
            theirs.load_state_dict(saved[1])
        for weight, other, grad in zip(
            weights, others, gradients(SHAPES, torch.float32, step), strict=True
        ):
            weight.grad, other.grad = grad, grad.clone()
        ours.step()
        theirs.step()
    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)
    converted = fusedstep.convert(theirs)
    assert type(converted) is optim.SparseAdam
    assert converted.param_groups[0]["lr"] == 0.05


def test_weights_may_have_taken_other_numbers_of_steps():
    """The bias corrections are those of each weight's own count."""
    weights, alone = (make_weights([(8, 4), (8, 4)], torch.float32) for _ in range(2))
    optimizer = optim.SparseAdam(weights, lr=0.1, eps=0.1, fused=True)
    single = optim.SparseAdam([alone[1]], lr=0.1, eps=0.1, fused=True)
    for step in range(3):
        grads = gradients([(8, 4), (8, 4)], torch.float32, step)
        weights[0].grad = grads[0]
        weights[1].grad = alone[1].grad = grads[1] if step else None
        optimizer.step()
        single.step()
    assert torch.equal(weights[1], alone[1])
    assert len(optimizer._plans) == 1  # one native step takes both


@pytest.mark.parametrize("fused", [True, False])
def test_dense_gradients_are_refused_and_nothing_changes(fused):
    weights = make_weights([(4, 3), (5, 2)], torch.float32)
    optimizer = steps_of(weights, 1, fused=fused)
    before = copy.deepcopy((weights, optimizer.state_dict()["state"]))
    weights[0].grad, weights[1].grad = (
        gradients([(4, 3)], torch.float32, 1)[0],
        torch.ones(5, 2),
    )
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        optimizer.step()
    assert all(map(torch.equal, weights, before[0]))
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][key][name]) for name, value in state.items())


def test_unusual_weights_are_refused_by_name():
    with pytest.raises(ValueError, match="complex parameters: parameter 1 of group 0"):
        optim.SparseAdam([torch.ones(3), torch.ones(3, dtype=torch.complex64)])
    with pytest.raises(ValueError, match="weight_decay"):
        optim.SparseAdam([torch.ones(3)], weight_decay=-1)
