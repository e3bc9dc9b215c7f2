"""Law: states in shared memory stay there, so that processes that share a model step with them."""

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing as mp

from support.cases import PLAIN, first_of_each
from support.composites import DENSE
from support.stepping import assert_same_contents, contents
from support.subjects import SUBJECTS, built, steps

#: Each class with native kernels and without, and with each storage of its states.
STORED = ("fused", "state_dtype", "master_weights", "rounding")
ROWS = first_of_each(
    lambda each: (each.optimizer, *map(each.options.get, STORED)),
    SUBJECTS,
)
EACH = pytest.mark.parametrize("subject", ROWS, ids=str)


def shared(subject):
    """Weights in shared memory and an optimizer that has stepped, and the same without sharing."""
    params, optimizer = built(subject, "cpu")
    for param in params:
        param.data.share_memory_()
    plain_params, plain = built(subject, "cpu")
    steps(subject, optimizer, params, [1])
    steps(subject, plain, plain_params, [1])
    return params, optimizer, plain_params, plain


def params_of(optimizer):
    return optimizer.param_groups[0]["params"]


def assert_shared(subject, there, optimizer, plain_params, plain):
    """A step of one is seen by the other: all states are in the same memory."""
    steps(subject, there, params_of(there), [2])
    steps(subject, plain, plain_params, [2])
    expected = contents(plain)
    assert_same_contents(contents(there), expected)
    assert_same_contents(contents(optimizer), expected)
    steps(subject, optimizer, params_of(optimizer), [3])
    assert_same_contents(contents(there), contents(optimizer))


@EACH
def test_an_optimizer_for_another_process_has_the_same_states(subject):
    _, optimizer, *plain = shared(subject)
    there = pickle.loads(bytes(ForkingPickler.dumps(optimizer)))
    assert_shared(subject, there, optimizer, *plain)


@EACH
def test_a_dictionary_of_shared_states_is_loaded_as_it_is(subject):
    params, optimizer, *plain = shared(subject)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.share_memory_()
    there = subject.build([torch.nn.Parameter(param.detach()) for param in params])
    there.load_state_dict(optimizer.state_dict())
    assert_shared(subject, there, optimizer, *plain)


def step_all(_, optimizers):
    for optimizer in optimizers:
        for param in params_of(optimizer):
            param.grad = torch.full_like(param, 0.5)
        optimizer.step()


def test_a_spawned_process_steps_with_the_states_of_its_parent():
    optimizers, expected = [], []
    for row in (*PLAIN, *DENSE):
        for each in (optimizers, expected):
            weight = torch.nn.Parameter(torch.ones(12, 8).share_memory_())
            each.append(row.build([weight]))
    for each in (optimizers, expected):
        step_all(0, each)
    mp.spawn(step_all, (optimizers,))
    step_all(0, expected)
    for optimizer, other in zip(optimizers, expected, strict=True):
        assert_same_contents(contents(optimizer), contents(other))
