"""Law: SGD has a buffer where it has a momentum, and knows its first step by the missing buffer."""

import copy

import pytest
import torch

from fusedstep import optim
from support.stepping import as_parameters, assert_same_contents, contents, make_weights, train

SHAPES = ((33, 31), (7,))
MODES = pytest.mark.parametrize("fused", [True, False])


def build(params, cls=optim.SGD, **options):
    return cls(params, lr=0.01, **({"momentum": 0.9, "dampening": 0.5} | options))


def assert_as_torch(optimizer, namesake):
    ours, theirs = contents(optimizer), contents(namesake)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-5)


@MODES
def test_the_first_gradient_is_not_dampened(fused):
    (param,) = as_parameters(make_weights(SHAPES[:1], torch.float32))
    optimizer = build([param], fused=fused)
    train(optimizer, [param], [1])
    assert torch.equal(optimizer.state[param]["momentum_buffer"], param.grad)


@MODES
@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_momentum_that_comes_later(fused, options):
    """The buffer begins with the gradient of the first step that has a momentum."""
    pairs = []
    for cls in (optim.SGD, torch.optim.SGD):
        params = as_parameters(make_weights(SHAPES, torch.float32))
        optimizer = build(params, cls, momentum=0, fused=fused)
        train(optimizer, params, [1, 2])
        assert not any(optimizer.state.values())
        optimizer.param_groups[0].update(options)
        train(optimizer, params, [3, 4])
        pairs.append(optimizer)
    assert_as_torch(*pairs)


@MODES
def test_a_buffer_that_is_none_is_missing(fused):
    """Older versions of torch stored such in dictionaries of runs without momentum."""
    params = as_parameters(make_weights(SHAPES, torch.float32))
    fresh_params = as_parameters(params)
    optimizer, fresh = (build(each, fused=fused) for each in (params, fresh_params))
    dictionary = copy.deepcopy(optimizer.state_dict())
    dictionary["state"] = {index: {"momentum_buffer": None} for index in range(len(params))}
    optimizer.load_state_dict(dictionary)
    assert not any(optimizer.state.values())
    train(optimizer, params, [1, 2])
    train(fresh, fresh_params, [1, 2])
    assert_same_contents(contents(optimizer), contents(fresh))


@pytest.mark.parametrize("options", [{"momentum": 0.0}, {"dampening": 0.5}])
def test_nesterov_needs_a_momentum_and_no_dampening(options):
    options = {"momentum": 0.9, "dampening": 0.0} | options
    for cls in (optim.SGD, torch.optim.SGD):
        with pytest.raises(ValueError, match="Nesterov momentum requires a momentum and zero"):
            build([torch.zeros(3, requires_grad=True)], cls, nesterov=True, **options)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.0, "weight_decay": 0.1}])
@MODES
def test_a_sparse_gradient_that_would_change_every_row(fused, options):
    table = torch.nn.Embedding(9, 4, sparse=True)
    optimizer = build(table.parameters(), fused=fused, **options)
    table(torch.tensor([1, 3])).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(RuntimeError, match="not compatible with sparse gradients"):
        optimizer.step()
    assert torch.equal(table.weight, before)
