"""Law: options choose between native kernels and the imperative twin, and both are right."""

import subprocess
import sys

import pytest
import torch

from support.cases import CASES, KINDS, PLAIN
from support.peers import WITH_FOREACH
from support.stepping import (
    as_parameters,
    assert_contents_close,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
    run,
    train,
)

SHAPES = ((7,), (33, 31))


def is_native(optimizer) -> bool:
    try:
        return optimizer._isa() in ("base", "avx2", "avx512")
    except RuntimeError:
        return False


@pytest.mark.parametrize(
    ("options", "native"),
    [
        ({"fused": None}, True),
        ({"fused": True}, True),
        ({"fused": True, "foreach": False}, True),
        ({"fused": False}, False),
        ({"fused": None, "foreach": True}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_what_runs(case, options, native):
    native |= bool(options.get("foreach")) and case.optimizer not in WITH_FOREACH
    _, optimizer = run(case, SHAPES, torch.float32, steps=3, **options)
    _, expected = run(case, SHAPES, torch.float32, steps=3)
    assert is_native(optimizer) == native
    if native:
        assert_same_contents(contents(optimizer), contents(expected))
    else:
        assert_contents_close(contents(optimizer), contents(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_the_choice_may_change_between_steps(case):
    params, optimizer = run(case, SHAPES, torch.float32, steps=2)
    for step, fused in enumerate((False, True, None, False, True), start=3):
        optimizer.param_groups[0]["fused"] = fused
        train(optimizer, params, [step])
    _, expected = run(case, SHAPES, torch.float32, steps=7)
    assert_contents_close(contents(optimizer), contents(expected), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_groups_choose_for_themselves(case):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    groups = [{"params": params[:1], "fused": True}, {"params": params[1:], "fused": False}]
    optimizer = case.build(groups)
    train(optimizer, params, [1, 2, 3])
    assert is_native(optimizer)
    _, expected = run(case, SHAPES, torch.float32, steps=3)
    assert_contents_close(contents(optimizer), contents(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("case", [case for case in PLAIN if case.sparse], ids=str)
def test_sparse_gradients_of_an_unfused_optimizer(case):
    """In torch operations, as torch's."""
    params, others = (as_parameters(make_weights([(6, 4)], torch.float32)) for _ in range(2))
    optimizer, namesake = case.build(params, fused=False), case.build_namesake(others)
    for step in range(1, 4):
        (values,) = make_gradients([(3, 4)], torch.float32, step)
        for (param,) in (params, others):
            # An index given twice: its values are added first.
            param.grad = torch.sparse_coo_tensor([[1, 4, 1]], values, (6, 4), check_invariants=True)
        optimizer.step()
        namesake.step()
    torch.testing.assert_close(params[0], others[0], rtol=1e-6, atol=1e-7)
    assert not is_native(optimizer)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_differentiable_steps_have_a_derivative(case):
    """Backward through two steps, against finite differences."""
    generator = torch.Generator().manual_seed(0)
    weight, source = (
        torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )

    def two_steps(weight, source):
        param = weight.clone()
        param.retain_grad()
        optimizer = case.build([param], differentiable=True, fused=None)
        for factor in (1.0, 2.0):
            param.grad = factor * torch.sin(source)
            optimizer.step()
        return param

    assert torch.autograd.gradcheck(two_steps, (weight, source), atol=1e-6, rtol=1e-4)


WITHOUT_LIBRARY = """
import warnings
import torch
from fusedstep import optim
import fusedstep

def trained(**options):
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = optim.Lamb([param], **options)
    param.grad = torch.ones(5)
    optimizer.step()
    return param

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    default, again = trained(), trained()
assert len(caught) == 1, caught
assert "native library" in str(caught[0].message), caught[0].message
assert torch.equal(default, trained(fused=False))
try:
    trained(fused=True)
except RuntimeError as error:
    assert "cmake --preset release" in str(error), error
else:
    raise AssertionError("fused=True without a library is an error")
fusedstep.doctor()
"""


def test_without_the_library(subprocess_environment, tmp_path):
    """The default says once that it is slower; fused=True is an error that tells what to do."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARY],
        env=subprocess_environment | {"FUSEDSTEP_LIBRARY": str(tmp_path / "libfusedstep.so")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "no native kernels" in result.stdout
