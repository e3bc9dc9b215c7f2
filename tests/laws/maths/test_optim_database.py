"""Law: on every input of torch's optimizer database ours does what torch's class does.

The database is what torch tests its optimizers with. An optimizer that torch has not is given its
rows of tests/optimizers in that form.
"""

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInput,
    optim_db,
)

from fusedstep import optim
from support.cases import CASES, Tolerance
from support.peers import (
    ALL,
    MODES,
    NAMESAKES,
    ROWS,
    WITH_FOREACH,
    WITHOUT_FUSED,
    Difference,
    check_is_told,
    check_same_unless_listed,
    fitted,
    having,
    outcome_of,
    peer_of,
)
from support.stepping import Bounds, contents, make_gradients, make_weights

pytestmark = pytest.mark.whole(mode="default")

SHAPES = ((), (7,), (33, 31), (0,))
STEPS = 7
ALL_MODES = MODES | {"differentiable": {"differentiable": True, "fused": None}}


class Entry(NamedTuple):
    cls: type
    inputs: Callable
    error_inputs: Callable


INFOS = {info.name: info for info in optim_db}


def entry_of_namesake(cls):
    info = INFOS[cls.__name__]
    return Entry(cls, info.optim_inputs_func, info.optim_error_inputs_func)


def entry_of_others(cls):
    """Inputs in torch's form, and its rows; the errors of the class that its peer is made of."""
    names = inspect.signature(cls).parameters.keys()
    options = {
        "default": {},
        "Tensor lr": {"lr": torch.tensor(0.001)},
        "Tensor betas": {"betas": (torch.tensor(0.8), torch.tensor(0.95))},
        "capturable": {"capturable": True},
    }
    options = {desc: kwargs for desc, kwargs in options.items() if kwargs.keys() <= names}
    for case in CASES:
        if case.optimizer is cls and case.reference is ROWS[cls].reference:
            options[case.name] = case.options | case.modes
    base = ROWS[cls].nearest

    def inputs(device):
        return [
            OptimizerInput(None, fitted(cls, kwargs), desc=desc) for desc, kwargs in options.items()
        ]

    def error_inputs(device, dtype):
        given = INFOS[base.__name__].optim_error_inputs_func(device, dtype)
        for each in given:
            each.optimizer_error_input.kwargs = fitted(cls, each.optimizer_error_input.kwargs)
        compared = names if cls in WITH_FOREACH else names - {"foreach"}
        return [each for each in given if each.optimizer_error_input.kwargs.keys() <= compared]

    return Entry(cls, inputs, error_inputs)


DATABASE = [entry_of_namesake(cls) if cls in NAMESAKES else entry_of_others(cls) for cls in ALL]

# Options that torch has no input for. Each is built, and steps twice, in each mode.
OPTIONS = [
    {"lr": 0},
    {"lr": 2},
    {"lr": -0.1},
    {"lr": float("nan")},
    {"lr": torch.tensor(-0.1)},
    {"lr": torch.tensor([[0.1]])},
    {"lr": torch.tensor(0.1, requires_grad=True)},
    {"eps": 0},
    {"eps": -1e-8},
    {"eps": float("nan")},
    {"eps": torch.tensor(1e-3)},
    {"weight_decay": 1},
    {"weight_decay": -0.1},
    {"weight_decay": float("nan")},
    {"weight_decay": torch.tensor(0.1)},
    {"betas": (0.0, 0.0)},
    {"betas": [0.8, 0.9]},
    {"betas": (0, 0.9)},
    {"betas": (0.9,)},
    {"betas": (0.9, 0.99, 0.999)},
    {"betas": (-0.1, 0.999)},
    {"betas": (0.9, -0.5)},
    {"betas": (0.9, 1.0)},
    {"betas": (float("nan"), 0.999)},
    {"betas": (torch.tensor(0.8), torch.tensor([0.9]))},
    {"lr_decay": 1},
    {"lr_decay": float("nan")},
    {"lr_decay": torch.tensor(0.1)},
    {"initial_accumulator_value": 1},
    {"initial_accumulator_value": -0.1},
    {"amsgrad": 1},
    {"maximize": 1},
    {"capturable": True},
    {"capturable": True, "foreach": True},
    {"differentiable": True},
    {"differentiable": True, "foreach": True},
    {"fused": True, "foreach": True},
    {"fused": True, "differentiable": True},
    {"fused": True, "foreach": False},
    {"decoupled_weight_decay": True, "weight_decay": 0.1},
    {"no such option": 1},
]

ANOTHER_NUMBER = "`betas` of another number"
FOREACH = "`differentiable` with `foreach=True`"
NOT_SGD = tuple(cls for cls in WITH_FOREACH if cls is not optim.SGD)
WITH_FUSED = tuple(cls for cls in ALL if cls not in WITHOUT_FUSED)
CAPTURABLE = {
    *(
        each.desc
        for entry in DATABASE
        for each in entry.inputs(device="cuda")
        if each.kwargs.get("capturable")
    ),
    str({"capturable": True}),
}
ZERO_BETA = str({"betas": (0, 0.9)})
ONE_DIMENSION = str({"betas": (torch.tensor(0.8), torch.tensor([0.9]))})


def differences_of_capturable():
    """Only the mode `fused=True` takes it where torch's class has `fused`."""
    for what in sorted(CAPTURABLE):
        for classes, modes in ((WITH_FUSED, ("default",)), (WITHOUT_FUSED, ("default", "fused"))):
            classes = tuple(cls for cls in classes if cls in having("capturable"))
            yield Difference("`capturable=True` on a CPU weight", what, classes, modes)


DIFFERENCES = [
    *differences_of_capturable(),
    Difference(
        "a tensor `lr` that requires a gradient",
        str({"lr": torch.tensor(0.1, requires_grad=True)}),
        (optim.Rprop,),
        tuple(ALL_MODES),
    ),
    Difference(
        "`capturable=True` on a CPU weight",
        str({"capturable": True, "foreach": True}),
        tuple(cls for cls in having("capturable") if cls not in WITH_FOREACH),
        ("default", "foreach"),
    ),
    Difference(
        "whole numbers among `betas`",
        ZERO_BETA,
        tuple(cls for cls in having("betas") if cls in WITH_FUSED),
        tuple(ALL_MODES),
    ),
    Difference("`betas` as tensors", ONE_DIMENSION, (optim.NAdam, optim.RAdam), tuple(ALL_MODES)),
    Difference("`betas` as tensors", ONE_DIMENSION, (optim.Adamax,), ("foreach",)),
    Difference(
        "`fused=True` with a weight twice",
        "a param group cannot have duplicate parameters",
        ALL,
        ("fused",),
    ),
    Difference(
        "`fused=True` with a number for a flag",
        str({"amsgrad": 1}),
        having("amsgrad"),
        ("fused",),
    ),
    Difference(
        "`fused=True` with a number for a flag", str({"maximize": 1}), WITH_FUSED, ("fused",)
    ),
    Difference(
        "an option of another library",
        str({"amsgrad": 1}),
        tuple(cls for cls in NAMESAKES if not ROWS[cls].has("amsgrad")),
        tuple(ALL_MODES),
    ),
    Difference(ANOTHER_NUMBER, str({"betas": (0.9,)}), having("betas"), tuple(ALL_MODES)),
    Difference(
        ANOTHER_NUMBER,
        str({"betas": (0.9, 0.99, 0.999)}),
        tuple(cls for cls in having("betas") if len(ROWS[cls].betas) == 2),
        tuple(ALL_MODES),
    ),
    *(
        Difference("NaN for `lr`", str({name: float("nan")}), (optim.SGD,), tuple(ALL_MODES))
        for name in ("lr", "weight_decay")
    ),
    Difference(FOREACH, str({"differentiable": True}), NOT_SGD, ("foreach",)),
    Difference(
        FOREACH,
        str({"capturable": True, "foreach": True}),
        WITHOUT_FUSED,
        ("differentiable",),
    ),
    Difference(
        FOREACH,
        str({"differentiable": True, "foreach": True}),
        NOT_SGD,
        ("default", "unfused", "foreach", "differentiable"),
    ),
]


def entry_of(cls):
    (entry,) = (entry for entry in DATABASE if entry.cls is cls)
    return entry


def steps(cls, kwargs, dtype=torch.float32, count=STEPS):
    """Copies of weights and states after each step."""
    params = make_weights(SHAPES, dtype)
    if not kwargs.get("differentiable"):
        params = [param.requires_grad_() for param in params]
    optimizer = cls(params, **copy.deepcopy(kwargs))
    found = []
    for step in range(1, count + 1):
        for param, gradient in zip(params, make_gradients(SHAPES, dtype, step), strict=True):
            param.grad = gradient
        optimizer.step()
        found.append(
            [(_copy(p), {k: _copy(v) for k, v in optimizer.state[p].items()}) for p in params]
        )
    return found


def _copy(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def for_loop(cls, kwargs, differentiable, dtype):
    """Steps of torch's for-loop; where autograd goes through it, with its float32 corrections.

    Options are numbers here: by a float32 tensor torch rounds the step size of float64 weights too.
    """
    numbers = {
        name: _number(value)
        for name, value in kwargs.items()
        if name not in ("capturable", "fused")
    }
    flags = {"foreach": False, "fused": False, "differentiable": differentiable}
    return steps(peer_of(cls), numbers | flags, dtype)


@functools.lru_cache(maxsize=4)
def loop_of_input(cls, index, differentiable, dtype):
    """The for-loop's steps on an input of the database, which are those of several modes."""
    kwargs = entry_of(cls).inputs(device="cuda")[index].kwargs
    return for_loop(cls, kwargs, differentiable, dtype)


def _number(option):
    if isinstance(option, tuple):
        return tuple(map(_number, option))
    return option.item() if isinstance(option, torch.Tensor) else option


def bounds_of(cls, kwargs, state, mode, dtype):
    """Bounds of the reference law, for these options and this state."""
    case, options = ROWS[cls], {name: _number(value) for name, value in kwargs.items()}
    states = tuple(name for name in state if name not in case.numbers)
    case = dataclasses.replace(case, options=options, states=states)
    tolerance = case.tolerances[dtype]
    if mode == "differentiable" and dtype == torch.float64:
        # The corrections are float32 tensors, as the step count is, and multiplied as such.
        single = torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
        tolerance = Tolerance(tolerance.weight, update=4 * single, state=single)
    return Bounds(case, dtype, tolerance)


DEVICES = r"params,? .*(?= must be on supported devices)|(?<=devices: ).*"


def without_devices(outcome, cls):
    """Without the lists of devices and states, in which torch's classes without `fused` differ."""
    if cls in WITH_FUSED or outcome.error is None:
        return outcome
    return outcome._replace(error=re.sub(DEVICES, "", outcome.error))


INPUTS = [
    pytest.param(entry.cls, index, id=f"{entry.cls.__name__}-{each.desc}-{index}")
    for entry in DATABASE
    for index, each in enumerate(entry.inputs(device="cuda"))  # all, on weights of the CPU
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize(("cls", "index"), INPUTS)
def test_inputs(cls, index, mode, dtype):
    """The same steps as torch's for-loop, or the same error as torch in this mode."""
    found = entry_of(cls).inputs(device="cuda")[index]
    assert found.params is None
    kwargs, flags = found.kwargs, ALL_MODES[mode]
    ours = outcome_of(steps, cls, kwargs | flags, dtype)
    # Compares whether they step, for which two are enough. The values are compared below.
    theirs = outcome_of(steps, peer_of(cls), kwargs | flags, dtype, 2)
    without_values = (without_devices(each._replace(value=None), cls) for each in (ours, theirs))
    check_same_unless_listed(*without_values, (found.desc, cls, mode), DIFFERENCES)
    if ours.error:
        return

    loop = loop_of_input(cls, index, mode == "differentiable", dtype)
    before = make_weights(SHAPES, dtype)
    bounds = [bounds_of(cls, kwargs, state, mode, dtype) for _, state in loop[0]]
    for number, (our, their) in enumerate(zip(ours.value, loop, strict=True), start=1):
        gradients = make_gradients(SHAPES, dtype, number)
        for index, bound in enumerate(bounds):
            bound.note(before[index], their[index][0], gradients[index])
            bound.check(*our[index], *their[index], f"{SHAPES[index]} after step {number}")
            assert our[index][1].keys() == their[index][1].keys()
            before[index] = their[index][0]


def construct(cls, given: OptimizerInput, flags) -> None:
    cls(given.params, **(given.kwargs | flags))


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("cls", ALL)
def test_error_inputs(cls, mode):
    """The type and the whole text are torch's, and the database's own pattern fits."""
    for expected in entry_of(cls).error_inputs(device="cpu", dtype=torch.float32):
        assert expected.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
        given = expected.optimizer_error_input
        ours, theirs = (
            outcome_of(construct, each, copy.deepcopy(given), ALL_MODES[mode])
            for each in (cls, peer_of(cls))
        )
        is_listed = check_same_unless_listed(ours, theirs, (given.desc, cls, mode), DIFFERENCES)
        if mode == "default" and not is_listed:
            text = ours.error or "; ".join(ours.warnings)
            assert text.startswith(expected.error_type.__name__), given.desc
            assert re.search(expected.error_regex, text), given.desc


def two_steps(cls, kwargs):
    params = [torch.ones(3), torch.full((2, 2), -0.5)]
    optimizer = cls(params, **copy.deepcopy(kwargs))
    for _ in range(2):
        for param in params:
            param.grad = torch.full_like(param, 2.0)
        optimizer.step()
    return contents(optimizer)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("cls", ALL)
def test_options(cls, mode):
    names = inspect.signature(cls).parameters.keys()
    for options in OPTIONS:
        if cls not in NAMESAKES and not options.keys() <= names:
            continue
        kwargs = ALL_MODES[mode] | fitted(cls, options)
        ours, theirs = (outcome_of(two_steps, each, kwargs) for each in (cls, peer_of(cls)))
        excluded = kwargs.get("foreach") or kwargs.get("differentiable")
        if cls in WITHOUT_FUSED and kwargs.get("fused") and excluded:
            assert ours.error.startswith("RuntimeError: `fused` "), options
            continue
        outcomes = (without_devices(each, cls) for each in (ours, theirs))
        check_same_unless_listed(*outcomes, (str(options), cls, mode), DIFFERENCES)


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.experiment)
def test_the_difference_is_told(difference, repository):
    inputs = [each.desc for entry in DATABASE for each in entry.inputs(device="cuda")]
    errors = [
        each.optimizer_error_input.desc
        for entry in DATABASE
        for each in entry.error_inputs(device="cpu", dtype=torch.float32)
    ]
    check_is_told(difference, {*inputs, *errors, *map(str, OPTIONS)}, repository)
