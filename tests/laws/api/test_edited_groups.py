"""Groups that a user has edited between steps: what a step cannot take changes nothing."""

import pytest
import torch

from fusedstep import optim


def begun(cls, **options):
    """An optimizer after a step, and its weight with a gradient."""
    weight = torch.ones(3, 3, requires_grad=True)
    weight.grad = torch.ones(3, 3)
    optimizer = cls([weight], **options)
    optimizer.step()
    return optimizer, weight


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize(
    ("cls", "option", "value", "text"),
    [
        (optim.AdamW, "rounding", "x", "rounding must be None, 'stochastic' or 'kahan', not 'x'"),
        (optim.AdamW, "master_weights", 3, "'float32' or 'split', not 3"),
        (optim.AdamW, "state_dtype", "int3", "state_dtype must be None"),
        (optim.APOLLOAdamW, "seed", 1.5, "seed must be an int"),
    ],
)
def test_an_option_is_an_error_as_in_the_constructor(cls, option, value, text, fused):
    optimizer, weight = begun(cls, fused=fused)
    optimizer.param_groups[0][option] = value
    before = weight.detach().clone()
    with pytest.raises(ValueError, match=text):
        optimizer.step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("cls", [optim.CAME, optim.Adafactor, optim.Muon])
def test_a_weight_that_comes_is_looked_at(cls, fused):
    optimizer, weight = begun(cls, fused=fused)
    other = torch.ones(3, 3, dtype=torch.complex64, requires_grad=True)
    other.grad = torch.ones_like(other)
    optimizer.param_groups[0]["params"].append(other)
    before = weight.detach().clone()
    with pytest.raises((RuntimeError, ValueError), match=r"complex.*parameter|parameter.*complex"):
        optimizer.step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("max_norm", ["x", torch.ones(2)])
def test_max_norm_is_named(max_norm):
    optimizer, _ = begun(optim.AdamW)
    with pytest.raises((TypeError, ValueError), match="max_norm"):
        optimizer.step(max_norm=max_norm)


def test_nothing_is_kept_of_lists_that_groups_no_longer_have():
    optimizer, weight = begun(optim.Muon)
    lists = [[weight] for _ in range(9)]
    for each in lists:
        optimizer.param_groups[0]["params"] = each
        optimizer.step()
    assert list(optimizer._passed) == [id(each)]
