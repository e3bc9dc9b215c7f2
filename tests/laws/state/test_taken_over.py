"""Law: whoever takes over states takes all of them, in inference mode too."""

import copy

import pytest
import torch

import fusedstep
from support.cases import first_of_each
from support.composites import MODES, WITHOUT_PLAN
from support.peers import said
from support.stepping import assert_same_bits, assert_same_contents, contents
from support.subjects import FIRST, SUBJECTS, built, steps, values

#: Each class with each storage of its states and weights.
STORED = ("state_dtype", "master_weights", "rounding")
ROWS = first_of_each(
    lambda each: (each.optimizer, *map(each.options.get, STORED)),
    SUBJECTS,
)


def imported(subject, optimizer, params, saved):
    new = subject.build(params)
    fusedstep.import_state_dict(new, saved)
    return new


def loaded(subject, optimizer, params, saved):
    new = subject.build(params)
    new.load_state_dict(saved)
    return new


def converted(subject, optimizer, params, saved):
    return fusedstep.convert(optimizer, fused=subject.options.get("fused"))


def edited(subject, optimizer, params, saved):
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone()
    return optimizer


DOORS = pytest.mark.parametrize(
    "door", [imported, loaded, converted, edited], ids=lambda door: door.__name__
)


def goes_on(subject, door, mode):
    """Steps three times, goes through the door, and steps twice with what is there then."""
    (expected_params, expected), (params, optimizer) = (built(subject, "cpu") for _ in range(2))
    steps(subject, expected, expected_params, [1, 2, 3, 4, 5])
    steps(subject, optimizer, params, [1, 2, 3])
    with torch.inference_mode(mode):
        optimizer = door(subject, optimizer, params, copy.deepcopy(optimizer.state_dict()))
    steps(subject, optimizer, params, [4, 5])
    assert_same_contents(contents(optimizer), contents(expected))


@DOORS
@pytest.mark.parametrize("subject", ROWS, ids=str)
def test_goes_on_with_the_same_bits(subject, door):
    goes_on(subject, door, False)


@DOORS
@pytest.mark.parametrize("subject", FIRST, ids=str)
def test_states_that_are_taken_over_in_inference_mode_are_ordinary(subject, door):
    goes_on(subject, door, True)


@pytest.mark.parametrize("subject", FIRST, ids=str)
def test_weights_of_inference_mode_are_stepped_or_nothing_is_changed(subject):
    """With the states of an ordinary step before."""
    params, optimizer = built(subject, "cpu")
    steps(subject, optimizer, params, [1])
    saved = copy.deepcopy(optimizer.state_dict())
    with torch.inference_mode():
        made = [value.clone() for value in values(subject.dtype, 0)]
        optimizer = subject.build(made)
        optimizer.load_state_dict(saved)
        steps(subject, optimizer, made, [2])
    before = copy.deepcopy(contents(optimizer))
    text = said(steps, subject, optimizer, made, [3])
    if text != "no error":
        assert "made in inference mode" in text
        assert_same_contents(contents(optimizer), before)
    else:
        assert subject.options.get("fused") is not False


@pytest.mark.parametrize("row", WITHOUT_PLAN, ids=str)
@MODES
def test_memory_of_a_first_step_in_inference_mode_is_for_others_too(row, fused):
    """Of weights of several shapes, which share it."""
    ends = []
    for mode in (False, True):
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((12, 8), (16, 8), (8, 8))]
        optimizer = row.build(params, fused=fused)
        for step in range(3):
            for param in params:
                numbers = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
                param.grad = row.grad(numbers)
            with torch.inference_mode(mode and step == 0):
                optimizer.step()
        ends.append(params)
    for index, (found, expected) in enumerate(zip(*ends, strict=True)):
        assert_same_bits(found.detach(), expected.detach(), f"weight {index}")
