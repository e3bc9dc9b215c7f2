"""Law: a C++ optimizer steps to the bits of Python's, for the options of every row.

So its operator gets the arguments in their order, and its options have Python's names and defaults.
"""

import subprocess

import pytest
import torch

from cases import CASES, PLAIN
from stepping import as_parameters, assert_same_bits, make_gradients, make_weights, train

SHAPES = ((33, 31), (7,), ())
STEPS = 4


def in_cpp(group):
    """A group's options as C++ has them: numbers, and two flags for Lamb's `debias`."""
    if "debias" in group:
        group = group | {"debias": group["debias"] is True, "debias_lr": group["debias"] == "lr"}
    kinds = {bool: bool, int: float, float: float, tuple: lambda v: tuple(map(float, v))}
    return {name: kinds[type(v)](v) for name, v in group.items() if type(v) in kinds}


def asked(case, options):
    optimizer = case.build(as_parameters(make_weights(SHAPES, torch.float32)))
    given = in_cpp(optimizer.param_groups[0]) if options is None else options
    gradients = [make_gradients(SHAPES, torch.float32, step) for step in range(1, STEPS + 1)]
    return [case.optimizer.__name__, given, make_weights(SHAPES, torch.float32), gradients]


SUBJECTS = {case.name: (case, None) for case in CASES}
SUBJECTS |= {f"{case.name}-defaults": (case, {}) for case in PLAIN}


@pytest.fixture(scope="module")
def answers(tmp_path_factory, repository):
    """The weights that C++ steps to, by subject; an error's text where it makes one."""
    program = repository / "build" / "release" / "tests" / "cpp" / "fusedstep_optim_steps"
    assert program.is_file(), "cmake --build --preset release --target fusedstep_optim_steps"
    folder, found = tmp_path_factory.mktemp("cpp"), {}
    for cls in {case.optimizer: None for case in PLAIN}:
        subjects = {name: each for name, each in SUBJECTS.items() if each[0].optimizer is cls}
        torch.save([asked(*each) for each in subjects.values()], folder / "cases")
        command = [program, folder / "cases", folder / "results"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            found |= zip(subjects, torch.load(folder / "results"), strict=True)
        else:
            found |= dict.fromkeys(subjects, done.stderr)
    return found


@pytest.mark.parametrize("name", SUBJECTS)
def test_steps_to_the_same_bits(answers, name):
    case, options = SUBJECTS[name]
    if isinstance(answers[name], str):
        pytest.fail(answers[name], pytrace=False)
    params = as_parameters(make_weights(SHAPES, torch.float32))
    optimizer = case.build(params) if options is None else case.optimizer(params, fused=True)
    train(optimizer, params, range(1, STEPS + 1))
    for index, (theirs, param) in enumerate(zip(answers[name], params, strict=True)):
        assert_same_bits(theirs, param, f"weight {index} in C++")
