"""Law: engines that exchange the weights of a group, or the groups, at each call cost no new plan.

DeepSpeed's ZeRO is one: stages 1 and 2 step an optimizer that has one group of them all for the
time of the call, stage 3 one whose group has one sub-group's flat partition.
"""

import copy

import pytest
import torch

from fusedstep import optim
from fusedstep._step import strategy
from fusedstep._step.plan import PlansAside
from support.cases import KINDS, PLAIN
from support.stepping import as_parameters, assert_same_bits, contents, make_gradients, make_weights

#: The weights of each call, as views of memory that holds more.
VIEWS = {
    "two slices of one buffer": lambda m: [m.view(-1)[7:900], m.view(-1)[1000:]],
    "transposed": lambda m: [m.t()],
    "sliced rows": lambda m: [m[3:20]],
    "sliced columns": lambda m: [m[:, 5:29]],
    "transposed slice, and a vector": lambda m: [m[:30, :20].t(), m[39]],
}


def groups_exchanged(optimizer, parts):
    """As ZeRO 1 and 2."""
    groups = optimizer.param_groups
    for group in groups:
        optimizer.param_groups = [group]
        yield
        optimizer.param_groups = groups


def weights_exchanged(optimizer, parts):
    """As ZeRO 3."""
    (group,) = optimizer.param_groups
    for part in parts:
        group["params"] = part
        yield
        group["params"] = []


@pytest.fixture
def made(monkeypatch):
    """The plans that have been made."""
    plans = []

    class Plan(strategy.Plan):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            plans.append(self)

    monkeypatch.setattr(strategy, "Plan", Plan)
    return plans


def subjects():
    """Weights for each call as views, and the same as tensors of their own."""
    memory = make_weights([(40, 50)] * len(VIEWS), torch.float32)
    views = [as_parameters(cut(m)) for cut, m in zip(VIEWS.values(), memory, strict=True)]
    copies = [as_parameters(each.detach().clone() for each in part) for part in views]
    return views, copies


def flat(parts):
    return [weight for part in parts for weight in part]


def set_gradients(parts, step):
    for number, part in enumerate(parts):
        grads = make_gradients([weight.shape for weight in part], torch.float32, 10 * step + number)
        for weight, grad in zip(part, grads, strict=True):
            weight.grad = grad


def built(case, exchange, parts):
    if exchange is groups_exchanged:
        return case.build([{"params": part} for part in parts])
    optimizer = case.build(flat(parts))
    optimizer.param_groups[0]["params"] = []
    return optimizer


@pytest.mark.parametrize("exchange", [groups_exchanged, weights_exchanged])
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_no_new_plan(case, exchange, made):
    views, copies = subjects()
    optimizer, reference = built(case, exchange, views), case.build(flat(copies))
    for step in range(3):
        for parts in (views, copies):
            set_gradients(parts, step)
        before = len(made)
        for _ in exchange(optimizer, views):
            optimizer.step()
        assert (len(made) > before) == (step == 0)
        reference.step()
    for part, expected in zip(views, copies, strict=True):
        for weight, other in zip(part, expected, strict=True):
            what = f"{case}, {weight.shape}"
            if case.elementwise:
                assert_same_bits(weight.detach(), other.detach(), what)
            else:
                torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-7)
            for name in case.states:
                torch.testing.assert_close(
                    optimizer.state[weight][name], reference.state[other][name], rtol=1e-6, atol=0
                )


def test_other_states_are_other_plans(made):
    views, copies = subjects()
    case = KINDS[0]
    optimizer, reference = built(case, weights_exchanged, views), case.build(flat(copies))
    for step in range(2):
        for parts in (views, copies):
            set_gradients(parts, step)
        for _ in weights_exchanged(optimizer, views):
            optimizer.step()
        reference.step()
        if step == 0:  # as an engine that swaps them out and in
            for state in optimizer.state.values():
                state.update({name: copy.deepcopy(value) for name, value in state.items()})
    for weight, other in zip(flat(views), flat(copies), strict=True):
        assert_same_bits(weight.detach(), other.detach(), "weight")


def test_the_oldest_plans_are_dropped(made, monkeypatch):
    monkeypatch.setattr(PlansAside, "MOST", 2)
    weights = as_parameters(make_weights([(3,)] * 4, torch.float32))
    optimizer = optim.AdamW([weights[0]])
    for first in (0, 1, 2, 3, 2, 1, 0):
        optimizer.param_groups[0]["params"] = [weights[first]]
        weights[first].grad = torch.ones(3)
        optimizer.step()
    assert len(made) == 5  # the first weight's was dropped
    assert len(list(optimizer._aside)) == 2


def test_a_repeated_step_needs_the_same_weights():
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = optim.SGD([first], lr=0.5)
    for weight, expected in ((first, 0.5), (first, 0.0), (second, 0.5), (first, -0.5)):
        optimizer.param_groups[0]["params"] = [weight]
        weight.grad = torch.ones(3)
        optimizer.step()
        assert weight.tolist() == [expected] * 3


OF_MATRICES = {optim.Muon: {}, optim.MuSGD: {"use_muon": True, "momentum": 0.9}}
WITH_CODES = [*(case for case in PLAIN if case.states), *OF_MATRICES]


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("state_dtype", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("row", WITH_CODES, ids=lambda row: getattr(row, "__name__", str(row)))
def test_states_of_another_shape_than_the_weight_are_an_error(row, state_dtype, fused):
    """Memory that ``.data`` exchanges. The error names the weight, and nothing has changed."""
    options = {"fused": fused} | ({"state_dtype": state_dtype} if state_dtype else {})
    for shape in ((64, 2), (32, 64), (64, 64, 2), (80, 64)):
        params = as_parameters(make_weights([(64, 80)] * 3, torch.float32))
        if row in OF_MATRICES:
            optimizer = row([{"params": params} | OF_MATRICES[row]], **options)
        else:
            optimizer = row.build(params, **options)
        set_gradients([params], 1)
        optimizer.step()
        params[1].data = torch.ones(shape)
        set_gradients([params], 2)
        before = contents(optimizer)
        with pytest.raises(RuntimeError, match="parameter 1 of group 0"):
            optimizer.step()
        for name, value in contents(optimizer).items():
            assert torch.equal(value.double(), before[name].double()), name


@pytest.mark.parametrize(
    ("first", "between"),
    [("kahan", None), ("stochastic", "kahan"), (None, "kahan"), ("stochastic", None)],
    ids=str,
)
@pytest.mark.parametrize("cls", [optim.AdamW, optim.RMSprop, optim.Muon, optim.CAME])
def test_a_plan_ends_with_the_states_that_it_is_for(cls, first, between):
    """A step of one weight under another option replaces the states of a plan of both weights."""
    weights = [torch.nn.Parameter(torch.ones(s, dtype=torch.bfloat16)) for s in ((4, 6), (5, 3))]
    optimizer = cls(weights, lr=0.01)

    def step(optimizer, rounding, count):
        (group,) = optimizer.param_groups
        group["rounding"] = rounding
        for i, p in enumerate(group["params"]):
            p.grad = torch.full_like(p, 0.01) if i < count else None
        optimizer.step()

    for rounding, count in ((first, 2), (first, 2), (between, 1)):
        step(optimizer, rounding, count)
    other = copy.deepcopy(optimizer)
    for rounding, count in ((first, 1), (first, 2), (between, 2), (first, 2)):
        for each in (optimizer, other):
            step(each, rounding, count)
        ours, theirs = contents(optimizer), contents(other)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert_same_bits(ours[name], value, name)
