"""GaLoreAdafactor: its formula, arguments and bad input."""

import inspect

import pytest
import torch

import fusedstep
from fusedstep import optim
from reference.galore_adafactor import galore_adafactor
from support.low_rank import (
    SHAPES,
    as_params,
    assert_same,
    by_reference,
    projected,
    run,
    set_gradients,
    tensors_of,
)

ADAFACTOR = {
    "max_relative_step": 0.03,
    "weight_decay": 0.1,
    "clip_threshold": 0.7,
    "decay_rate": -0.6,
}
ADAFACTOR_PLAIN = ({"weight_decay": 0.3, "max_relative_step": 0.05}, [(9,), (), (3, 4)])


def adafactor_groups(dtype=torch.float64, **options):
    return as_params([ADAFACTOR_PLAIN, (projected(**options), SHAPES)], dtype)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta1": 0.8, "maximize": True},
        {"scale_parameter": False, "relative_step": False, "lr": 0.03},
        {"warmup_init": True, "eps": (1e-6, 0.5)},
    ],
    ids=str,
)
@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right", "full"])
def test_adafactor_is_the_published_formula(proj_type, options, fused):
    options = ADAFACTOR | {"eps": (1e-30, 0.02)} | options
    optimizer = optim.GaLoreAdafactor(adafactor_groups(proj_type=proj_type), **options, fused=fused)
    groups = adafactor_groups(proj_type=proj_type)
    expected = by_reference(galore_adafactor, groups, range(7), **options)
    for found, weight in zip(run(optimizer, range(7)), expected, strict=True):
        torch.testing.assert_close(found.detach(), weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fused", [None, False])
def test_adafactor_of_a_convolution_of_one_element(fused):
    """Strides of dimensions of one element are any: a matrix of the same memory has others."""
    shapes = [(8, 6, 1, 1)]
    params = [as_params([({"rank": 2}, shapes)], torch.float64)[0] for _ in range(2)]
    (other,) = params[1]["params"]
    other.data = other.data.to(memory_format=torch.channels_last)
    assert other.stride() != params[0]["params"][0].stride()
    found = [run(optim.GaLoreAdafactor([group], fused=fused), range(3)) for group in params]
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def test_adafactor_of_bfloat16():
    optimizer = optim.GaLoreAdafactor(adafactor_groups(torch.bfloat16), **ADAFACTOR)
    groups = adafactor_groups(torch.bfloat16)
    expected = by_reference(galore_adafactor, groups, range(4), **ADAFACTOR)
    for found, weight in zip(run(optimizer, range(4)), expected, strict=True):
        torch.testing.assert_close(found.detach().double(), weight, rtol=0.02, atol=0.02)
    for p in optimizer.param_groups[1]["params"]:
        assert {value.dtype for value in optimizer.state[p].values()} == {torch.float32}


def test_moments_of_vectors_are_imported_too():
    optimizer = optim.GaLoreAdafactor(adafactor_groups(), **ADAFACTOR)
    run(optimizer, range(3))
    new = optim.GaLoreAdafactor(adafactor_groups())
    saved = optimizer.state_dict()["state"]
    fusedstep.import_state_dict(new, optimizer.state_dict())
    found = new.state_dict()["state"]
    assert found.keys() == saved.keys()
    torch.testing.assert_close(found, saved, rtol=0, atol=0)


def test_arguments_of_adafactor_are_the_published_ones():
    parameters = inspect.signature(optim.GaLoreAdafactor).parameters
    published = {
        "lr": None, "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": None,
        "weight_decay": 0.0, "scale_parameter": True, "relative_step": True, "warmup_init": False,
    }  # fmt: skip
    assert list(parameters)[:10] == ["params", *published]
    assert {name: parameters[name].default for name in published} == published


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_adafactor_names_a_gradient_that_is_not_finite(bad):
    optimizer = optim.GaLoreAdafactor(adafactor_groups(), **ADAFACTOR)
    run(optimizer, range(2))
    set_gradients(optimizer, 5)
    before = tensors_of(optimizer)
    optimizer.param_groups[1]["params"][2].grad[1, 1] = bad
    with pytest.raises(RuntimeError, match="gradient of parameter 2 of group 1 has elements that"):
        optimizer.step()
    assert_same(tensors_of(optimizer), before)


def test_adafactor_checks_its_options():
    for options, shapes, text in (
        ({"rank": 8}, [(12, 7)], "rank=8 is over that"),
        ({}, [(9,)], "has 1 dimensions"),
        ({"proj_type": "up"}, [(12, 7)], "proj_type must be one of"),
    ):
        with pytest.raises(ValueError, match=text):
            optim.GaLoreAdafactor(as_params([(projected(**options), shapes)], torch.float32))
    with pytest.raises(ValueError, match="warmup_init=True requires relative_step=True"):
        optim.GaLoreAdafactor([torch.zeros(3)], warmup_init=True, relative_step=False)
