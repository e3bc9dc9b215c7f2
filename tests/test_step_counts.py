"""Law: a count ends with its state, and random numbers and bases go on where float32 does not."""

import copy

import pytest
import torch

from fusedstep import optim
from stepping import WAYS, as_parameters, assert_same_contents, contents
from test_process_defaults import FIRST, SUBJECTS, built, steps

STOCHASTIC = WAYS["stochastic"]
ROUNDED = [subject for subject in SUBJECTS if STOCHASTIC.items() <= subject.options.items()]


def cleared(state):
    state.clear()


def dropped(state):
    for weight in list(state):
        del state[weight]


def emptied(state):
    for weight in list(state):
        state[weight] = {}


@pytest.mark.parametrize("drop", [cleared, dropped, emptied], ids=lambda each: each.__name__)
@pytest.mark.parametrize("subject", [*ROUNDED, *FIRST], ids=str)
def test_a_count_ends_with_its_state(subject, drop):
    params, optimizer = built(subject, "cpu")
    steps(subject, optimizer, params, [1, 2])
    fresh_params = as_parameters(params)
    fresh = subject.build(fresh_params)
    drop(optimizer.state)
    steps(subject, optimizer, params, [3, 4])
    steps(subject, fresh, fresh_params, [3, 4])
    assert_same_contents(contents(optimizer), contents(fresh))


def sgd(**options):
    weight = torch.nn.Parameter(torch.ones(9, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 0.01)
    return weight, optim.SGD([weight], lr=0.1, dampening=0.5, **options)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("rounding", [None, "stochastic"])
def test_a_count_begins_with_moments_that_come_later(rounding, fused):
    weight, optimizer = sgd(rounding=rounding, fused=fused)
    for _ in range(3):
        optimizer.step()
    fresh_weight, fresh = sgd(rounding=rounding, fused=fused, momentum=0.9)
    fresh_weight.data.copy_(weight)
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.step()
    fresh.step()
    assert_same_contents(contents(optimizer), contents(fresh))


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("momentum", [0, 0.9])
def test_a_count_goes_on_while_weights_are_not_rounded_at_random(momentum, fused):
    weight, optimizer = sgd(rounding="stochastic", fused=fused, momentum=momentum)
    for rounding in ("stochastic", "stochastic", None, "stochastic"):
        optimizer.param_groups[0]["rounding"] = rounding
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[weight]["step"] == 4
