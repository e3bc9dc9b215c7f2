"""Law: three more steps after import_state_dict are those of the other library, or it refuses."""

import copy
import inspect

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep._api.registry import classes
from support.foreign_codes import need_library
from support.stepping import as_parameters, make_weights, train

SHAPES = ((8, 16), (7,))
OPTIMI = {"lr": 0.01, "triton": False, "weight_decay": 0.1}
TAKEN = [
    *(("optimi", name, name, OPTIMI) for name in ("Adam", "AdamW", "RAdam", "Adan", "Lion")),
    ("optimi", "SGD", "SGD", OPTIMI | {"momentum": 0.9}),
    ("optimi", "Adam", "Adam", OPTIMI | {"decouple_wd": True}),
    ("optimi", "AdamW", "AdamW", OPTIMI | {"decouple_lr": True, "max_lr": 0.5}),
    ("lion_pytorch", "Lion", "Lion", {"weight_decay": 0.1}),
    ("timm.optim", "Lion", "Lion", {"weight_decay": 0.1}),
    ("timm.optim", "Adan", "Adan", {"weight_decay": 0.1}),
    ("timm.optim", "Adopt", "ADOPT", {"weight_decay": 0.1}),
    ("timm.optim", "Adopt", "ADOPT", {"weight_decay": 0.1, "decoupled": True, "clip_exp": None}),
    ("timm.optim", "AdamWLegacy", "AdamW", {}),
    ("timm.optim", "Lamb", "Lamb", {"weight_decay": 0.1}),
    ("timm.optim", "SGDW", "SGD", {"momentum": 0.9, "weight_decay": 0.0}),
    *(
        ("timm.optim", "Adafactor", "Adafactor", {"min_dim_size_to_factor": 3} | options)
        for options in (
            {"weight_decay": 0.1, "eps_scale": 0.5},
            {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1, "eps": 1e-6},
            {"warmup_init": True, "scale_parameter": False, "decay_rate": -0.7},
        )
    ),
    *(("pytorch_optimizer", name, name, {}) for name in ("Adan", "Lion")),
    ("pytorch_optimizer", "AdaDelta", "Adadelta", {}),
    ("pytorch_optimizer", "AdaMax", "Adamax", {"lr": 0.01}),
    ("pytorch_optimizer", "SGDW", "SGD", {"lr": 0.01, "momentum": 0.9}),
]
REFUSED = [
    ("optimi", "StableAdamW", "AdamW", OPTIMI, "optimi's StableAdamW"),
    ("optimi", "Ranger", "AdamW", OPTIMI, "k=6, alpha=0.5 have no counterpart"),
    ("prodigyopt", "Prodigy", "AdamW", {}, "d_coef=1.0, .* is one of prodigyopt"),
    ("schedulefree", "AdamWScheduleFree", "AdamW", {}, "is one of schedulefree"),
    ("schedulefree", "SGDScheduleFree", "SGD", {}, "is one of schedulefree"),
    *(("timm.optim", name, "AdamW", {"lr": 0.01}, "") for name in ("NAdamW", "Adopt", "LaProp")),
    ("timm.optim", "Adopt", "ADOPT", {"caution": True}, "caution=True has no counterpart"),
    ("timm.optim", "Mars", "AdamW", {}, ""),
    ("timm.optim", "SGDP", "SGD", {"lr": 0.01, "momentum": 0.9}, ""),
    ("timm.optim", "RMSpropTF", "RMSprop", {}, "lr_in_momentum=True"),
    ("timm.optim", "Adafactor", "Adafactor", {"lr": 0.01}, r"of each element of .*\[8, 16\]"),
    ("timm.optim", "Adafactor", "Adafactor", {"caution": True}, "caution=True has no counterpart"),
    ("timm.optim", "AdafactorBigVision", "Adafactor", {}, "one of timm's AdafactorBigVision"),
    ("timm.optim", "Lion", "Lion", {"caution": True}, "caution=True has no counterpart"),
    ("pytorch_optimizer", "Lamb", "Lamb", {}, "has weight_norm, adam_norm, trust_ratio, which"),
    ("pytorch_optimizer", "StableAdamW", "AdamW", {}, "kahan_sum=True has no counterpart"),
    ("pytorch_optimizer", "LaProp", "AdamW", {}, "has exp_avg_lr_1, exp_avg_lr_2, which"),
    ("pytorch_optimizer", "MARS", "AdamW", {}, "gamma=0.025, .* have no counterpart"),
    ("pytorch_optimizer", "SOAP", "AdamW", {}, "max_precondition_dim=10000 have no counterpart"),
    *(
        ("pytorch_optimizer", name, "AdamW", {"lr": 0.01}, "is one of pytorch_optimizer")
        for name in ("ADOPT", "AdamC", "AdamS", "Ano", "EXAdam", "Fira", "GaLore", "Grams", "RAdam")
    ),
    ("pytorch_optimizer", "ADOPT", "Adam", {}, "is one of pytorch_optimizer"),
    ("pytorch_optimizer", "ADOPT", "ADOPT", {}, "is one of pytorch_optimizer"),
    ("pytorch_optimizer", "RAdam", "RAdam", {}, "is one of pytorch_optimizer"),
    ("pytorch_optimizer", "SGDW", "SGD", {"weight_decay": 0.1}, "weight_decouple=True has no"),
    ("pytorch_optimizer", "SignSGD", "SGD", {}, "is one of pytorch_optimizer"),
    ("timm.optim", "SGDW", "SGD", {"momentum": 0.9, "weight_decay": 0.1}, "is one of timm"),
    *(
        ("timm.optim", name, name, {"corrected_weight_decay": True}, "corrected_weight_decay=True")
        for name in ("Lamb", "Lion")
    ),
    *(("heavyball", name, name, {}, "is one of heavyball") for name in ("AdamW", "SGD")),
    ("pytorch_optimizer", "CAME", "CAME", {}, "eps1=1e-30, eps2=1e-16 have no counterpart"),
]


def after_three_steps(library, name, options):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    if library.__name__ == "heavyball":
        library.utils.compile_mode = None
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


@pytest.mark.parametrize("shape", [(17, 17), (3, 5, 17, 17), (18, 17, 3, 3), (17, 16), (1, 1, 32)])
def test_adafactor_of_timm_is_refused_where_it_factors_otherwise(monkeypatch, shape):
    """Also a weight that has no state yet."""
    library, saved = need_library(monkeypatch, "timm.optim"), []
    weight = torch.nn.Parameter(torch.ones(shape))
    other = library.Adafactor([weight], lr=0.01)
    saved.append(copy.deepcopy(other.state_dict()))
    weight.grad = torch.ones(shape)
    other.step()
    saved.append(other.state_dict())
    is_same = "exp_avg_sq_col" in (state := other.state[weight]) and (
        state["exp_avg_sq_col"].shape == (*shape[:-2], shape[-1])
    )
    for dictionary in saved:
        optimizer = optim.Adafactor([weight])
        if is_same:
            fusedstep.import_state_dict(optimizer, dictionary)
            continue
        with pytest.raises(ValueError, match="keeps second moments of"):
            fusedstep.import_state_dict(optimizer, dictionary)
        assert not optimizer.state


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


#: A dictionary of these options alone, as RAdamLegacy's, may be one of an older torch's Adam.
TELL_NOTHING = {"betas", "eps", "lr", "params", "weight_decay"}

#: Options with which optimizers that need some are made, and others have their other formulas.
TRIED = ({}, {"lr": 0.01, "weight_decay": 0.1})
DOORS = {"import": fusedstep.import_state_dict, "load": lambda o, saved: o.load_state_dict(saved)}


def optimizers_of(library):
    """Each optimizer of a library that steps a vector and a matrix, after three steps."""
    for name, cls in sorted(vars(library).items()):
        is_one = inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
        for options in TRIED if is_one and not cls.__module__.startswith("torch.") else ():
            try:
                params, other = after_three_steps(library, name, options)
                other.state_dict()["param_groups"]
            except Exception:  # it needs other options, a closure, a model or a process group
                continue
            yield f"{name}{options}", params, other


@pytest.mark.parametrize("package", ["timm.optim", "pytorch_optimizer"])
def test_no_class_goes_on_with_another_formula(monkeypatch, package):
    """Every class of a library is loaded by every class here that takes its dictionary."""
    wrong, taken = [], set()
    for name, params, other in optimizers_of(need_library(monkeypatch, package)):
        saved, before = copy.deepcopy(other.state_dict()), as_parameters(params)
        if saved["param_groups"][0].keys() <= TELL_NOTHING:
            continue
        train(other, params, [4, 5, 6])
        for cls in classes:
            for door, load in DOORS.items():
                copies = as_parameters(before)
                try:
                    optimizer = cls(copies, **({"variant": "timm"} if cls is optim.Lamb else {}))
                    load(optimizer, copy.deepcopy(saved))
                except (TypeError, ValueError):
                    continue
                taken.add(cls.__name__)
                train(optimizer, copies, [4, 5, 6])
                if not all(
                    torch.allclose(found, expected, rtol=1e-5, atol=3e-5)
                    for found, expected in zip(copies, params, strict=True)
                ):
                    wrong.append(f"{door} of {name} into {cls.__name__}")
    assert not wrong
    assert {"Adan", "Lion", "SGD"} <= taken


def test_a_dictionary_without_the_numbers_of_a_formula_is_refused():
    for cls in (optim.Adadelta, optim.ASGD, optim.Rprop, optim.SGD):
        optimizer = cls(as_parameters(make_weights([(4,)], torch.float32)))
        with pytest.raises(ValueError, match="group 0 of the dictionary has no"):
            optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0], "lr": 1.0}]})
