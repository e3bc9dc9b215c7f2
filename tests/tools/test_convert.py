"""Law: training goes on in our optimizers where another library's stopped."""

import copy
import io

import pytest
import torch
from torch.optim import lr_scheduler

import fusedstep
from fusedstep import optim
from support.cases import (
    CASES,
    DTYPES,
    LOW_PRECISION,
    NAMESAKE_CHOICES,
    WITH_NAMESAKE,
    per_optimizer,
)
from support.foreign import (
    count_as_integers,
    count_in_the_group,
    count_in_the_group_as_a_tensor,
    count_in_the_last,
    dressed,
    no_count,
    sum_by_another_name,
)
from support.stepping import (
    CHUNK,
    as_parameters,
    assert_contents_close,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_weights,
    run,
    train,
)

SHAPES = ((), (33, 31), (CHUNK + 5,))
ROW = {case.name: case for case in CASES}
PLAIN_WITH_NAMESAKE = per_optimizer(WITH_NAMESAKE)


def namesake_after_three_steps(case, dtype=torch.float32, **options):
    params = as_parameters(make_weights(SHAPES, dtype))
    namesake = case.namesake(params, **case.options, **options)
    train(namesake, params, [1, 2, 3])
    return params, namesake


def steps_on(optimizer, params):
    """Three steps more, natively."""
    train(optimizer, params, [4, 5, 6])
    assert optimizer._isa() == fusedstep.isa()
    return contents(optimizer)


def assert_is_whole_run(case, found):
    """Six steps of ours in one go are as near as torch's maths allows."""
    _, whole = run(case, SHAPES, torch.float32, steps=6)
    assert_contents_close(found, contents(whole), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("case", "options"), NAMESAKE_CHOICES, ids=str)
def test_goes_on_where_the_namesake_stopped(case, options):
    params, namesake = namesake_after_three_steps(case, **options)
    converted = fusedstep.convert(namesake)
    assert type(converted) is case.optimizer
    assert all(map(lambda a, b: a is b, converted.param_groups[0]["params"], params))
    assert_same_contents(contents(converted), contents(namesake))
    assert_is_whole_run(case, steps_on(converted, params))


@pytest.mark.parametrize("case", WITH_NAMESAKE, ids=str)
def test_is_the_bits_of_a_loaded_dictionary(case):
    """The control of the tolerance above."""
    params, namesake = namesake_after_three_steps(case, foreach=False)
    loaded_params = as_parameters(params)
    loaded = case.build(loaded_params)
    loaded.load_state_dict(copy.deepcopy(namesake.state_dict()))
    loaded.param_groups[0] |= {"foreach": None, "fused": True}
    assert_same_contents(
        steps_on(fusedstep.convert(namesake), params), steps_on(loaded, loaded_params)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ours_go_on_in_the_native_kernels(case, dtype):
    params, optimizer = run(case, SHAPES, dtype, steps=3, fused=False)
    before = contents(optimizer)
    converted = fusedstep.convert(optimizer)
    assert type(converted) is type(optimizer)
    assert converted.param_groups[0].get("fused") is None
    assert_same_contents(contents(converted), before)
    steps_on(converted, params)


@pytest.mark.parametrize("case", PLAIN_WITH_NAMESAKE, ids=str)
def test_leaves_the_given_optimizer_alone(case):
    params, namesake = namesake_after_three_steps(case)
    before, groups = contents(namesake), copy.deepcopy(namesake.state_dict()["param_groups"])
    converted = fusedstep.convert(namesake, lr=0.5)
    assert_same_contents(contents(namesake), before)
    assert namesake.state_dict()["param_groups"] == groups
    states = {name: value.clone() for name, value in namesake.state[params[1]].items()}
    steps_on(converted, params)
    for name, value in states.items():
        assert_same_bits(namesake.state[params[1]][name], value, name)


@pytest.mark.parametrize("case", PLAIN_WITH_NAMESAKE, ids=str)
def test_before_the_first_step(case):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    converted = fusedstep.convert(case.build_namesake(params))
    train(converted, params, [1, 2, 3])
    assert_is_whole_run(case, steps_on(converted, params))


# Options


def grouped(named=False, **options):
    weights = as_parameters(make_weights([(4, 5)] * 3, torch.float32))
    members = list(zip(("a", "b", "c"), weights, strict=True)) if named else weights
    groups = [
        {"params": members[:2], "lr": 0.25, "label": "first"},
        {"params": members[2:], "weight_decay": 0.5, "initial_lr": 0.75, "betas": (0.5, 0.75)},
    ]
    return weights, torch.optim.AdamW(groups, **options)


def test_groups_keep_their_options():
    weights, theirs = grouped(lr=0.125, eps=1e-3, amsgrad=True, foreach=True)
    train(theirs, weights, [1])
    ours = fusedstep.convert(theirs)
    chosen = {"foreach": None, "fused": None}
    for group, expected in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert group == expected | chosen
    assert ours.defaults == theirs.defaults | chosen
    ours.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    assert ours.param_groups[2]["eps"] == 1e-3


def test_overrides_hold_for_all_groups_and_those_added_later():
    weights, theirs = grouped(lr=0.125)
    train(theirs, weights, [1])
    ours = fusedstep.convert(theirs, eps=1e-3, amsgrad=True, fused=True)
    ours.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    for group in ours.param_groups:
        assert (group["eps"], group["amsgrad"], group["fused"]) == (1e-3, True, True)
    assert [group["lr"] for group in ours.param_groups] == [0.25, 0.125, 0.125]
    train(ours, weights, [2])
    assert "max_exp_avg_sq" in ours.state[weights[0]]


def test_names_stay():
    weights, theirs = grouped(named=True)
    train(theirs, weights, [1])
    ours = fusedstep.convert(theirs)
    assert [group["param_names"] for group in ours.param_groups] == [["a", "b"], ["c"]]
    assert ours.state_dict()["param_groups"][1]["param_names"] == ["c"]


def test_a_tensor_lr_stays_the_same_tensor():
    weights = as_parameters(make_weights([(4, 5)], torch.float32))
    lr = torch.tensor(0.5)
    theirs = torch.optim.Adam(weights, lr=lr)
    train(theirs, weights, [1])
    ours = fusedstep.convert(theirs)
    assert ours.param_groups[0]["lr"] is lr
    lr.fill_(0.0)
    before = weights[0].detach().clone()
    train(ours, weights, [2])
    assert_same_bits(weights[0], before, "a step with the learning rate written to 0")


def test_differentiable_stays():
    weights = as_parameters(make_weights([(4, 5)], torch.float32))
    ours = fusedstep.convert(torch.optim.Adam(weights, differentiable=True))
    assert ours.param_groups[0]["differentiable"]


# bfloat16 and float16


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_float32_states_stay(dtype):
    """apex and DeepSpeed keep them for weights of 16 bits."""
    case = ROW["adamw"]
    params, source = run(case, SHAPES, dtype, steps=3, state_dtype=torch.float32)
    layout = LAYOUTS["apex-adam"]
    states = copy.deepcopy([source.state[param] for param in params])
    for converted in (
        fusedstep.convert(source),
        fusedstep.convert(dressed(source, *layout, adam_w_mode=1)),
        imported(optim.AdamW(params), dressed(source, *layout).state_dict()),
    ):
        for param, state in zip(params, states, strict=True):
            for name in case.states:
                assert_same_bits(converted.state[param][name], state[name], name)
    expected_params, expected = run(case, SHAPES, dtype, steps=6, state_dtype=torch.float32)
    steps_on(converted, params)
    assert_same_contents(contents(converted), contents(expected))
    assert expected.state[expected_params[0]]["exp_avg"].dtype is torch.float32


def test_state_dtype_widens_the_states():
    case = ROW["adam"]
    params, namesake = namesake_after_three_steps(case, torch.bfloat16)
    converted = fusedstep.convert(namesake, state_dtype=torch.float32)
    for param in params:
        for name in case.states:
            given, now = namesake.state[param][name], converted.state[param][name]
            assert_same_bits(now, given.float(), name)
    steps_on(converted, params)


def test_states_of_another_dtype_are_cast_as_by_load_state_dict():
    case = ROW["adam"]
    _, source = run(case, SHAPES, torch.bfloat16, steps=3)
    params = as_parameters(make_weights(SHAPES, torch.float32))
    optimizer = imported(case.build(params), source.state_dict())
    loaded = case.build(as_parameters(params))
    loaded.load_state_dict(source.state_dict())
    assert optimizer.state[params[1]]["exp_avg"].dtype is torch.float32
    assert_same_contents(contents(optimizer), contents(loaded))


# Schedulers


def sequential(optimizer):
    schedulers = [
        lr_scheduler.ConstantLR(optimizer, 0.5),
        lr_scheduler.ExponentialLR(optimizer, 0.5),
    ]
    return lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[4])


def chained(optimizer):
    schedulers = [lr_scheduler.StepLR(optimizer, 2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.ChainedScheduler(schedulers, optimizer)


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "Cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "OneCycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, 8),
    "Sequential": sequential,
    "Chained": chained,
    "Plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


# It cannot know that the new optimizer's step was called: it looks once, at its own first step.
@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(name):
    """As documented: each is given the new optimizer."""

    def rates(convert):
        weights, optimizer = grouped(lr=0.125)
        scheduler, found = SCHEDULERS[name](optimizer), []
        for step in range(1, 7):
            if convert and step == 4:
                optimizer = fusedstep.convert(optimizer)
                for each in (scheduler, *getattr(scheduler, "_schedulers", ())):
                    each.optimizer = optimizer
            train(optimizer, weights, [step])
            scheduler.step(*([1.0] if name == "Plateau" else []))
            found.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        return found

    expected = rates(convert=False)
    assert rates(convert=True) == expected
    assert expected[2] != expected[5]


# Refusals


class AdamWithMore(torch.optim.Adam):
    pass


class LambWithMore(optim.Lamb):
    pass


@pytest.mark.parametrize(
    "cls",
    [torch.optim.LBFGS, AdamWithMore, LambWithMore],
    ids=lambda c: c.__name__,
)
def test_refuses_other_classes(cls):
    with pytest.raises(TypeError, match=rf"optimizer is a [\w.]*\.{cls.__name__}\b") as refused:
        fusedstep.convert(cls([torch.zeros(2, requires_grad=True)]))
    for taken in ("torch.optim.AdamW", "torch.optim.Adagrad", "apex's FusedAdam", "deepspeed's"):
        assert taken in str(refused.value)
    additions = {"AdamWithMore": "to Adam would be lost", "LambWithMore": "to Lamb would be lost"}
    assert additions.get(cls.__name__, "") in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        ({"nesterov": True}, TypeError, "nesterov"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
        ({"foreach": True, "fused": True}, RuntimeError, "`fused` and `foreach` cannot"),
    ],
)
def test_refuses_overrides(overrides, error, text):
    with pytest.raises(error, match=text):
        fusedstep.convert(torch.optim.Adam([torch.zeros(2, requires_grad=True)]), **overrides)


# Other libraries

ADAM_OPTIONS = {"bias_correction": True}
LAYOUTS = {
    "apex-adam": ("apex", "FusedAdam", ADAM_OPTIONS, count_in_the_group),
    "apex-adam-capturable": ("apex", "FusedAdam", ADAM_OPTIONS, count_in_the_group_as_a_tensor),
    "deepspeed-cpu-adam": (
        "deepspeed", "DeepSpeedCPUAdam", ADAM_OPTIONS | {"amsgrad": False}, count_as_integers,
    ),
    "deepspeed-adam": ("deepspeed", "FusedAdam", ADAM_OPTIONS, count_in_the_last),
    "apex-adagrad": ("apex", "FusedAdagrad", {}, no_count),
    "deepspeed-cpu-adagrad": (
        "deepspeed", "DeepSpeedCPUAdagrad", {"amsgrad": False}, sum_by_another_name,
    ),
}  # fmt: skip
ADAM_LAYOUTS = [name for name in LAYOUTS if "adam" in name]
ADAGRAD_LAYOUTS = [name for name in LAYOUTS if "adagrad" in name]
ROWS = [
    *(
        (case, layout)
        for case in CASES
        if case.name in ("adam", "adam-l2", "adamw")
        for layout in ADAM_LAYOUTS
    ),
    *((case, layout) for case in CASES if case.name == "adagrad" for layout in ADAGRAD_LAYOUTS),
]
APEX_LAMB = {"bias_correction": True, "grad_averaging": True, "max_grad_norm": 1.0}
TIMM_LAMB = APEX_LAMB | {
    "trust_clip": False, "always_adapt": False, "caution": False, "decoupled_decay": False,
    "corrected_weight_decay": False,
}  # fmt: skip
DEEPSPEED_LAMB = {
    "bias_correction": True, "max_grad_norm": 0.0, "max_coeff": 10.0, "min_coeff": 0.01,
}  # fmt: skip
LAMB_LAYOUTS = [
    ("apex", "FusedLAMB", APEX_LAMB, count_in_the_group, {"variant": "apex"}),
    ("apex", "FusedLAMB", APEX_LAMB | {"max_grad_norm": 0.5}, count_in_the_group,
     {"variant": "nvlamb", "max_grad_norm": 0.5}),
    ("apex", "FusedLAMB", APEX_LAMB | {"bias_correction": False}, count_in_the_group,
     {"variant": "apex", "debias": False}),
    ("timm", "Lamb", TIMM_LAMB, count_in_the_group_as_a_tensor, {"variant": "timm"}),
    ("timm", "Lamb", TIMM_LAMB | {"trust_clip": True, "max_grad_norm": None}, count_in_the_group,
     {"variant": "timm", "max_ratio": 1.0, "max_grad_norm": float("inf")}),
    ("timm", "Lamb", TIMM_LAMB | {"always_adapt": True, "decoupled_decay": True},
     count_in_the_group, {"variant": "timm", "always_adapt": True, "decoupled_decay": True}),
    ("deepspeed", "FusedLamb", DEEPSPEED_LAMB, count_as_integers, {"variant": "deepspeed"}),
    ("deepspeed", "FusedLamb", DEEPSPEED_LAMB | {"max_coeff": 1.5, "min_coeff": 0.5},
     count_as_integers, {"variant": "deepspeed", "max_ratio": 1.5, "min_ratio": 0.5}),
]  # fmt: skip


def foreign(case, layout):
    params, namesake = namesake_after_three_steps(case)
    decoupled = case.optimizer is optim.AdamW
    modes = {"adam_w_mode": int(decoupled), "adagrad_w_mode": 0}
    return params, dressed(namesake, *LAYOUTS[layout], **modes)


def imported(optimizer, dictionary):
    fusedstep.import_state_dict(optimizer, dictionary)
    return optimizer


def without_counts(found):
    return {name: value for name, value in found.items() if not name.startswith("step")}


@pytest.mark.parametrize(("case", "layout"), ROWS, ids=str)
def test_converts_relatives(case, layout):
    params, other = foreign(case, layout)
    converted = fusedstep.convert(other)
    assert type(converted) is case.optimizer
    _, whole = run(case, SHAPES, torch.float32, steps=6)
    found, expected = steps_on(converted, params), contents(whole)
    if layout == "apex-adagrad":  # it never counted
        found, expected = without_counts(found), without_counts(expected)
    assert_contents_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_weight_that_was_frozen_for_a_while_keeps_its_count():
    """Counts of DeepSpeed's CPU Adam differ by right; only 0 beside moments is none."""
    params, other = foreign(ROW["adam"], "deepspeed-cpu-adam")
    other.state[params[0]]["step"] = 1
    for value in other.state[params[1]].values():
        value *= 0
    other.state[params[1]]["step"] = 0
    converted = fusedstep.convert(other)
    assert [converted.state[param]["step"].item() for param in params] == [1, 0, 3]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("case", "layout"), ROWS, ids=str)
def test_imports_dictionaries(case, layout, fused):
    params, other = foreign(case, layout)
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    optimizer = case.build(params, lr=0.5, fused=fused)
    fusedstep.import_state_dict(optimizer, torch.load(file, weights_only=True))
    assert optimizer.param_groups[0]["fused"] is fused
    assert optimizer.param_groups[0]["lr"] == case.lr
    assert not {"bias_correction", "step"} & optimizer.param_groups[0].keys()
    train(optimizer, params, [4, 5, 6])
    _, whole = run(case, SHAPES, torch.float32, steps=6)
    found, expected = contents(optimizer), contents(whole)
    if layout == "apex-adagrad":
        found, expected = without_counts(found), without_counts(expected)
    assert_contents_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("package", "name", "options", "count", "ours"),
    LAMB_LAYOUTS,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_imports_dictionaries_of_lamb(package, name, options, count, ours):
    """Imports into an optimizer of the variant: all else is in the dictionary."""
    params, source = run(ROW["lamb"], SHAPES, torch.float32, steps=3, **ours)
    dictionary = dressed(source, package, name, options, count).state_dict()
    optimizer = optim.Lamb(params, variant=ours["variant"])
    fusedstep.import_state_dict(optimizer, dictionary)
    assert optimizer.param_groups[0].keys() == source.param_groups[0].keys()
    train(optimizer, params, [4, 5, 6])
    _, whole = run(ROW["lamb"], SHAPES, torch.float32, steps=6, **ours)
    assert_same_contents(contents(optimizer), contents(whole))


@pytest.mark.parametrize("option", ["caution", "corrected_weight_decay"])
def test_refuses_another_formula_of_lamb(option):
    params, source = run(ROW["lamb"], SHAPES, torch.float32, steps=1)
    other = dressed(source, "timm", "Lamb", TIMM_LAMB | {option: True}, count_in_the_group)
    with pytest.raises(ValueError, match=f"{option}=True has no counterpart in Lamb"):
        fusedstep.import_state_dict(optim.Lamb(params), other.state_dict())


@pytest.mark.parametrize("case", WITH_NAMESAKE, ids=str)
def test_imports_torchs_dictionaries_and_stays_native(case):
    params, namesake = namesake_after_three_steps(case, foreach=True)
    optimizer = case.build(params)
    fusedstep.import_state_dict(optimizer, namesake.state_dict())
    assert_is_whole_run(case, steps_on(optimizer, params))


def test_options_that_a_dictionary_lacks_stay():
    params, other = foreign(WITH_NAMESAKE[0], "apex-adam")
    named = list(zip("abc", params, strict=True))
    optimizer = optim.Adam(named, maximize=True, amsgrad=False)
    dictionary = other.state_dict()
    dictionary["param_groups"][0]["label"] = "mine"
    fusedstep.import_state_dict(optimizer, dictionary)
    (group,) = optimizer.param_groups
    assert (group["maximize"], group["label"], group["param_names"]) == (
        True,
        "mine",
        ["a", "b", "c"],
    )


def edited(**edits):
    def edit(dictionary):
        dictionary["param_groups"][0].update(edits)

    return edit


def flatten_states(dictionary):
    """ZeRO's, and those of the fp16 wrappers."""
    state = dictionary["state"][1]
    state["exp_avg"] = state["exp_avg"].reshape(-1)


def drop_a_moment(dictionary):
    del dictionary["state"][1]["exp_avg_sq"]


def drop_a_parameter(dictionary):
    dictionary["param_groups"][0]["params"].pop()


def wrap(dictionary):
    inner = dict(dictionary)
    dictionary.clear()
    dictionary["optimizer"] = inner


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (edited(bias_correction=False), "bias_correction=False has no counterpart in AdamW"),
        (edited(grad_averaging=False), "grad_averaging=False has no counterpart in AdamW"),
        (edited(min_coeff=0.01), "min_coeff=0.01 has no counterpart"),
        (flatten_states, r"exp_avg of parameter 1 of group 0 has the shape \[1023\]"),
        (drop_a_moment, "the state of parameter 1 of group 0 has no exp_avg_sq"),
        (drop_a_parameter, r"groups of \[2\] parameters, but the optimizer of \[3\]"),
        (wrap, r"must have 'state' .* \['optimizer'\]: pass state_dict\['optimizer'\]$"),
    ],
)
def test_import_refuses_what_does_not_fit(edit, text):
    case = ROW["adamw"]
    params, other = foreign(case, "apex-adam")
    dictionary = copy.deepcopy(other.state_dict())
    edit(dictionary)
    optimizer = case.build(params)
    train(optimizer, params, [1])
    before, groups = contents(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=text):
        fusedstep.import_state_dict(optimizer, dictionary)
    assert_same_contents(contents(optimizer), before)
    assert optimizer.state_dict()["param_groups"] == groups


def test_import_refuses_states_of_another_optimizer():
    case = ROW["adagrad"]
    params, other = foreign(case, "apex-adagrad")
    text = "has no exp_avg, exp_avg_sq, step: it is not one of Adam[^.]*$"
    with pytest.raises(ValueError, match=text):
        fusedstep.import_state_dict(optim.Adam(params), other.state_dict())


def test_import_takes_our_optimizers_only():
    theirs = torch.optim.Adam([torch.zeros(2, requires_grad=True)])
    with pytest.raises(TypeError, match="optimizer must be one of fusedstep"):
        fusedstep.import_state_dict(theirs, theirs.state_dict())


def test_master_weights_of_apex_go_on():
    case = ROW["adam"]
    params, ours = run(case, SHAPES, torch.bfloat16, steps=3, master_weights=True)
    _, whole = run(case, SHAPES, torch.bfloat16, steps=6, master_weights=True)
    masters = [ours.state[param].pop("master_param") for param in params]
    other = dressed(
        ours,
        *LAYOUTS["apex-adam"],
        adam_w_mode=0,
        master_weights=True,
        param_groups_master=[{"params": masters}],
    )
    assert_same_contents(steps_on(fusedstep.convert(other), params), contents(whole))


def test_refuses_a_relative_with_another_formula():
    _, other = foreign(ROW["adagrad"], "apex-adagrad")
    other.adagrad_w_mode = 1
    with pytest.raises(ValueError, match="adagrad_w_mode=True has no counterpart"):
        fusedstep.convert(other)


def test_refuses_the_decay_of_deepspeeds_adagrad():
    case = ROW["adagrad"]
    _, other = foreign(case, "deepspeed-cpu-adagrad")
    other.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ValueError, match="weight_decay has no counterpart"):
        fusedstep.convert(other)


@pytest.mark.parametrize("name", ["previous_grad", "another_grad"])
def test_a_state_of_adan_under_another_name_is_taken_or_refused(name):
    weight = torch.nn.Parameter(torch.ones(3))
    old, new = optim.Adan([weight]), optim.Adan([weight])
    weight.grad = torch.ones(3)
    old.step()
    saved = copy.deepcopy(old.state_dict())
    saved["state"][0][name] = saved["state"][0].pop("neg_pre_grad")
    if name == "another_grad":
        with pytest.raises(ValueError, match=r"another_grad|neg_pre_grad"):
            fusedstep.import_state_dict(new, saved)
        return
    fusedstep.import_state_dict(new, saved)
    assert torch.equal(new.state[weight]["neg_pre_grad"], -weight.grad)


OWN = {
    "Adafactor": {"variant": "transformers", "clip_threshold": 0.5, "decay_rate": -0.7},
    "CAME": {"clip_threshold": 0.5, "betas": (0.8, 0.9, 0.95), "eps": (1e-20, 1e-10)},
    "GaLoreAdafactor": {"clip_threshold": 0.5, "decay_rate": -0.7, "beta1": 0.8},
    "GaLoreAdamW": {"correct_bias": False, "betas": (0.8, 0.9)},
    "MuSGD": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    "RowWiseAdagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.1},
}


@pytest.mark.parametrize("name", OWN)
def test_composites_keep_options_that_are_not_the_defaults(name):
    cls = getattr(optim, name)
    params = as_parameters(make_weights(SHAPES, torch.float32))
    optimizer = cls(params, lr=0.01, **OWN[name])
    train(optimizer, params, [1, 2, 3])
    copies = as_parameters(params)
    twin = cls(copies, lr=0.01, **OWN[name])
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    converted = fusedstep.convert(twin)
    assert optimizer.defaults.items() <= converted.defaults.items()
    for each, weights in ((optimizer, params), (converted, copies)):
        train(each, weights, [4, 5, 6])
    assert_same_contents(contents(converted), contents(optimizer))
