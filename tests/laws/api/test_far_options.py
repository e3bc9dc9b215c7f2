"""Law: a step that an option stops, since no operation takes the number, has changed nothing.

Torch refuses a number beyond the range of a dtype where it comes to it, and Python a division by
zero. By then a step in torch operations has written moments, or whole groups.
"""

import math

import pytest
import torch

from fusedstep import optim
from fusedstep._options.kinds import are_usual
from support.cases import KINDS, PLAIN
from support.composites import ROWS, as_sparse
from support.stepping import (
    as_parameters,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

SHAPES = ((6, 4), (6, 4), (5, 6))
FAR = (1e300, 7e4, math.inf, -math.inf, math.nan, 1.0, -1.0)


def numbers_of(optimizer):
    """The options that are numbers, and the places of those that are several."""
    for name, value in optimizer.param_groups[0].items():
        if isinstance(value, tuple):
            yield from ((name, place) for place, each in enumerate(value) if each is not None)
        elif type(value) in (int, float) and name != "seed":
            yield name, None


def with_number(value, place, number):
    return number if place is None else (*value[:place], number, *value[place + 1 :])


def set_gradients(params, step, makes_whole):
    shapes = [tuple(param.shape) for param in params]
    gradients = make_gradients(shapes, params[0].dtype, step)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = makes_whole(gradient)


def trained(build, dtype, steps, makes_whole, shapes):
    """Weights in two groups, one of which has missed a step, with the gradients of the next."""
    params = as_parameters(make_weights(shapes, dtype))
    optimizer = build([{"params": params[:1]}, {"params": params[1:]}])
    for step in range(steps + 1):
        set_gradients(params, step, makes_whole)
        if step < steps:
            params[1].grad = None if step == 1 else params[1].grad
            optimizer.step()
    return params, optimizer


def error_of(step):
    """Returns the text of the error that a step raises, or None."""
    try:
        step()
    except Exception as error:
        return str(error)
    return None


def seen(params):
    return {str(i): param.detach().clone() for i, param in enumerate(params)}


def assert_changes_nothing(
    build, dtype, steps, option, makes_whole=torch.Tensor.clone, shapes=SHAPES
):
    """Returns the numbers for this option that stop a step."""
    (name, place), refused = option, []
    _, expected = trained(build, dtype, steps, makes_whole, shapes)
    expected.step()
    for number in FAR:
        params, optimizer = trained(build, dtype, steps, makes_whole, shapes)
        group, before = optimizer.param_groups[1], seen(params)
        names = list(group), list(optimizer.defaults)
        usual, group[name] = group[name], with_number(group[name], place, number)
        if (error := error_of(optimizer.step)) is None:
            continue
        refused.append(number)
        assert name in error or name.startswith("initial_")
        assert_same_contents(seen(params), before, f"{number}, {error}:")
        assert (list(group), list(optimizer.defaults)) == names
        group[name] = usual
        optimizer.step()
        assert_same_contents(contents(optimizer), contents(expected), f"{number}, {error}:")
    return refused


def of_rows(rows):
    found = []
    for row in rows:
        params = as_parameters(make_weights(SHAPES, torch.float32))
        found += [(row, option) for option in numbers_of(row.build(params))]
    return [pytest.param(*each, id=f"{each[0]}-{each[1][0]}-{each[1][1]}") for each in found]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(("case", "option"), of_rows(KINDS))
def test_in_torch_operations(case, option, steps):
    def build(groups):
        return case.build(groups, fused=False)

    refused = assert_changes_nothing(build, torch.float32, steps, option)
    # LAMB's factor is cut off, and Rprop's lr is where its states start.
    if option[0] == "lr" and case.name.split("-")[0] not in ("lamb", "rprop", "radam", "lion"):
        assert 1e300 in refused


@pytest.mark.parametrize(("case", "option"), of_rows(PLAIN))
def test_with_weights_of_float16(case, option):
    def build(groups):
        return case.build(groups, fused=False)

    assert_changes_nothing(build, torch.float16, 2, option)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(("row", "option"), of_rows(ROWS))
def test_in_steps_of_several_operations(row, option, steps, fused):
    def build(groups):
        return row.optimizer([group | row.of_group for group in groups], fused=fused)

    assert_changes_nothing(build, torch.float32, steps, option, row.grad)


@pytest.mark.parametrize("case", [case for case in PLAIN if case.sparse], ids=str)
def test_with_sparse_gradients(case):
    def build(groups):
        return case.build(groups, fused=False)

    assert 1e300 in assert_changes_nothing(build, torch.float32, 3, ("lr", None), as_sparse)


def test_lists_of_weights():
    def build(groups):
        return optim.Adan(groups, fused=False, foreach=True)

    assert 1e300 in assert_changes_nothing(build, torch.float32, 3, ("betas", 0))


@pytest.mark.parametrize("option", [{"split_heads": 2}, {"split_sizes": (4, 1, 1)}], ids=str)
def test_matrices_of_muon_that_are_split(option):
    """Heads have to divide the rows of the weights that the step is tried with, sizes to fill."""
    row = next(row for row in ROWS if row.optimizer is optim.Muon)

    def build(groups):
        return row.optimizer([groups[0], groups[1] | option])

    shapes = ((5, 6), (6, 4), (6, 4))
    refused = assert_changes_nothing(build, torch.float32, 3, ("lr", None), shapes=shapes)
    assert 1e300 in refused


def test_what_a_class_checks_is_its_own_error():
    _, optimizer = trained(optim.Adafactor, torch.float32, 2, torch.Tensor.clone, SHAPES)
    optimizer.param_groups[1]["lr"] = -1.0
    error = error_of(optimizer.step)
    assert error.startswith("Invalid options of group 1, ")
    assert error.count("Invalid options") == 1


@pytest.mark.filterwarnings("error")
def test_options_are_looked_at_in_silence():
    """Torch warns of a number that is taken out of a graph, as a rule once in a process."""
    _, optimizer = trained(optim.Adam, torch.float32, 0, torch.Tensor.clone, SHAPES)
    lr = torch.tensor(0.1, requires_grad=True)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        options = optimizer.param_groups[0] | {"lr": lr}
        assert are_usual(optimizer._option_kinds, options, half=False)
    finally:
        torch.set_warn_always(always)
