"""The operators of compiled steps: torch's own checks, bad arguments, fake tensors."""

import functools
import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusedstep._native import ops
from support.allocations import LAYOUTS, optimizer_with_gradients
from support.cases import PLAIN
from support.compiled import OPERATORS, SHAPES, WITH_BETAS
from support.stepping import (
    as_parameters,
    assert_same_bits,
    make_gradients,
    make_weights,
)

pytestmark = pytest.mark.usefixtures("compiler_reset")


def list_arguments(case):
    """The arguments of the operator over lists for a row's optimizer."""
    params = as_parameters(make_weights(SHAPES, torch.float32))
    for param, grad in zip(params, make_gradients(SHAPES, torch.float32, 1), strict=True):
        param.grad = grad
    optimizer = case.build(params)
    torch.compile(optimizer.step, backend="eager")()  # defines the operator that reads options
    weights = [param.detach() for param in params]
    states = [optimizer.state[param][name] for name in case.states for param in params]
    (group,) = optimizer.param_groups
    store = optimizer._store
    steps = [store.with_count(group, p)[name] for name in store.numbers for p in params]
    count = len(optimizer._options(group))
    options = torch.ops.fusedstep.options(steps[0], None, optimizer._name, 0, count)
    grads = [param.grad for param in params]
    rule = ops.rule_index[optimizer._rule]
    return optimizer, (weights, grads, states, steps, options, rule)


@functools.cache
def kept_arguments(case):
    """The same for calls that change nothing."""
    return list_arguments(case)


@pytest.mark.parametrize("case", OPERATORS, ids=str)
def test_operators_are_as_declared(case):
    """torch's own checks: schemas, shapes without memory, autograd, tracing."""
    optimizer, arguments = list_arguments(case)
    torch.library.opcheck(torch.ops.fusedstep.step.default, arguments)
    steps, count = arguments[3], len(arguments[4])
    for lr in (None, torch.tensor(0.1)):
        torch.library.opcheck(
            torch.ops.fusedstep.options.default, (steps[0], lr, optimizer._name, 0, count)
        )


def test_a_graphs_text_has_the_shapes():
    """Inductor finds the code of an older process, and of an older version, by the text alone."""
    with FakeTensorMode():
        options = torch.ops.fusedstep.options(torch.zeros(()), None, "of another process", 0, 8)
    assert options.shape == (8,)


def test_operators_for_plans_are_as_declared():
    """No graph has these: a plan notes addresses, and states are made beforehand."""
    _, (weights, grads, states, steps, *_) = list_arguments(WITH_BETAS)
    plan = torch.ops.fusedstep.plan_new(weights, states, steps)
    for name, arguments in {
        "new_states": (weights, ["float32", "unsigned int8"]),
        "plan_new": (weights, states, steps),
        "plan_bind": (plan, weights, grads),
    }.items():
        operator = getattr(torch.ops.fusedstep, name).default
        torch.library.opcheck(operator, arguments, test_utils="test_schema")
    torch.ops.fusedstep.plan_delete(plan)


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_graph_notes_nothing_of_a_plan_that_goes_as_it_is_traced(pre_dispatch):
    """Weights may be collected at any time."""
    optimizers = [optimizer_with_gradients(OPERATORS[0], LAYOUTS)]
    handle = next(iter(optimizers[0]._plans.values())).handle
    assert torch.ops.fusedstep.plan_isa(handle)

    def traced(number):
        optimizers.clear()
        gc.collect()
        return number + 1

    graph = make_fx(traced, pre_dispatch=pre_dispatch)(torch.ones(3)).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]
    with pytest.raises(RuntimeError, match="plan"):
        torch.ops.fusedstep.plan_isa(handle)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("options", torch.ones(3, dtype=torch.float64)),
        ("options", torch.ones(8)),
        ("states", []),
        ("states", [torch.ones(3)]),
        ("steps", []),
        ("grads", []),
        ("rule", -1),
    ],
)
@pytest.mark.parametrize("case", OPERATORS, ids=str)
def test_operators_name_bad_arguments(case, argument, value):
    _, arguments = kept_arguments(case)
    if argument == "states" and value == arguments[2]:
        pytest.skip("none are the right ones")
    names = ("weights", "grads", "states", "steps", "options", "rule")
    named = dict(zip(names, arguments, strict=True)) | {argument: value}
    before = [tensor.clone() for tensor in (*arguments[0], *arguments[2], *arguments[3])]
    with pytest.raises(RuntimeError, match=argument):
        torch.ops.fusedstep.step(**named)
    after = (*arguments[0], *arguments[2], *arguments[3])
    for tensor, expected in zip(after, before, strict=True):
        assert_same_bits(tensor, expected, "operand")


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_step_of_fake_tensors_as_with_torch(case):
    """Tools that estimate memory take it."""
    with FakeTensorMode():
        param = torch.nn.Parameter(torch.zeros(5))
        param.grad = torch.zeros(5)
        optimizer = case.build([param], fused=None)
        for _ in range(2):
            optimizer.step()
    assert optimizer.state.get(param, {}).keys() == {*case.numbers, *case.states}
