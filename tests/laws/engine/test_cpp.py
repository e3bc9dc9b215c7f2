"""Law: a C++ optimizer steps to the bits of Python's, for the options of every row.

So its operator gets the arguments in their order, and its options have Python's names and defaults.
The same holds for every storage of states and weights, and for a change of it, on a GPU too.
"""

import math
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from support.cases import CASES, PLAIN, Case
from support.cuda_device import needs_cuda
from support.stepping import as_parameters, assert_same_bits, make_gradients, make_weights

SHAPES = ((33, 31), (7,), ())
#: The first has codes; its rows are no multiple of a block.
LARGE = ((66, 65), (33, 31), (64, 128))
STEPS = 4

#: Options of storage, and the dtype of the weights.
STORAGES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "int8": ({"state_dtype": "int8"}, torch.float32),
    "int4": ({"state_dtype": "int4"}, torch.float32),
    "fp8": ({"state_dtype": "fp8"}, torch.float32),
    "int8-clipped": ({"state_dtype": "int8", "max_grad_norm": 0.5}, torch.float32),
    "wide": ({"state_dtype": torch.float32}, torch.bfloat16),
    "fp8-of-float16": ({"state_dtype": "fp8"}, torch.float16),
    "masters": ({"master_weights": "float32"}, torch.bfloat16),
    "split": ({"master_weights": "split"}, torch.bfloat16),
    "kahan": ({"rounding": "kahan"}, torch.bfloat16),
    "kahan-of-float16": ({"rounding": "kahan"}, torch.float16),
    "stochastic": ({"rounding": "stochastic", "seed": 7}, torch.bfloat16),
    "split-int8": ({"master_weights": "split", "state_dtype": "int8"}, torch.bfloat16),
    "stochastic-int4": ({"rounding": "stochastic", "state_dtype": "int4"}, torch.bfloat16),
    "masters-fp8": ({"master_weights": "float32", "state_dtype": "fp8"}, torch.bfloat16),
}
#: Options before a change, the change, options after it, and the dtype of the weights.
CHANGES: dict[str, tuple[dict[str, Any], str, dict[str, Any], torch.dtype]] = {
    "to-int8": ({}, "load", {"state_dtype": "int8"}, torch.float32),
    "to-int4": ({}, "load", {"state_dtype": "int4"}, torch.float32),
    "to-fp8": ({}, "load", {"state_dtype": "fp8"}, torch.float32),
    "to-wide-fp8": ({}, "load", {"state_dtype": "fp8"}, torch.bfloat16),
    "loads-kahan": ({"rounding": "kahan"}, "load", {}, torch.bfloat16),
    "loads-split-int8": (
        {"master_weights": "split", "state_dtype": "int8"},
        "load",
        {},
        torch.bfloat16,
    ),
    "int8-to-float32": ({"state_dtype": "int8"}, "convert", {"state_dtype": None}, torch.float32),
    "int8-to-int4": ({"state_dtype": "int8"}, "convert", {"state_dtype": "int4"}, torch.bfloat16),
    "fp8-to-wide": (
        {"state_dtype": "fp8"},
        "convert",
        {"state_dtype": torch.float32},
        torch.bfloat16,
    ),
    "to-masters": ({}, "set", {"master_weights": "float32"}, torch.bfloat16),
    "to-stochastic": ({}, "set", {"rounding": "stochastic", "seed": 3}, torch.bfloat16),
    "kahan-to-split": (
        {"rounding": "kahan"},
        "set",
        {"rounding": None, "master_weights": "split"},
        torch.bfloat16,
    ),
    "split-to-masters": (
        {"master_weights": "split"},
        "set",
        {"master_weights": "float32"},
        torch.bfloat16,
    ),
    "masters-to-kahan": (
        {"master_weights": "float32"},
        "set",
        {"master_weights": False, "rounding": "kahan"},
        torch.float16,
    ),
}


class Subject(NamedTuple):
    """A row that both languages step, with its options unless it is to have the defaults."""

    case: Case
    is_default: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012
    dtype: torch.dtype = torch.float32
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    change: str = ""
    later: dict[str, Any] = {}  # noqa: RUF012

    def build(self, params):
        if self.is_default:
            return self.case.optimizer(params, fused=True)
        return self.case.build(params, **self.options)


SUBJECTS = {case.name: Subject(case) for case in CASES}
SUBJECTS |= {f"{case.name}-defaults": Subject(case, is_default=True) for case in PLAIN}
SUBJECTS |= {
    f"{case.name}-{name}": Subject(case, False, options, dtype, LARGE)
    for case in PLAIN
    for name, (options, dtype) in STORAGES.items()
}
SUBJECTS |= {
    f"{case.name}-{name}": Subject(case, False, options, dtype, LARGE, change, later)
    for case in PLAIN
    for name, (options, change, later, dtype) in CHANGES.items()
}
#: Subjects of a storage or a change of it.
STORED = {name: subject for name, subject in SUBJECTS.items() if subject.shapes is LARGE}


def in_cpp(group):
    """A group's options as C++ has them: numbers and texts, and two flags for Lamb's `debias`.

    Infinity stands for None, as a number. C++ reads no option that its class lacks.
    """
    if "debias" in group:
        group = group | {"debias": group["debias"] is True, "debias_lr": group["debias"] == "lr"}
    kinds = {bool: bool, int: int, float: float, tuple: lambda v: tuple(map(float, v)), str: str}
    kinds[type(None)] = lambda _: math.inf
    kinds[torch.dtype] = lambda dtype: str(dtype).removeprefix("torch.")
    found = {name: kinds[type(v)](v) for name, v in group.items() if type(v) in kinds}
    found |= {
        name: ""
        for name in ("state_dtype", "master_weights", "rounding")
        if group.get(name, "") in (None, False)
    }
    return {name: float(v) if type(v) is int and name != "seed" else v for name, v in found.items()}


def asked(subject):
    weights = make_weights(subject.shapes, subject.dtype)
    options = subject.build(as_parameters(weights)).param_groups[0]
    steps = range(1, STEPS + 1)
    gradients = [make_gradients(subject.shapes, subject.dtype, step) for step in steps]
    given = {} if subject.is_default else in_cpp(options)
    name = subject.case.optimizer.__name__
    return [name, given, weights, gradients, subject.change, in_cpp(subject.later)]


def answers_on(device, subjects, folder, repository):
    """The weights and states that C++ steps to, by subject; an error's text where it makes one."""
    program = repository / "build" / "release" / "tests" / "cpp" / "fusedstep_optim_steps"
    assert program.is_file(), "cmake --build --preset release --target fusedstep_optim_steps"
    environment, found = dict(os.environ), {}
    if device == "cuda":  # the program is linked with torch's library for the CPU alone
        library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
        environment["LD_PRELOAD"] = str(library)
    # One process steps all; where it fails there is one for each optimizer.
    parts = [[case.optimizer for case in PLAIN]]
    for classes in parts:
        asked_for = {
            name: each for name, each in subjects.items() if each.case.optimizer in classes
        }
        torch.save([asked(each) for each in asked_for.values()], folder / "cases")
        done = subprocess.run(
            [program, folder / "cases", folder / "results", device],
            capture_output=True,
            text=True,
            timeout=240,
            env=environment,
        )
        if done.returncode == 0:
            found |= zip(asked_for, torch.load(folder / "results"), strict=True)
        elif len(classes) > 1:
            parts += [[cls] for cls in classes]
        else:
            found |= dict.fromkeys(asked_for, done.stderr or f"exit code {done.returncode}")
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory, repository):
    return answers_on("cpu", SUBJECTS, tmp_path_factory.mktemp("cpp"), repository)


@pytest.fixture(scope="module")
def answers_of_gpu(tmp_path_factory, repository):
    return answers_on("cuda", STORED, tmp_path_factory.mktemp("cpp"), repository)


def train(optimizer, params, steps):
    for step in steps:
        shapes = [tuple(param.shape) for param in params]
        gradients = make_gradients(shapes, params[0].dtype, step)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.to(param.device)
        optimizer.step()


def stepped(subject, device):
    """The weights and the optimizer of Python after the same steps."""
    weights = make_weights(subject.shapes, subject.dtype)
    params = as_parameters([weight.to(device) for weight in weights])
    optimizer = subject.build(params)
    train(optimizer, params, range(1, STEPS // 2 + 1))
    if subject.change in ("set", "convert"):
        optimizer.param_groups[0].update(subject.later)
    if subject.change in ("load", "convert"):
        saved = optimizer.state_dict()
        optimizer = subject.case.build(params, **subject.later)
        optimizer.load_state_dict(saved)
    train(optimizer, params, range(STEPS // 2 + 1, STEPS + 1))
    return params, optimizer


def assert_steps_alike(answer, subject, device):
    if isinstance(answer, str):
        pytest.fail(answer, pytrace=False)
    params, optimizer = stepped(subject, device)
    weights, states = answer
    for index, (theirs, param) in enumerate(zip(weights, params, strict=True)):
        assert_same_bits(theirs, param.cpu(), f"weight {index} in C++")
    numbers = {"step", *optimizer._numbers}
    for index, (theirs, param) in enumerate(zip(states, params, strict=True)):
        ours = {k: v.cpu() for k, v in optimizer.state[param].items() if k not in numbers}
        assert dict(theirs).keys() == ours.keys(), f"states of weight {index} in C++"
        for state, tensor in theirs:
            is_float8 = ours[state].dtype is torch.float8_e4m3fn
            tensor_of_cpp = tensor.view(ours[state].dtype) if is_float8 else tensor
            assert_same_bits(tensor_of_cpp, ours[state], f"{state} of weight {index} in C++")


@pytest.mark.parametrize("name", SUBJECTS)
def test_steps_to_the_same_bits(answers, name):
    assert_steps_alike(answers[name], SUBJECTS[name], "cpu")


@needs_cuda
@pytest.mark.parametrize("name", STORED)
def test_steps_to_the_same_bits_on_a_gpu(answers_of_gpu, name):
    assert_steps_alike(answers_of_gpu[name], STORED[name], "cuda")
