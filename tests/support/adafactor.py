"""Weights of Adafactor's tests, and steps of them."""

import pytest

from fusedstep import optim
from support.factored import ADAFACTOR as CASES
from support.factored import stepped

#: Matrices of one block and of several, stacks of matrices, vectors and a number.
SHAPES = (
    *((7, 5), (300, 2100), (3, 40), (1, 9), (9, 1)),
    *((4, 5, 6, 7), (2, 33, 18), (2, 9, 3, 8)),
    (5, 7000, 1, 1),  # more than a thread takes together
    *((700,), ()),
)


def case(function):
    return pytest.mark.parametrize("name", CASES)(function)


def steps_of(weights, steps=3, options=(), grads=None, **more):
    """An optimizer of these weights after some steps; the weights are changed."""
    optimizer = optim.Adafactor(weights, **{"fused": True, **dict(options), **more})
    return stepped(optimizer, weights, steps, grads)
