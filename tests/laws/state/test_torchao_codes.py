"""Law: training goes on from the 8- and 4-bit states of torchao."""

import io

import pytest
import torch

import fusedstep
from fusedstep import optim
from reference.codes import MAPS
from support.cuda_device import needs_cuda
from support.foreign import InCodes, torchao_state
from support.foreign_codes import (
    OF_0,
    SHAPES,
    assert_goes_on,
    assert_is_refused,
    assert_steps_as,
    encoded_by_us,
    need_library,
    numbers_of,
    trained,
    weights,
)
from support.stepping import assert_same_bits, assert_same_contents, contents, make_gradients

KINDS = {"int8": 256, "int4": 128, "fp8": 256}


def torchao_dictionary(numbers, kind, block):
    return {
        "state": {
            index: {"step": torch.tensor(3.0)}
            | {
                name: torchao_state(value, kind, MAPS[kind, name == "exp_avg"][0], block)
                for name, value in tensors.items()
            }
            for index, tensors in enumerate(numbers)
        },
        "param_groups": [
            {"lr": torch.tensor(0.25), "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.125,
             "amsgrad": "max_exp_avg_sq" in numbers[0], "params": list(range(len(numbers)))}
        ],
    }  # fmt: skip


def decoded(value, kind):
    """Decodes a state of torchao to float32."""
    if not isinstance(value, InCodes):
        return value
    codes = value.codes.flatten()
    if kind == "int4":
        codes = torch.stack([codes >> 4, codes & 15], 1).flatten()
    values = codes.float() if kind == "fp8" else value.qmap[codes.long()]
    return (values.view(len(value.scale), -1) * value.scale[:, None]).view(value.shape)


ADAM_STATES = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}


@pytest.mark.parametrize("block", [128, 256, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_torchao(kind, block):
    numbers = numbers_of(ADAM_STATES)
    dictionary, params = torchao_dictionary(numbers, kind, block), weights()
    plain, coded = (optim.AdamW(params, state_dtype=each) for each in (None, kind))
    for optimizer in (plain, coded):
        fusedstep.import_state_dict(optimizer, dictionary)
        assert optimizer.param_groups[0]["lr"] == 0.25
    for index, param in enumerate(params):
        for name, signed in ADAM_STATES.items():
            theirs = dictionary["state"][index][name]
            expected = decoded(theirs, kind)
            assert_same_bits(plain.state[param][name], expected, name)
            if not isinstance(theirs, InCodes):
                continue
            codes, absmax = theirs.codes, theirs.scale * (448 if kind == "fp8" else 1)
            if block != KINDS[kind]:
                codes, absmax = encoded_by_us(expected, kind, signed)
            for found, expected in ((name, codes), (f"{name}_absmax", absmax)):
                found = coded.state[param][found]
                assert_same_bits(found, expected.view_as(found), name)
    assert isinstance(dictionary["state"][0]["exp_avg"], InCodes)
    assert not isinstance(dictionary["state"][1]["exp_avg"], InCodes)
    for optimizer in (plain, coded):
        assert_goes_on(optimizer, params)


def cut_part(name, part):
    def edit(dictionary):
        value = dictionary["state"][0][name]
        setattr(value, part, getattr(value, part)[:-1])

    return edit


def of_another_shape(dictionary):
    value = dictionary["state"][0]["exp_avg"]
    parts = {name: vars(value)[name] for name in ("codes", "scale", "qmap") if name in vars(value)}
    dictionary["state"][0]["exp_avg"] = InCodes((80, 64), **parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (cut_part("exp_avg", "codes"), rf"exp_avg {OF_0} has the shape .*codes of .*\[64, 80\]"),
        (cut_part("exp_avg_sq", "scale"), rf"scale of exp_avg_sq {OF_0} has \d+ numbers"),
        (of_another_shape, rf"exp_avg {OF_0} has the shape \[80, 64\] .* has \[64, 80\]"),
        (
            lambda d: d["state"][0].pop("exp_avg_sq"),
            "the state of parameter 0 of group 0 has no exp_avg_sq",
        ),
    ],
    ids=["codes", "scale", "shape", "missing"],
)
def test_what_does_not_fit_of_torchao_is_refused(kind, edit, text):
    dictionary = torchao_dictionary(numbers_of(ADAM_STATES), kind, KINDS[kind])
    edit(dictionary)
    assert_is_refused(optim.AdamW, dictionary, text)


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("qmap", torch.zeros(100), r"qmap of 256 or 16 values; it has torch.uint8 and \[100\]"),
        ("codes", torch.zeros(64, 80, dtype=torch.int32), "it has torch.int32"),
        ("scale", None, f"the scale of exp_avg {OF_0} must be a dense tensor"),
        ("qmap", None, f"the qmap of exp_avg {OF_0} must be a dense tensor"),
    ],
)
def test_other_codes_of_torchao_are_refused(part, value, text):
    dictionary = torchao_dictionary(numbers_of(ADAM_STATES), "int8", 256)
    setattr(dictionary["state"][0]["exp_avg"], part, value)
    assert_is_refused(optim.AdamW, dictionary, text)


def test_load_state_dict_refuses_tensors_of_torchao():
    params = weights()
    optimizer = optim.AdamW(params)
    dictionary = torchao_dictionary(numbers_of(ADAM_STATES), "int8", 256)
    text = f"exp_avg {OF_0} has the codes of another library; fusedstep.import_state_dict"
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(dictionary)
    assert not optimizer.state


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize(("suffix", "kind"), [("8bit", "int8"), ("4bit", "int4"), ("Fp8", "fp8")])
@pytest.mark.parametrize("base", [optim.Adam, optim.AdamW])
def test_converts_optimizers_of_torchao(base, suffix, kind, rounded):
    name, params = f"{base.__name__}{suffix}", weights()
    cls = type(name, (torch.optim.Optimizer,), {"__module__": "torchao.optim.adam"})
    dictionary = torchao_dictionary(numbers_of(ADAM_STATES), kind, KINDS[kind])
    options = {k: v for k, v in dictionary["param_groups"][0].items() if k != "params"}
    other = cls(params, options)
    other.bf16_stochastic_round = rounded
    for index, param in enumerate(params):
        other.state[param] = dictionary["state"][index]
    converted = fusedstep.convert(other)
    assert type(converted) is base
    (group,) = converted.param_groups
    assert group["state_dtype"] == kind
    assert group.get("rounding") == ("stochastic" if rounded else None)
    assert group["lr"] is other.param_groups[0]["lr"]
    imported = base(params, state_dtype=kind)
    fusedstep.import_state_dict(imported, dictionary)
    assert_same_contents(contents(converted), contents(imported))
    assert_goes_on(converted, params)


@pytest.mark.parametrize(("suffix", "kind"), [("8bit", "int8"), ("4bit", "int4"), ("Fp8", "fp8")])
@pytest.mark.parametrize("base", ["Adam", "AdamW"])
def test_goes_on_from_torchao(monkeypatch, base, suffix, kind):
    library, params = need_library(monkeypatch, "torchao.optim"), weights()
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    other = trained(getattr(library, f"{base}{suffix}"), params, weight_decay=0.1)
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    imported = getattr(optim, base)(params, state_dtype=kind)
    fusedstep.import_state_dict(imported, torch.load(file, weights_only=True))
    found = imported.state[params[0]]["exp_avg"]
    codes = other.state[params[0]]["exp_avg"].codes.view(found.shape)  # those of 4 bits are flat
    assert_same_bits(found, codes, "exp_avg")
    assert_steps_as(other, params)


@pytest.mark.parametrize(("suffix", "kind"), [("8bit", "int8"), ("4bit", "int4"), ("Fp8", "fp8")])
def test_weights_of_no_whole_number_of_blocks_keep_their_numbers(suffix, kind):
    """They get a group of their own, unless all large weights of theirs are such."""
    params = weights()
    cls = type(f"AdamW{suffix}", (torch.optim.Optimizer,), {"__module__": "torchao.optim.adam"})
    named = list(zip("abc", params, strict=True))
    options = {"lr": 0.25, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    other = cls([{"params": named, "lr": 0.5}], options | {"amsgrad": False})
    other.bf16_stochastic_round, other.block_size = False, KINDS[kind]
    states = torchao_dictionary(numbers_of(ADAM_STATES), kind, KINDS[kind])["state"]
    for index, param in enumerate(params):
        other.state[param] = states[index]
    converted = fusedstep.convert(other)
    assert [group["param_names"] for group in converted.param_groups] == [["a", "c"], ["b"]]
    assert [group["lr"] for group in converted.param_groups] == [0.5, 0.5]
    assert_same_bits(converted.state[params[1]]["exp_avg"], states[1]["exp_avg"], "exp_avg")
    assert "exp_avg_absmax" in converted.state[params[0]]
    (group,) = fusedstep.convert(other, state_dtype=kind).param_groups
    assert group["state_dtype"] == kind
    other.param_groups[0] |= {"params": params[1:], "param_names": ["b", "c"]}
    (group,) = fusedstep.convert(other).param_groups
    assert group.get("state_dtype") is None


@needs_cuda
def test_ours_is_taken_by_the_offloading_of_torchao(monkeypatch):
    """It makes an optimizer for each large weight, and one on the GPU for the others."""
    library = need_library(monkeypatch, "torchao.optim")
    params, others = ([p.detach().cuda().requires_grad_() for p in weights()] for _ in range(2))
    offloaded = library.CPUOffloadOptimizer(params, optim.AdamW, lr=0.01, weight_decay=0.1)
    expected = optim.AdamW(others, lr=0.01, weight_decay=0.1)
    for step in range(1, 4):
        gradients = [g.cuda() for g in make_gradients(SHAPES, torch.float32, step)]
        for each in (params, others):
            losses = [(p * g).sum() for p, g in zip(each, gradients, strict=True)]
            torch.stack(losses).sum().backward()
        for optimizer in (offloaded, expected):
            optimizer.step()
            optimizer.zero_grad()
    made = [*offloaded.optim_dict.values(), offloaded.d_opt]
    assert len(made) == len(params)
    assert all(type(each) is optim.AdamW and each._plans for each in made)
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other)
