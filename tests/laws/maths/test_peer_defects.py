"""Errors of other fused optimizers, as tests of ours. Each says what the peer does."""

import pytest
import torch

from fusedstep import optim
from support.cases import PLAIN
from support.layouts import Layout
from support.stepping import (
    Reference,
    as_parameters,
    assert_same_bits,
    make_gradients,
    make_weights,
    run,
    threads,
)

SHAPE = (70, 130)


def stepped(case, layout, make_gradient):
    """A weight of the layout after two steps, where it lies, and its reference."""
    (value,) = make_weights([SHAPE], torch.float32)
    placed = layout.place(value)
    param = torch.nn.Parameter(placed.view)
    optimizer = case.build([param])
    reference = Reference(case, value)
    for _ in range(2):
        param.grad = make_gradient(param)
        reference.step(param.grad.clone())
        optimizer.step()
    reference.check(param, optimizer.state[param], layout.name)
    assert not torch.equal(param, value)
    return placed


def dense_gradient(param):
    return make_gradients([SHAPE], torch.float32, 1)[0]


def transposed_gradient(param):
    return dense_gradient(param).t().contiguous().t()


def expanded_gradient(param):
    return torch.tensor(0.5).expand(SHAPE)


CONTIGUOUS = Layout("contiguous", SHAPE, (130, 1))
STRIDED = Layout("every second column", SHAPE, (260, 2))
SLICED = Layout("sliced", SHAPE, (140, 1), offset=5)
TRANSPOSED = Layout("transposed", SHAPE, (1, 70))


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_strided_view_is_updated_within_its_bytes(case):
    """torch's fused Adam takes a strided view for a dense one and writes outside of it."""
    stepped(case, STRIDED, dense_gradient).assert_outside_untouched("weight")


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_gradient_with_other_strides_than_the_weight(case):
    """torch's fused optimizers pair elements by their place in memory, not by their index."""
    stepped(case, CONTIGUOUS, transposed_gradient)
    stepped(case, TRANSPOSED, dense_gradient)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_expanded_gradient(case):
    """torch's fused SGD reads beyond the end of an expanded gradient and crashes."""
    stepped(case, CONTIGUOUS, expanded_gradient)


@pytest.mark.parametrize("layout", [SLICED, TRANSPOSED], ids=str)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_sliced_and_transposed_weights_are_updated(case, layout):
    """DeepSpeed's CPU Adam updates a contiguous copy of such a weight and drops it."""
    stepped(case, layout, dense_gradient)


@pytest.mark.parametrize("size", range(1, 70))
def test_bf16_tail_is_as_exact_as_the_body(size):
    """IPEX's Adagrad computes the last elements of a bf16 weight in bf16: off by 7e-3."""
    case = next(case for case in PLAIN if case.optimizer is optim.Adagrad)
    (longest,) = make_weights([(256,)], torch.bfloat16)
    (gradient,) = make_gradients([(256,)], torch.bfloat16, 1)
    whole, part = as_parameters([longest, longest[:size]])
    whole.grad, part.grad = gradient.clone(), gradient[:size].clone()
    case.build([whole]).step()
    case.build([part]).step()
    assert_same_bits(part, whole[:size], "tail")


def test_lamb_does_not_depend_on_threads():
    """IPEX's LAMB adds its norms in an order that follows the number of threads."""
    case = next(case for case in PLAIN if case.optimizer is optim.Lamb)
    results = []
    for count in (1, 2):
        with threads(count):
            (param,), _ = run(case, [(1000, 999)], torch.float32, steps=3)
        results.append(param)
    assert_same_bits(*results, "weight")


def test_lamb_has_a_trust_ratio():
    """bitsandbytes' LAMB moves a weight by lr whatever its norm is."""
    case = next(case for case in PLAIN if case.optimizer is optim.Lamb)
    moves = []
    for scale in (1.0, 8.0):
        param = torch.nn.Parameter(torch.full((40, 50), scale))
        param.grad = torch.ones_like(param)
        case.build([param]).step()
        moves.append((scale - param).mean().item())
    # The update is all ones: the ratio of the norms is the value of the weight.
    assert moves == pytest.approx([case.lr, 8 * case.lr], rel=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_small_moves_of_a_bf16_weight_add_up(fused):
    """torch's AdamW rounds a weight of 1 back to 1 at each of 200 steps of 1e-3."""
    weights = [torch.ones(100, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    params = as_parameters(weights)
    optimizer = optim.AdamW(params, lr=1e-3, master_weights=True, fused=fused)
    for _ in range(200):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    moved, expected = params
    assert expected[0].item() == pytest.approx(0.8, abs=2e-3)  # the decay takes the rest
    assert_same_bits(moved, expected.to(torch.bfloat16), "weight")


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_small_moments_survive_low_precision_weights(case):
    """torch's for-loop rounds the square of a small fp16 gradient to 0, and divides by its root."""
    param = torch.nn.Parameter(torch.ones(50, dtype=torch.float16))
    param.grad = torch.full_like(param, 1e-3)
    case.build([param]).step()
    assert param.isfinite().all()
