"""Muon: groups of AdamW, dictionaries, and conversions from torch's class."""

import copy

import pytest
import torch

import fusedstep
from fusedstep import optim
from support.matrices import parameters, step
from support.muon import trained


@pytest.mark.parametrize("what", ["dropped", "of another rule"])
def test_moments_of_adamw_that_begin_anew_have_a_count_that_does(what):
    (weight, other), options = parameters([(8, 8)] * 2), {"lr": 0.02, "use_muon": False}
    optimizer = optim.Muon([weight], **options)
    for number in range(3):
        step(optimizer, [weight], number)
    if what == "dropped":
        del optimizer.state[weight]
    else:
        optimizer.param_groups[0]["use_muon"] = True
        del optimizer.state[weight]
        step(optimizer, [weight], 3)
        optimizer.param_groups[0]["use_muon"] = False
    other.data.copy_(weight)
    fresh = optim.Muon([other], **options)
    step(optimizer, [weight], 4)
    step(fresh, [other], 4)
    assert optimizer.state[weight]["step"] == fresh.state[other]["step"] == 1
    assert torch.equal(weight, other)


@pytest.mark.parametrize("fused", [None, True, False])
def test_other_groups_are_adamw(fused):
    shapes = [(12, 8), (8,), (16, 8)]
    options = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3}

    def make(params, **_):
        groups = [{"params": params[:1]}, {"params": params[1:], "use_muon": False, **options}]
        return optim.Muon(groups, lr=0.02, fused=fused)

    found, optimizer = trained(make, shapes)
    expected, theirs = trained(lambda params, **_: torch.optim.AdamW(params[1:], **options), shapes)
    for p, q in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(p, q)
        assert optimizer.state[p].keys() == theirs.state[q].keys()
        assert optimizer.state[p]["step"] == 3
    alone, _ = trained(optim.Muon, shapes[:1], fused=fused)
    assert (found[0] == alone[0]).all()
    assert optimizer.state[found[0]].keys() == {"momentum_buffer"}
    assert bool(optimizer._plans) == (fused is not False)


def test_defaults_of_adamw_are_those_of_the_class():
    vector = torch.nn.Parameter(torch.ones(3))
    group = {"params": [vector], "use_muon": False}
    found = optim.Muon([group]).param_groups[0]
    assert (found["eps"], found["betas"], found["weight_decay"]) == (1e-8, (0.9, 0.999), 0.1)
    other = optim.Muon([group], betas=(0.5, 0.6), adamw_eps=0.25, eps=0.75, lr=2)
    found = other.param_groups[0]
    assert (found["eps"], found["betas"], found["lr"]) == (0.25, (0.5, 0.6), 2)
    other.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 3))]})
    assert other.param_groups[1]["eps"] == 0.75


# Dictionaries and conversions


def test_dictionaries_go_to_torchs_and_back():
    expected, _ = trained(torch.optim.Muon, steps=4)
    params, theirs = trained(torch.optim.Muon, steps=2)
    ours = optim.Muon(params, fused=False, ns_dtype=torch.bfloat16)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    step(ours, params, 2)
    back = torch.optim.Muon(params)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    step(back, params, 3)
    for found, other in zip(params, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=1e-5)
    assert optim.Muon(params).param_groups[0].keys() == back.param_groups[0].keys() - {
        "fused",
        "ns_dtype",
    }


@pytest.mark.parametrize("load", ["load_state_dict", "import_state_dict", "convert"])
def test_a_run_goes_on_from_its_dictionary(load):
    def make(params, **_):
        groups = [{"params": params[:2]}, {"params": params[2:], "use_muon": False}]
        return optim.Muon(groups, lr=0.02, ns_coefficients="polar_express")

    shapes = [(12, 8), (8, 12), (8,)]
    expected, _ = trained(make, shapes, steps=4)
    params, optimizer = trained(make, shapes, steps=2)
    if load == "convert":
        optimizer = fusedstep.convert(optimizer)
    else:
        saved, optimizer = copy.deepcopy(optimizer.state_dict()), make(params)
        if load == "load_state_dict":
            optimizer.load_state_dict(saved)
        else:
            fusedstep.import_state_dict(optimizer, saved)
    for number in (2, 3):
        step(optimizer, params, number)
    for found, other in zip(params, expected, strict=True):
        assert (found == other).all()
    assert optimizer.state[params[2]]["step"] == 4


def test_dictionaries_of_others_are_refused():
    params = parameters([(12, 8)])
    (others, adamw) = trained(torch.optim.AdamW, [(12, 8)])
    with pytest.raises(ValueError, match="AdamW"):
        optim.Muon(params).load_state_dict(adamw.state_dict())
    _, ours = trained(optim.Muon, [(12, 8)])
    with pytest.raises(ValueError, match="Muon"):
        optim.AdamW(others).load_state_dict(ours.state_dict())
    saved = ours.state_dict()
    del saved["state"][0]["momentum_buffer"]
    saved["state"][0]["sum"] = torch.ones(12, 8)
    with pytest.raises(ValueError, match="has no momentum_buffer"):
        optim.Muon(params).load_state_dict(saved)


def test_the_count_of_adamw_must_be_there():
    vector = parameters([(8,)])
    group = {"use_muon": False}
    _, ours = trained(lambda params, **_: optim.Muon([group | {"params": params}]), [(8,)])
    saved = ours.state_dict()
    del saved["state"][0]["step"]
    with pytest.raises(ValueError, match="has no step"):
        optim.Muon([group | {"params": vector}]).load_state_dict(saved)


def test_convert_goes_on_from_torchs():
    params, theirs = trained(torch.optim.Muon, steps=2, momentum=0.8)
    ours = fusedstep.convert(theirs, fused=False)
    assert type(ours) is optim.Muon
    assert ours.param_groups[0]["momentum"] == 0.8
    ours.param_groups[0]["ns_dtype"] = torch.bfloat16
    step(ours, params, 2)
    expected, _ = trained(torch.optim.Muon, momentum=0.8)
    for found, other in zip(params, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=1e-5)
