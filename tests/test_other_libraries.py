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
    ("timm.optim", "Lion", "Lion", {"weight_decay": 0.1}),
    ("timm.optim", "Adan", "Adan", {"weight_decay": 0.1}),
    ("timm.optim", "AdamWLegacy", "AdamW", {}),
    ("pytorch_optimizer", "Adan", "Adan", {}),
]
REFUSED = [
    ("optimi", "StableAdamW", "AdamW", OPTIMI, "optimi's StableAdamW"),
    ("optimi", "Ranger", "AdamW", OPTIMI, "k=6, alpha=0.5 have no counterpart"),
    ("prodigyopt", "Prodigy", "AdamW", {}, "d_coef=1.0, .* is one of prodigyopt"),
    ("schedulefree", "AdamWScheduleFree", "AdamW", {}, "is one of schedulefree"),
    ("schedulefree", "SGDScheduleFree", "SGD", {}, "is one of schedulefree"),
    *(("timm.optim", name, "AdamW", {"lr": 0.01}, "") for name in ("NAdamW", "Adopt", "LaProp")),
    ("timm.optim", "Mars", "AdamW", {}, ""),
    ("timm.optim", "SGDP", "SGD", {"lr": 0.01, "momentum": 0.9}, ""),
    ("timm.optim", "RMSpropTF", "RMSprop", {}, "lr_in_momentum=True"),
    ("timm.optim", "Lion", "Lion", {"caution": True}, "caution=True has no counterpart"),
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


def test_refuses_lora_fa_of_peft(monkeypatch):
    """Its states have names for keys."""
    peft, optimizers = (need_library(monkeypatch, name) for name in ("peft", "peft.optimizers"))
    config = peft.LoraConfig(r=2, target_modules=["0"])
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 16)), config)
    other = optimizers.create_lorafa_optimizer(model, r=2, lora_alpha=4, lr=0.01)
    model(torch.ones(4, 8)).square().mean().backward()
    other.step()
    optimizer = optim.AdamW([weight for g in other.param_groups for weight in g["params"]])
    with pytest.raises(ValueError, match="which 'params' of no group has"):
        fusedstep.import_state_dict(optimizer, other.state_dict())
    assert not optimizer.state
