"""Law: autograd hears of every change, so that a wrong backward is an error as with torch's ops."""

import pytest
import torch

from support.cases import CASES, KINDS, PLAIN
from support.stepping import as_parameters, assert_contents_close, contents, make_weights, train

MODIFIED = "modified by an inplace operation"


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_versions_rise_with_each_step(case, fused):
    params = as_parameters(make_weights([(), (0,), (33, 31)], torch.float32))
    optimizer = case.build(params, fused=fused)
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(3):
        before = [param._version for param in params]
        optimizer.step()
        assert all(param._version > old for param, old in zip(params, before, strict=True))


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_backward_over_a_changed_weight_is_an_error(case):
    (param,) = as_parameters(make_weights([(10,)], torch.float32))
    loss = (param**2).sum()
    param.grad = torch.ones_like(param)
    case.build([param]).step()
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_backward_over_a_changed_gradient_is_an_error(case):
    """LAMB's update in `.grad` is a change of the gradient; everything else leaves it alone."""
    (param,) = as_parameters(make_weights([(10,)], torch.float32))
    param.grad = torch.ones_like(param)
    factor = torch.ones(10, requires_grad=True)
    loss = (factor * param.grad).sum()
    version = param.grad._version
    case.build([param]).step()
    if case.stores_update_in_grad(torch.float32):
        assert param.grad._version > version
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward()
    else:
        assert param.grad._version == version
        loss.backward()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("case", [case for case in KINDS if case.states], ids=str)
def test_backward_over_a_changed_state_is_an_error(case, fused):
    """In the step after somebody first had the states, and in later ones."""
    (param,) = as_parameters(make_weights([(10,)], torch.float32))
    optimizer = case.build([param], fused=fused)
    for step in range(5):
        param.grad = torch.full_like(param, step + 1.0)
        optimizer.step()
        if step < 2:
            continue
        factor = torch.ones(10, requires_grad=True)
        losses = [(factor * optimizer.state[param][name]).sum() for name in case.states]
        param.grad = torch.ones_like(param)
        optimizer.step()
        for loss in losses:
            with pytest.raises(RuntimeError, match=MODIFIED):
                loss.backward()


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_weight_without_gradient_keeps_its_version(case):
    params = as_parameters(make_weights([(3,), (4,)], torch.float32))
    optimizer = case.build(params)
    params[0].grad = torch.ones_like(params[0])
    version = params[1]._version
    optimizer.step()
    assert params[1]._version == version


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_step_records_no_graph(case):
    (param,) = as_parameters(make_weights([(10,)], torch.float32))
    optimizer = case.build([param])
    with torch.enable_grad():
        param.grad = (param.detach() ** 2).requires_grad_()
        optimizer.step()
    assert param.grad_fn is None
    assert param.is_leaf
    assert all(state.grad_fn is None for state in optimizer.state[param].values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_that_autograd_follows_is_the_imperative_one(case):
    """Except for corrections of the bias in float32, as in torch."""
    results = []
    for differentiable in (False, True):
        # No leaf that autograd looks at can change.
        weights = make_weights([(33, 31), (7,), (), (0,)], torch.float64)
        weights[1] *= 1e-3
        optimizer = case.build(weights, fused=False, differentiable=differentiable)
        train(optimizer, weights, range(1, 6))
        results.append(contents(optimizer))
    assert_contents_close(*results, rtol=1e-6, atol=1e-6)
