"""Helpers of the laws on states of other libraries in codes: numbers, weights, and comparisons."""

import copy
import importlib
import sys

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep._state.codes import storage_index
from reference.codes import MAPS
from support.foreign import bitsandbytes_state
from support.pages import ROOT
from support.stepping import (
    as_parameters,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
    train,
)

FOLDER = ROOT / "build" / "low-bit"
"""Folder in which `./run.sh test` puts bitsandbytes and torchao."""


def need_library(monkeypatch, name):
    """Imports a module of another library, and skips the test where there is no such library.

    The folder is on the path during the import alone: transformers, peft and others do other things
    where they find these libraries.
    """
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(FOLDER)])
        pytest.importorskip(name.partition(".")[0])
        return importlib.import_module(name)


#: Whole blocks of any kind; an end within a block; too few elements for codes.
SHAPES = ((64, 80), (5003,), (7,))

OF_0, OF_1 = (f"of parameter {place} of group 0" for place in (0, 1))


def numbers_of(states, seed=0):
    """A state for each weight and name, over six orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in SHAPES:
        tensors = {}
        for name, signed in states.items():
            sizes = torch.randn(shape, generator=generator).double()
            spread = torch.logspace(-6, 0, sizes.numel(), dtype=torch.float64).view(shape)
            tensors[name] = (sizes * spread if signed else sizes.abs() * spread).float()
        found.append(tensors)
    return found


def weights():
    return as_parameters(make_weights(SHAPES, torch.float32))


def encoded_by_us(numbers, kind, signed):
    return torch.ops.fusedstep.encode_state(numbers.contiguous(), storage_index(kind), signed)


def assert_goes_on(optimizer, params):
    before = [param.detach().clone() for param in params]
    train(optimizer, params, [4])
    for param, start in zip(params, before, strict=True):
        assert param.isfinite().all()
        assert not torch.equal(param, start)


def assert_is_refused(cls, dictionary, text, **options):
    """Refused, and nothing has changed."""
    params = weights()
    optimizer = cls(params, **options)
    train(optimizer, params, [1])
    before, groups = contents(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=text):
        fusedstep.import_state_dict(optimizer, dictionary)
    assert_same_contents(contents(optimizer), before)
    assert optimizer.state_dict()["param_groups"] == groups


def trained(cls, params, **options):
    optimizer = cls(params, lr=0.01, **options)
    for step in (1, 2, 3):
        set_gradients(params, step)
        optimizer.step()
    return optimizer


def set_gradients(params, step):
    for param, gradient in zip(params, make_gradients(SHAPES, torch.float32, step), strict=True):
        param.grad = gradient


def assert_steps_as(other, params, places=(0, 1, 2)):
    """A step of the optimizer that goes on, from the same place as one of the other."""
    before = [param.detach().clone() for param in params]
    converted = fusedstep.convert(other, lr=0.01)
    set_gradients(params, 4)
    other.step()
    expected = [param.detach().clone() for param in params]
    with torch.no_grad():
        for param, value in zip(params, before, strict=True):
            param.copy_(value)
    set_gradients(params, 4)
    converted.step()
    for place in places:
        change = (expected[place] - before[place]).abs().max()
        torch.testing.assert_close(
            params[place], expected[place], rtol=0, atol=change * 1e-4 + 1e-7
        )


SIGNED, UNSIGNED = (MAPS["int8", signed][0] for signed in (True, False))


#: The classes of bitsandbytes: ours, its states with whether they may be negative, the options of
#: its groups, and what these say here.
CLASSES = {
    "Adagrad": (
        optim.Adagrad, {"sum": False}, {"betas": (0.0, 0.0), "eps": 1e-10}, {"eps": 1e-10},
    ),
    "Adam": (
        optim.Adam, {"exp_avg": True, "exp_avg_sq": False},
        {"betas": (0.8, 0.95), "eps": 1e-6, "alpha": 0.0, "t_alpha": None, "t_beta3": None},
        {"betas": (0.8, 0.95), "eps": 1e-6, "decoupled_weight_decay": True},
    ),
    "AdamW": (
        optim.AdamW, {"exp_avg": True, "exp_avg_sq": False},
        {"betas": (0.8, 0.95), "eps": 1e-6, "alpha": 0.0, "t_alpha": None, "t_beta3": None},
        {"betas": (0.8, 0.95), "eps": 1e-6},
    ),
    "Lion": (
        optim.Lion, {"exp_avg": True}, {"betas": (0.8, 0.95), "eps": 0.0}, {"betas": (0.8, 0.95)},
    ),
    "RMSprop": (
        optim.RMSprop, {"square_avg": False}, {"betas": (0.9, 0), "eps": 1e-6},
        {"alpha": 0.9, "eps": 1e-6},
    ),
    "SGD": (
        optim.SGD, {"momentum_buffer": True}, {"betas": (0.8, 0.3), "eps": 0.0},
        {"momentum": 0.8, "dampening": 0},
    ),
}  # fmt: skip


ONE_STATE = {"Adagrad", "Lion", "RMSprop", "SGD"}


def qmaps(name):
    """bitsandbytes keeps a single state by the signed map, whatever it is."""
    return (SIGNED,) if name in ONE_STATE else (SIGNED, UNSIGNED)


def bitsandbytes_dictionary(name, numbers, block=256, nested=True, maps=None):
    options = {"lr": 0.25, "weight_decay": 0.125} | CLASSES[name][2]
    return {
        "state": {
            index: bitsandbytes_state(
                [*tensors.values()], maps or qmaps(name), block=block, nested=nested
            )
            for index, tensors in enumerate(numbers)
        },
        "param_groups": [options | {"params": list(range(len(numbers)))}],
    }
