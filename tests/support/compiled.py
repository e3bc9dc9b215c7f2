"""Optimizers whose steps are compiled, beside the same without a compiler."""

import copy

import torch
from torch._dynamo.utils import counters

from support.cases import PLAIN, first_of_each
from support.stepping import (
    as_parameters,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
)

SHAPES = ((), (0,), (7,), (33, 31))
STEPS = range(1, 6)
# One plain row for each operator: AdamW has Adam's.
OPERATORS = first_of_each(lambda case: case.optimizer._rule, PLAIN)
# One of each kind of operands: a graph knows nothing of a rule's maths.
GRAPHS = first_of_each(lambda case: (case.elementwise, len(case.states), case.numbers), OPERATORS)
# One that leaves gradients as they are: a second step takes them again.
WITH_BETAS = next(case for case in OPERATORS if case.has("betas") and case.elementwise)
WITH_AMSGRAD = next(case for case in OPERATORS if case.has("amsgrad"))
BACKEND = "aot_eager"
"""Traces and makes the operators functional as inductor does, without its code."""


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


class Twins:
    """Two optimizers alike: `compiled`, whose step is, and `plain`, whose step is not."""

    def __init__(self, case, shapes=SHAPES, dtype=torch.float32, fullgraph=True, **options):
        weights = make_weights(shapes, dtype)
        self.compiled = case.build(as_parameters(weights), **copy.deepcopy(options))
        self.plain = case.build(as_parameters(weights), **copy.deepcopy(options))
        self.both = (self.compiled, self.plain)
        self.step = torch.compile(self.compiled.step, backend=BACKEND, fullgraph=fullgraph)

    def add(self, weight, **options):
        """Adds a weight: to the last group, or with options as a group of its own."""
        for optimizer in self.both:
            if options:
                optimizer.add_param_group({"params": as_parameters([weight]), **options})
            else:
                optimizer.param_groups[-1]["params"] += as_parameters([weight])

    def set_grads(self, number, absent=()):
        for optimizer in self.both:
            params = params_of(optimizer)
            grads = make_gradients([tuple(p.shape) for p in params], params[0].dtype, number)
            for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
                param.grad = None if i in absent else grad

    def take_step(self, number, absent=(), **arguments):
        self.set_grads(number, absent)
        results = self.step(**arguments), self.plain.step(**arguments)
        self.check()
        return results

    def check(self):
        assert_same_contents(contents(self.compiled), contents(self.plain))


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]
