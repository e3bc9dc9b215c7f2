"""Law: training goes on from the 8- and 4-bit states of bitsandbytes, and from ours."""

import copy
import io

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep.optim import low_bit
from support.foreign_codes import (
    CLASSES,
    OF_0,
    OF_1,
    SHAPES,
    SIGNED,
    UNSIGNED,
    assert_goes_on,
    assert_is_refused,
    assert_steps_as,
    bitsandbytes_dictionary,
    encoded_by_us,
    need_library,
    numbers_of,
    trained,
    weights,
)
from support.stepping import (
    as_parameters,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_weights,
    train,
)

EACH = pytest.mark.parametrize("name", CLASSES)


def flat(state):
    return state | state.get("__bnb_optimizer_quant_state__", {})


def in_numbers(state, number, block):
    """Decodes a state of bitsandbytes to float32."""
    state = flat(state)
    value = state[f"state{number}"]
    if value.dtype is torch.float32:
        return value
    absmax = state[f"absmax{number}"].repeat_interleave(block)[: value.numel()]
    return (state[f"qmap{number}"][value.flatten().long()] * absmax).view(value.shape)


# bitsandbytes


@pytest.mark.parametrize("nested", [True, False])
@EACH
def test_states_become_numbers(name, nested):
    cls, states, _, options = CLASSES[name]
    dictionary = bitsandbytes_dictionary(name, numbers_of(states), nested=nested)
    given, params = copy.deepcopy(dictionary), weights()
    optimizer = cls(params, **({"momentum": 0.5} if name == "SGD" else {}))
    fusedstep.import_state_dict(optimizer, dictionary)
    (group,) = optimizer.param_groups
    assert options.items() <= group.items()
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.125)
    assert group.keys() == cls(params).param_groups[0].keys()
    for index, param in enumerate(params):
        state = optimizer.state[param]
        assert state.keys() - {"step"} == states.keys()
        assert state.get("step", 3) == 3
        for number, ours in enumerate(states, 1):
            expected = in_numbers(given["state"][index], number, 256)
            assert_same_bits(state[ours], expected, ours)
            assert_same_bits(
                flat(dictionary["state"][index])[f"state{number}"],
                flat(given["state"][index])[f"state{number}"],
                "the dictionary",
            )
    assert_goes_on(optimizer, params)


@EACH
def test_codes_stay_where_the_map_is_the_same(name):
    cls, states, _, _ = CLASSES[name]
    dictionary, params = bitsandbytes_dictionary(name, numbers_of(states)), weights()
    optimizer = cls(params, state_dtype="int8")
    fusedstep.import_state_dict(optimizer, dictionary)
    for index, param in enumerate(params):
        theirs, state = flat(dictionary["state"][index]), optimizer.state[param]
        for number, (ours, signed) in enumerate(states.items(), 1):
            if param.numel() < 4096:
                assert_same_bits(state[ours], theirs[f"state{number}"], ours)
                continue
            if signed is not (number == 1):  # no map of ours for a signed state
                numbers = in_numbers(theirs, number, 256)
                codes, absmax = encoded_by_us(numbers, "int8", signed)
            else:
                codes, absmax = theirs[f"state{number}"], theirs[f"absmax{number}"]
            assert_same_bits(state[ours], codes, ours)
            assert_same_bits(state[f"{ours}_absmax"], absmax, f"{ours}_absmax")
    assert_goes_on(optimizer, params)


@pytest.mark.parametrize("nested", [True, False])
def test_a_run_that_moves_there_and_back_has_the_same_bits(nested):
    def start(steps):
        params = weights()
        optimizer = optim.AdamW(params, state_dtype="int8", betas=(0.8, 0.95), eps=1e-6)
        train(optimizer, params, range(1, steps + 1))
        return params, optimizer

    params, optimizer = start(3)
    dictionary = optimizer.state_dict()
    for state in dictionary["state"].values():
        quantised = {}
        for number, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
            quantised[f"state{number}"] = state.pop(name)
            if f"{name}_absmax" in state:
                quantised[f"absmax{number}"] = state.pop(f"{name}_absmax")
                quantised[f"qmap{number}"] = (SIGNED, UNSIGNED)[number - 1].float()
        state["step"] = int(state["step"])
        state |= {"__bnb_optimizer_quant_state__": quantised} if nested else quantised
    del dictionary["param_groups"][0]["state_dtype"]
    again = optim.AdamW(params, state_dtype="int8")
    fusedstep.import_state_dict(again, dictionary)
    train(again, params, [4, 5, 6])
    assert_same_contents(contents(again), contents(start(6)[1]))


@pytest.mark.parametrize("block", [64, 128, 512, 1024, 2048, 4096])
def test_other_blocks_become_numbers_first(block):
    """bitsandbytes had blocks of 2,048. What the length of absmax tells is not n / length: here
    5,003 elements are 20 blocks of 256."""
    states = CLASSES["AdamW"][1]
    dictionary, params = bitsandbytes_dictionary("AdamW", numbers_of(states), block), weights()
    coded = optim.AdamW(params, state_dtype="int8")
    plain = optim.AdamW(params)
    for optimizer in (coded, plain):
        fusedstep.import_state_dict(optimizer, dictionary)
    for index, param in enumerate(params):
        for number, (ours, signed) in enumerate(states.items(), 1):
            numbers = in_numbers(dictionary["state"][index], number, block)
            assert_same_bits(plain.state[param][ours], numbers, ours)
            if param.numel() >= 4096:
                codes, _ = encoded_by_us(numbers, "int8", signed)
                assert_same_bits(coded.state[param][ours], codes, ours)


def test_codes_of_a_map_in_another_order_are_renumbered():
    states = CLASSES["AdamW"][1]
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    shuffled = (SIGNED[order], UNSIGNED[order])
    dictionary = bitsandbytes_dictionary("AdamW", numbers_of(states), maps=shuffled)
    expected = bitsandbytes_dictionary("AdamW", numbers_of(states))
    params = weights()
    optimizer = optim.AdamW(params, state_dtype="int8")
    fusedstep.import_state_dict(optimizer, dictionary)
    for index, param in enumerate(params[:2]):
        for number, ours in enumerate(states, 1):
            codes = flat(expected["state"][index])[f"state{number}"]
            assert not torch.equal(flat(dictionary["state"][index])[f"state{number}"], codes)
            assert_same_bits(optimizer.state[param][ours], codes, ours)


def test_codes_of_another_map_become_numbers_first():
    """With a linear map the values of codes lie between those of ours."""
    states = CLASSES["AdamW"][1]
    linear = (torch.linspace(-1, 1, 256).double(), torch.linspace(0, 1, 256).double())
    dictionary = bitsandbytes_dictionary("AdamW", numbers_of(states), maps=linear)
    params = weights()
    optimizer = optim.AdamW(params, state_dtype="int8")
    fusedstep.import_state_dict(optimizer, dictionary)
    for number, (ours, signed) in enumerate(states.items(), 1):
        numbers = in_numbers(dictionary["state"][0], number, 256)
        codes, absmax = encoded_by_us(numbers, "int8", signed)
        assert_same_bits(optimizer.state[params[0]][ours], codes, ours)
        assert_same_bits(optimizer.state[params[0]][f"{ours}_absmax"], absmax, ours)


def test_states_of_lamb_are_read():
    numbers = numbers_of(CLASSES["Adam"][1])
    dictionary, params = bitsandbytes_dictionary("Adam", numbers), weights()
    for state in dictionary["state"].values():
        state["__bnb_optimizer_quant_state__"]["unorm_vec"] = torch.zeros(1)
    optimizer = optim.Lamb(params, state_dtype="int8")
    fusedstep.import_state_dict(optimizer, dictionary)
    codes = flat(dictionary["state"][0])
    assert_same_bits(optimizer.state[params[0]]["exp_avg"], codes["state1"], "exp_avg")
    assert "unorm_vec" not in optimizer.state[params[0]]
    assert_goes_on(optimizer, params)


@pytest.mark.parametrize("state_dtype", [None, "int8"])
def test_float32_states_of_16_bit_weights_stay(state_dtype):
    numbers = numbers_of(CLASSES["AdamW"][1])
    params = as_parameters(make_weights(SHAPES, torch.bfloat16))
    optimizer = optim.AdamW(params, state_dtype=state_dtype)
    fusedstep.import_state_dict(optimizer, bitsandbytes_dictionary("AdamW", numbers))
    assert_same_bits(optimizer.state[params[2]]["exp_avg"], numbers[2]["exp_avg"], "exp_avg")
    dtype = torch.float32 if state_dtype is None else torch.uint8
    assert optimizer.state[params[0]]["exp_avg"].dtype is dtype
    assert_goes_on(optimizer, params)


# Refusals


def edit_state(change):
    """Changes the tensors of the second weight's state, which has codes."""

    def edit(dictionary):
        state = dictionary["state"][1]
        change(state["__bnb_optimizer_quant_state__"])

    return edit


def cut(name):
    return edit_state(lambda state: state.update({name: state[name][:-1]}))


def drop(name):
    return edit_state(lambda state: state.pop(name))


def not_contiguous(dictionary):
    state = dictionary["state"][0]["__bnb_optimizer_quant_state__"]
    state["state1"] = state["state1"].t().contiguous().t()


REFUSALS = {
    "cut codes": (cut("state1"), rf"state1 {OF_1} has the shape \[5002\].*weight has \[5003\]"),
    "cut codes of the second": (cut("state2"), rf"state2 {OF_1} has the shape \[5002\]"),
    "cut absmax": (cut("absmax2"), rf"absmax2 {OF_1} has the shape \[19\]"),
    "cut map": (cut("qmap1"), rf"qmap1 {OF_1} must have 256 values, not \[255\]"),
    "no codes": (drop("state2"), f"the state {OF_1} has no state2, which .* for exp_avg_sq"),
    "no absmax": (drop("absmax1"), f"absmax1 {OF_1} must be a dense tensor .* is missing"),
    "no map": (drop("qmap2"), f"qmap2 {OF_1} must be a dense tensor .* is missing"),
    "a text": (
        edit_state(lambda state: state.update(state1="?")), f"state1 {OF_1} must be a dense tensor"
    ),
    "a number": (
        lambda d: d["state"].update({1: {"__bnb_optimizer_quant_state__": 3}}),
        f"__bnb_optimizer_quant_state__ {OF_1} must be a dict",
    ),
    "another order": (not_contiguous, "state1 of parameter 0 of group 0 is not contiguous"),
    "a count": (lambda d: d["state"][1].update(step=-1), f"step {OF_1} must be .* at least 0"),
    "no count": (lambda d: [s.pop("step") for s in d["state"].values()], "has no step"),
}  # fmt: skip


@pytest.mark.parametrize("state_dtype", [None, "int8"])
@pytest.mark.parametrize("what", REFUSALS)
def test_what_does_not_fit_is_refused(what, state_dtype):
    edit, text = REFUSALS[what]
    dictionary = bitsandbytes_dictionary("AdamW", numbers_of(CLASSES["AdamW"][1]))
    edit(dictionary)
    assert_is_refused(optim.AdamW, dictionary, text, state_dtype=state_dtype)


@pytest.mark.parametrize(
    ("theirs", "cls", "text"),
    [
        ("AdamW", optim.Lion, "has state2: it is one of Adam, AdamW or LAMB, not of Lion"),
        ("Lion", optim.AdamW, "has no state2, which AdamW takes for exp_avg_sq"),
        ("Lion", optim.RMSprop, "square_avg of parameter 0 of group 0 has negative numbers"),
        ("AdamW", optim.RAdam, "is one of bitsandbytes, which RAdam does not read; Adagrad, Adam,"),
    ],
    ids=str,
)
def test_states_of_another_optimizer_are_refused(theirs, cls, text):
    dictionary = bitsandbytes_dictionary(theirs, numbers_of(CLASSES[theirs][1]))
    assert_is_refused(cls, dictionary, text)


def test_states_of_lars_are_refused():
    dictionary = bitsandbytes_dictionary("SGD", numbers_of(CLASSES["SGD"][1]))
    dictionary["state"][0]["__bnb_optimizer_quant_state__"]["unorm_vec"] = torch.zeros(1)
    assert_is_refused(optim.SGD, dictionary, f"{OF_0} has unorm_vec: it is one of LARS, not of SGD")


def test_states_of_ademamix_are_refused():
    """It has two first moments in one tensor."""
    states = [{"state1": torch.ones(2, *shape), "state2": torch.ones(shape)} for shape in SHAPES]
    dictionary = {
        "state": {index: {"step": 3} | state for index, state in enumerate(states)},
        "param_groups": [CLASSES["AdamW"][2] | {"lr": 0.1, "alpha": 5.0, "params": [0, 1, 2]}],
    }
    text = rf"state1 {OF_0} has the shape \[2, 64, 80\], but the weight has \[64, 80\]"
    assert_is_refused(optim.AdamW, dictionary, text)


def test_load_state_dict_says_who_reads_them():
    params = weights()
    dictionary = bitsandbytes_dictionary("AdamW", numbers_of(CLASSES["AdamW"][1]))
    with pytest.raises(ValueError, match="import_state_dict loads dictionaries of other"):
        optim.AdamW(params).load_state_dict(dictionary)


# Optimizers of bitsandbytes


class _Arguments:
    def __init__(self, **values):
        vars(self).update(values)


def bitsandbytes_optimizer(name, params, suffix="8bit", prefix="", **arguments):
    """An optimizer in the middle of its training."""
    bits = 8 if suffix == "8bit" else 32
    module = f"bitsandbytes.optim.{name.lower()}"
    cls = type(f"{prefix}{name}{suffix}", (torch.optim.Optimizer,), {"__module__": module})
    base = "Adam" if name == "LAMB" else name
    numbers = numbers_of(CLASSES[base][1])
    optimizer = cls(params, {"lr": 0.25, "weight_decay": 0.125} | CLASSES[base][2])
    optimizer.args = _Arguments(optim_bits=bits, max_unorm=0.0, skip_zeros=False)
    vars(optimizer.args).update(arguments)
    dictionary = bitsandbytes_dictionary(base, numbers, nested=False)
    for index, param in enumerate(params):
        state = dictionary["state"][index]
        if bits == 32:
            state = {"step": 3} | {
                f"state{i}": value for i, value in enumerate(numbers[index].values(), 1)
            }
        optimizer.state[param] = state
    return optimizer


@pytest.mark.parametrize("suffix", ["8bit", "32bit", ""])
@EACH
def test_converts_optimizers(name, suffix):
    cls, states, _, options = CLASSES[name]
    params = weights()
    other = bitsandbytes_optimizer(name, params, suffix)
    converted = fusedstep.convert(other)
    assert type(converted) is cls
    (group,) = converted.param_groups
    kind = "int8" if suffix == "8bit" else torch.float32
    assert (options | {"lr": 0.25, "weight_decay": 0.125, "state_dtype": kind}).items() <= (
        group.items()
    )
    imported = cls(params, state_dtype=kind)
    fusedstep.import_state_dict(imported, other.state_dict())
    assert_same_contents(contents(converted), contents(imported))
    assert converted.state[params[0]].keys() >= states.keys()
    assert_goes_on(converted, params)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Lion"])
def test_converts_paged_optimizers(name):
    params = weights()
    converted = fusedstep.convert(bitsandbytes_optimizer(name, params, prefix="Paged"))
    assert type(converted) is CLASSES[name][0]
    assert converted.param_groups[0]["state_dtype"] == "int8"


def test_overrides_choose_other_states():
    params = weights()
    converted = fusedstep.convert(bitsandbytes_optimizer("AdamW", params), state_dtype="int4")
    assert converted.state[params[0]]["exp_avg"].shape == (64, 80 // 2)
    assert_goes_on(converted, params)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("LAMB", {}, "LAMB8bit has no trust ratio .* load the states by fusedstep.import_state_"),
        ("AdamW", {"max_unorm": 1.0}, r"max_unorm=1\.0 has no counterpart in AdamW"),
        ("Adam", {"skip_zeros": True}, "skip_zeros=True has no counterpart in Adam"),
        ("AdamW", {"percentile_clipping": 5}, "percentile_clipping=5 has no counterpart"),
    ],
)
def test_other_formulas_are_not_converted(name, arguments, text):
    with pytest.raises(ValueError, match=text):
        fusedstep.convert(bitsandbytes_optimizer(name, weights(), **arguments))


# Ours

ALIASES = [name for name in vars(low_bit) if name[-3:] in ("bit", "Fp8")]


@pytest.mark.parametrize("name", ALIASES)
def test_our_codes_are_converted_and_imported(name):
    cls = getattr(low_bit, name)
    options = {"momentum": 0.9} if name == "SGD8bit" else {}

    def start(steps):
        params = weights()
        optimizer = cls(params, **options)
        train(optimizer, params, range(1, steps + 1))
        return params, optimizer

    params, optimizer = start(3)
    before = contents(optimizer)
    again = cls(params, **options)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fusedstep.import_state_dict(again, torch.load(file, weights_only=True))
    assert_same_contents(contents(again), before)
    converted = fusedstep.convert(optimizer)
    assert type(converted) is cls
    assert_same_contents(contents(converted), before)
    train(converted, params, [4])
    assert_same_contents(contents(converted), contents(start(4)[1]))


# The libraries themselves, where they are installed


@pytest.mark.parametrize("suffix", ["8bit", "32bit"])
@EACH
def test_goes_on_from_bitsandbytes(monkeypatch, name, suffix):
    library = need_library(monkeypatch, "bitsandbytes.optim")
    options = {"momentum": 0.9} if name == "SGD" else {}
    params = weights()
    other = trained(getattr(library, f"{name}{suffix}"), params, weight_decay=0.1, **options)
    cls, states, _, _ = CLASSES[name]
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    kind = "int8" if suffix == "8bit" else None
    imported = cls(params, state_dtype=kind, **options)
    fusedstep.import_state_dict(imported, torch.load(file, weights_only=True))
    if kind and name not in ("Adagrad", "RMSprop"):
        for number, ours in enumerate(states, 1):
            codes = other.state[params[1]][f"state{number}"]
            assert_same_bits(imported.state[params[1]][ours], codes, ours)
    elif kind is None:
        numbers = other.state[params[1]]["state1"]
        assert_same_bits(imported.state[params[1]][next(iter(states))], numbers, "state1")
    if not (kind and name in ("Adagrad", "RMSprop")):  # their states are rounded once more
        assert_steps_as(other, params)


# Codes that a class of torch has loaded as numbers


def held_by_torch(name, dictionary):
    params = weights()
    options = {"momentum": 0.5} if name == "SGD" else {}
    namesake = getattr(torch.optim, name)(params, **options)
    namesake.load_state_dict(copy.deepcopy(dictionary))
    return namesake, getattr(optim, name)(weights(), **options)


IN_TORCH = [name for name in CLASSES if hasattr(torch.optim, name)]


@pytest.mark.parametrize("name", IN_TORCH)
def test_numbers_of_a_torch_class_that_are_codes_of_bitsandbytes(name):
    dictionary = bitsandbytes_dictionary(name, numbers_of(CLASSES[name][1]))
    namesake, ours = held_by_torch(name, dictionary)
    fusedstep.import_state_dict(ours, dictionary)
    _, imported = held_by_torch(name, dictionary)
    fusedstep.import_state_dict(imported, namesake.state_dict())
    for found in (fusedstep.convert(namesake), imported):
        assert_same_contents(contents(found), contents(ours))
    flat(namesake.state[namesake.param_groups[0]["params"][0]])["state1"] += 0.5
    with pytest.raises(ValueError, match=f"state1 {OF_0} has an absmax, but is not in codes"):
        fusedstep.convert(namesake)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", IN_TORCH)
def test_numbers_of_a_torch_class_that_are_codes_of_ours(name, kind):
    params = weights()
    momentum = {"momentum": 0.5} if name == "SGD" else {}
    source = getattr(optim, name)(params, state_dtype=kind, **momentum)
    train(source, params, [1, 2])
    dictionary = source.state_dict()
    del dictionary["param_groups"][0]["state_dtype"]
    namesake, ours = held_by_torch(name, dictionary)
    ours.load_state_dict(copy.deepcopy(dictionary))
    _, imported = held_by_torch(name, dictionary)
    with pytest.raises(ValueError, match=r"in numbers: torch's class|has the shape"):
        imported.load_state_dict(namesake.state_dict())
    fusedstep.import_state_dict(imported, namesake.state_dict())
    for found in (fusedstep.convert(namesake), imported):
        assert_same_contents(contents(found), contents(ours))
    if kind == "int4":
        return  # torch's class cannot step numbers of another shape
    train(namesake, namesake.param_groups[0]["params"], [3])
    for door in (
        lambda: fusedstep.convert(namesake),
        lambda: fusedstep.import_state_dict(imported, namesake.state_dict()),
    ):
        with pytest.raises(ValueError, match=f"{OF_0} has an absmax, but is not in codes"):
            door()


def test_numbers_that_are_codes_with_a_rounded_absmax_are_refused():
    params = as_parameters(make_weights(SHAPES, torch.bfloat16))
    source = optim.AdamW(params, state_dtype="int8")
    train(source, params, [1])
    namesake = torch.optim.AdamW(params)
    namesake.load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match=r"absmax of exp_avg .* was rounded to torch\.bfloat16"):
        fusedstep.convert(namesake)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("cls", [optim.Adagrad, optim.AdamW, optim.Rprop, optim.SGD])
def test_codes_that_torchs_class_has_stepped_are_refused(cls, kind):
    """Small gradients leave whole numbers in Adagrad's sum, and whole ones in Rprop's."""
    (weight,) = params = as_parameters([torch.ones(64, 64)])
    options = {"momentum": 0.9} if cls is optim.SGD else {}
    small = cls(params, state_dtype=kind, **options)
    weight.grad = torch.full_like(weight, 0.5)
    small.step()
    plain = getattr(torch.optim, cls.__name__)(params, **options)
    plain.load_state_dict(copy.deepcopy(small.state_dict()))
    fusedstep.convert(plain)
    weight.grad.fill_(1.0 if cls is optim.Rprop else 1e-5)
    plain.step()
    name = next(key for key in plain.state[weight] if f"{key}_absmax" in plain.state[weight])
    with pytest.raises(ValueError, match=f"{name} of parameter 0 of group 0 has an absmax, but"):
        fusedstep.convert(plain)
