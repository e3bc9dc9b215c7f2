"""Law: three more steps after import_state_dict are those of the other library, or it refuses."""

import copy

import pytest
import torch

import fusedstep
from foreign_codes import need_library
from fusedstep import optim
from stepping import as_parameters, make_weights, train

SHAPES = ((8, 16), (7,))
OPTIMI = {"lr": 0.01, "triton": False, "weight_decay": 0.1}
TAKEN = [
    *(("optimi", name, name, OPTIMI) for name in ("Adam", "AdamW", "RAdam", "Adan", "Lion")),
    ("optimi", "SGD", "SGD", OPTIMI | {"momentum": 0.9}),
    ("optimi", "Adam", "Adam", OPTIMI | {"decouple_wd": True}),
    ("optimi", "AdamW", "AdamW", OPTIMI | {"decouple_lr": True, "max_lr": 0.5}),
    ("lion_pytorch", "Lion", "Lion", {"weight_decay": 0.1}),
    ("pytorch_optimizer", "Lion", "Lion", {"lr": 0.01}),
]
REFUSED = [
    ("optimi", "StableAdamW", "AdamW", OPTIMI, "optimi's StableAdamW"),
    ("optimi", "Ranger", "AdamW", OPTIMI, "k=6, alpha=0.5 have no counterpart"),
    ("prodigyopt", "Prodigy", "AdamW", {}, "d_coef=1.0, .* is one of prodigyopt"),
    ("schedulefree", "AdamWScheduleFree", "AdamW", {}, "is one of schedulefree"),
    ("schedulefree", "SGDScheduleFree", "SGD", {}, "is one of schedulefree"),
    ("pytorch_optimizer", "Adan", "Adan", {}, "has no neg_pre_grad: it is not one of Adan"),
    ("pytorch_optimizer", "Lamb", "Lamb", {}, "has weight_norm, adam_norm, trust_ratio, which"),
    ("pytorch_optimizer", "StableAdamW", "AdamW", {}, "kahan_sum=True has no counterpart"),
    ("pytorch_optimizer", "LaProp", "AdamW", {}, "has exp_avg_lr_1, exp_avg_lr_2, which"),
    ("pytorch_optimizer", "MARS", "AdamW", {}, "gamma=0.025, .* have no counterpart"),
    ("pytorch_optimizer", "SOAP", "AdamW", {}, "max_precondition_dim=10000 have no counterpart"),
    ("pytorch_optimizer", "CAME", "CAME", {}, "eps1=1e-30, eps2=1e-16 have no counterpart"),
]


def after_three_steps(library, name, options):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    other = getattr(library, name)(params, **options)
    if library.__name__ == "schedulefree":
        other.train()
    train(other, params, [1, 2, 3])
    return params, other


@pytest.mark.parametrize(("package", "name", "ours", "options"), TAKEN)
def test_goes_on_as_the_other(monkeypatch, package, name, ours, options):
    params, other = after_three_steps(need_library(monkeypatch, package), name, options)
    copies = as_parameters(params)
    optimizer = getattr(optim, ours)(copies)
    fusedstep.import_state_dict(optimizer, copy.deepcopy(other.state_dict()))
    for each, weights in ((other, params), (optimizer, copies)):
        train(each, weights, [4, 5, 6])
    for found, expected in zip(copies, params, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("package", "name", "ours", "options", "text"), REFUSED)
def test_refuses_the_other(monkeypatch, package, name, ours, options, text):
    params, other = after_three_steps(need_library(monkeypatch, package), name, options)
    optimizer = getattr(optim, ours)(params)
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=text):
        fusedstep.import_state_dict(optimizer, copy.deepcopy(other.state_dict()))
    with pytest.raises(ValueError, match=r"no counterpart|has no|one of"):
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    assert optimizer.state_dict() == before
