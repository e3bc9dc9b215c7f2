"""Steps whose gradients hold NaN or infinity: the error that names the weight."""

import copy
import functools
import math

import pytest
import torch

import fusedstep
import test_composites
from cases import PLAIN, thinned
from fusedstep import optim
from stepping import assert_same_bits, assert_same_contents, contents
from test_one_pass import MODES, build, params_of

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def spoil(optimizer, place, value):
    """Writes a number into the gradient of a weight, which may be sparse."""
    grad = params_of(optimizer)[place].grad
    (grad._values() if grad.is_sparse else grad).view(-1)[-1] = value


def subjects():
    """Every class in every mode after a step, with its next gradients: rows, and composites."""
    for case, mode in thinned(PLAIN, MODES):
        yield pytest.param(
            lambda c=case, m=mode: build(c, torch.float32, m)[0], id=f"{case}-{mode}"
        )
    for row in test_composites.ROWS:
        for fused in (None, False):
            make = functools.partial(test_composites.stepped, row, 2, 3, fused=fused)
            yield pytest.param(lambda make=make: make()[1], id=f"{row}-{fused}")


EACH = pytest.mark.parametrize("make", list(subjects()))


def grads_of(optimizer):
    return [param.grad.clone() for param in params_of(optimizer)]


def assert_grads(optimizer, before):
    for param, grad in zip(params_of(optimizer), before, strict=True):
        values = [each._values() if each.is_sparse else each for each in (param.grad, grad)]
        assert_same_bits(*values, "gradient")


@EACH
def test_the_error_names_the_first_weight_and_changes_nothing(make):
    for arguments in ({}, {"max_norm": 1.0}, {"max_norm": 1.0, "zero_grad": True}):
        for value in BAD.values():
            optimizer = make()
            for place in (2, 1):
                spoil(optimizer, place, value)
            before, grads = contents(optimizer), grads_of(optimizer)
            with pytest.raises(RuntimeError, match="of parameter 1 of group 0 is not finite"):
                optimizer.step(**arguments, error_if_nonfinite=True)
            assert_same_contents(contents(optimizer), before)
            assert_grads(optimizer, grads)


@EACH
def test_a_step_with_finite_gradients_is_the_same_with_the_check(make):
    expected, optimizer = make(), make()
    norm = optimizer.step(max_norm=0.5, error_if_nonfinite=True)
    assert_same_bits(norm, expected.step(max_norm=0.5), "norm")
    assert_same_contents(contents(optimizer), contents(expected))
    assert optimizer.step(error_if_nonfinite=True) is None


def test_the_error_has_the_name_of_a_weight_that_has_one():
    model = torch.nn.Linear(3, 2)
    optimizer = optim.AdamW(model.named_parameters())
    model.weight.grad, model.bias.grad = torch.ones(2, 3), torch.full((2,), math.inf)
    with pytest.raises(RuntimeError, match=r"gradient of parameter 'bias' is not finite"):
        optimizer.step(error_if_nonfinite=True)


@pytest.mark.parametrize("fused", [True, False])
def test_a_norm_may_overflow_while_gradients_do_not(fused):
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    param.grad = torch.full_like(param, 1e200)
    with pytest.raises(RuntimeError, match=r"^the norm of all gradients is inf"):
        optim.SGD([param], fused=fused).step(error_if_nonfinite=True)
    assert (param == 1).all()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes(dtype, fused):
    if dtype.is_complex and fused:
        return
    param = torch.nn.Parameter(torch.ones(40, dtype=dtype))
    param.grad = torch.full_like(param, 60000)  # its square is beyond float16
    optimizer = optim.AdamW([param], fused=fused)
    optimizer.step(max_norm=1.0, error_if_nonfinite=True)
    param.grad[7] = math.nan
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 is not finite"):
        optimizer.step(max_norm=1.0, error_if_nonfinite=True)


def test_steps_in_the_backward_pass_and_overlapping_ones_refuse_the_check():
    model = torch.nn.Linear(3, 2)
    optimizer = optim.AdamW(model.parameters())
    with (
        fusedstep.step_in_backward(optimizer),
        pytest.raises(RuntimeError, match=r"step\(error_if_nonfinite=True\) comes after"),
    ):
        optimizer.step(error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=r"step\(error_if_nonfinite=…\) needs all gradients"):
        fusedstep.offload(optim.AdamW(model.parameters())).step(error_if_nonfinite=True)


def test_an_offloaded_optimizer_names_the_weight():
    model = torch.nn.Linear(3, 2)
    optimizer = fusedstep.offload(optim.AdamW(model.named_parameters()), overlap=False)
    before = copy.deepcopy(model.state_dict())
    model(torch.full((1, 3), math.nan)).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient of parameter 'weight' is not finite"):
        optimizer.step(error_if_nonfinite=True)
    assert_same_contents(model.state_dict(), before)
