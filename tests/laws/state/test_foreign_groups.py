"""Law: groups and states that mean something else in another library are taken for what they mean.

The libraries are not installed: dictionaries have their layout, as read from their sources.
"""

import copy

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep._matrix.coefficients import coefficients_of
from support.cases import CASES, PLAIN
from support.stepping import (
    as_parameters,
    assert_contents_close,
    contents,
    make_weights,
    run,
    train,
)

SHAPES = ((33, 31), (7,))
QUINTIC = ((4.0848, -6.8946, 2.9270), (2.8366, -3.0525, 1.2012))

#: The classes of optimi, with the betas of their moments here.
DEBIASED = {
    "adam": {"exp_avg": 0, "exp_avg_sq": 1},
    "adamw": {"exp_avg": 0, "exp_avg_sq": 1},
    "radam": {"exp_avg": 0, "exp_avg_sq": 1},
    "adan": {"exp_avg": 0, "exp_avg_diff": 1, "exp_avg_sq": 2},
    "lion": {},
    "sgd": {},
}
ROWS = [
    *(case for case in PLAIN if case.optimizer.__name__.lower() in DEBIASED.keys() - {"sgd"}),
    next(case for case in CASES if case.optimizer is optim.SGD and case.options.get("momentum")),
]


def of_optimi(optimizer, **options):
    """A dictionary of optimi's optimizer of the name after the same steps, and of more options."""
    dictionary = copy.deepcopy(optimizer.state_dict())
    (group,) = dictionary["param_groups"]
    name = type(optimizer).__name__.lower()
    betas = group.pop("betas", ())
    group |= {f"beta{place}": beta for place, beta in enumerate(betas, 1)}
    decay = {"decouple_wd": group.pop("decoupled_weight_decay", False)}
    decay |= {"decouple_wd": True} if name == "adamw" else {}
    group |= decay if name in ("adam", "adamw", "radam", "sgd") else {}
    if name == "sgd":
        group["dampening"] = bool(group["dampening"])
    for key in (
        "nesterov",
        "amsgrad",
        "maximize",
        "capturable",
        "differentiable",
        "fused",
        "rounding",
    ):
        group.pop(key, None)
    group |= {"decouple_lr": False, "max_lr": None, "kahan_sum": None, "triton": False}
    group |= {"setup": True, "gradient_release": False} | options
    for state in dictionary["state"].values():
        steps = float(state.pop("step", 0))
        if name in ("adam", "adamw", "radam", "adan"):
            group["step"] = torch.tensor(int(steps), dtype=torch.int32)
        for moment, place in DEBIASED[name].items():
            state[moment] /= 1 - betas[place] ** steps
        for ours, theirs in (("momentum_buffer", "exp_avg"), ("neg_pre_grad", "prev_grad")):
            if ours in state:
                state[theirs] = state.pop(ours)
        state["kahan_comp"] = None
    return dictionary


def imported(case, params, dictionary, **options):
    optimizer = case.optimizer(params, **options)
    fusedstep.import_state_dict(optimizer, dictionary)
    return optimizer


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_goes_on_from_the_moments_of_optimi(case):
    params, source = run(case, SHAPES, torch.float32, steps=3)
    copies = as_parameters(params)
    optimizer = imported(case, copies, of_optimi(source))
    assert_contents_close(contents(optimizer), contents(source), rtol=1e-6, atol=1e-8)
    for each, weights in ((optimizer, copies), (source, params)):
        train(each, weights, [4, 5, 6])
    assert_contents_close(contents(optimizer), contents(source), rtol=1e-5, atol=1e-7)


def test_decay_by_the_largest_rate_of_optimi():
    case = next(case for case in ROWS if case.optimizer is optim.AdamW)
    params, source = run(case, SHAPES, torch.float32, steps=1)
    dictionary = of_optimi(source, decouple_lr=True, max_lr=0.25, weight_decay=0.125)
    assert imported(case, params, dictionary).param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("sgd", {"decouple_wd": True, "weight_decay": 0.1}, "weight_decouple=True has no"),
        ("adamw", {"gradient_release": True}, "gradient_release=True has no counterpart"),
        ("adamw", {"k": 6, "alpha": 0.5}, "k=6, alpha=0.5 have no counterpart"),
        ("adamw", {"decouple_wd": None}, "one of optimi's StableAdamW"),
    ],
)
def test_refuses_other_formulas_of_optimi(name, options, text):
    case = next(case for case in ROWS if case.optimizer.__name__.lower() == name)
    params, source = run(case, SHAPES, torch.float32, steps=1)
    dictionary = of_optimi(source, **options)
    if options == {"decouple_wd": None}:
        del dictionary["param_groups"][0]["decouple_wd"]
    with pytest.raises(ValueError, match=text):
        imported(case, params, dictionary)


def test_the_compensation_of_optimi():
    case = next(case for case in ROWS if case.optimizer is optim.AdamW)
    params, source = run(case, SHAPES, torch.bfloat16, steps=2, rounding="kahan")
    dictionary = of_optimi(source)
    for state in dictionary["state"].values():
        state["kahan_comp"] = state.pop("compensation")
    found = imported(case, params, dictionary, rounding="kahan")
    for param in params:
        assert torch.equal(found.state[param]["compensation"], source.state[param]["compensation"])
    with pytest.raises(ValueError, match="kahan_comp of parameter 0 of group 0 is not zero"):
        imported(case, params, dictionary)


# timm's Muon


def of_timm(params, **options):
    group = {
        "params": list(range(len(params))), "lr": 0.01, "weight_decay": 0, "momentum": 0.9,
        "nesterov": False, "ns_steps": 5, "ns_coefficients": "quintic", "eps": 1e-7,
        "safety_factor": 1.0, "adjust_lr_fn": "match_rms_adamw", "conv_mode": "flatten",
        "normalize_spatial": True, "fallback_lr_scale": 1.0, "betas": (0.9, 0.95),
        "algo": "muon", "scale_eps": False, "capturable": False, "verbose": False,
    }  # fmt: skip
    states = {
        index: {"use_muon": True, "momentum_buffer": torch.full_like(param, 0.5)}
        if param.dim() > 1
        else {"use_muon": False, "step": 3, "exp_avg": param * 0, "exp_avg_sq": param * 0 + 1}
        for index, param in enumerate(params)
    }
    return {"state": states, "param_groups": [group | options]}


def test_timms_muon_has_its_own_coefficients_by_name():
    params = as_parameters(make_weights([(8, 16), (4, 3, 2)], torch.float32))
    for name, expected in (("quintic", QUINTIC[0]), ("original", (3.4445, -4.7750, 2.0315))):
        optimizer = optim.Muon(params)
        fusedstep.import_state_dict(optimizer, of_timm(params, ns_coefficients=name))
        (group,) = optimizer.param_groups
        assert coefficients_of(group["ns_coefficients"], 5)[0] == expected
        assert (group["stacked"], group["nesterov"], group["adjust_lr_fn"]) == (
            False, False, "match_rms_adamw",
        )  # fmt: skip
        assert optimizer.state[params[0]].keys() == {"momentum_buffer"}
        train(optimizer, params, [1])
        again = optim.Muon(params)
        again.load_state_dict(optimizer.state_dict())
    assert coefficients_of(QUINTIC, 5)[4] == QUINTIC[1]


def test_weights_that_timms_muon_gives_to_adamw():
    params = as_parameters(make_weights([(7,)], torch.float32))
    optimizer = optim.Muon([{"params": params, "use_muon": False}])
    fusedstep.import_state_dict(optimizer, of_timm(params))
    assert not optimizer.param_groups[0]["use_muon"]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert optimizer.state[params[0]]["step"] == 3
    fusedstep.import_state_dict(optimizer, of_timm(params, fallback_lr_scale=0.5))
    assert optimizer.param_groups[0]["lr"] == 0.005
    with pytest.raises(ValueError, match="nesterov=True of timm's Muon has NAdamW"):
        fusedstep.import_state_dict(optimizer, of_timm(params, nesterov=True))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ns_coefficients": "polar_express"}, "ns_coefficients='polar_express' of timm has no"),
        ({"adjust_lr_fn": None}, "adjust_lr_fn=None of timm has no counterpart"),
        ({"adjust_lr_fn": "rsqrt_in"}, "adjust_lr_fn must be None"),
        ({"safety_factor": 1.01}, r"safety_factor=1\.01 of timm has no counterpart"),
        ({"conv_mode": "batched"}, "conv_mode='batched' of timm has no counterpart"),
        ({"algo": "adamuon"}, "algo='adamuon' of timm has no counterpart"),
        ({"scale_eps": True}, "scale_eps=True of timm has no counterpart"),
    ],
)
def test_refuses_other_formulas_of_timms_muon(options, text):
    params = as_parameters(make_weights([(8, 16)], torch.float32))
    optimizer = optim.Muon(params)
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=text):
        fusedstep.import_state_dict(optimizer, of_timm(params, **options))
    assert optimizer.state_dict() == before


def test_load_state_dict_leaves_timms_muon_to_import():
    params = as_parameters(make_weights([(8, 16)], torch.float32))
    with pytest.raises(ValueError, match=r"safety_factor=1\.0 has no .*import_state_dict"):
        optim.Muon(params).load_state_dict(of_timm(params))


def test_a_group_of_both_kinds_of_timms_muon_is_refused():
    params = as_parameters(make_weights([(8, 16), (4, 4)], torch.float32))
    dictionary = of_timm(params)
    dictionary["state"][1]["use_muon"] = False
    with pytest.raises(ValueError, match="timm's Muon steps and others that its AdamW does"):
        fusedstep.import_state_dict(optim.Muon(params), dictionary)
