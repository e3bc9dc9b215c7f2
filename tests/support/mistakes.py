"""Optimizers that have taken steps, and what is still the same after a mistake."""

import copy

import pytest
import torch

from support.cases import PLAIN, WITH_COUNTS, WITH_STATES
from support.stepping import as_parameters, assert_same_contents, contents, make_weights, train

SHAPES = ((4, 5), (7,))
MODES = pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
EACH = pytest.mark.parametrize("case", PLAIN, ids=str)
EACH_WITH_STATES = pytest.mark.parametrize("case", WITH_STATES, ids=str)
EACH_WITH_COUNTS = pytest.mark.parametrize("case", WITH_COUNTS, ids=str)


def trained(case, steps=2, names=None, dtype=torch.float32, **options):
    params = as_parameters(make_weights(SHAPES, dtype))
    optimizer = case.build(list(zip(names, params, strict=True)) if names else params, **options)
    train(optimizer, params, range(1, steps + 1))
    return params, optimizer


class Unchanged:
    """Looks at an optimizer before a mistake and after it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.before = self.look()

    def look(self):
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        return contents(self.optimizer), copy.deepcopy(options)

    def check(self):
        found, options = self.look()
        assert_same_contents(found, self.before[0])
        assert options == self.before[1]
