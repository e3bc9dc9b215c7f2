"""Tensors whose memory is not what they are, or that somebody else changes; modes that look on."""

import contextlib
import math
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from fusedstep import optim
from support.cases import PLAIN, WITH_COUNTS, WITH_STATES, first_of_each, thinned
from support.negated import WAYS, Seen, negated, negated_at_once
from support.peers import WITH_FOREACH
from support.stepping import (
    as_parameters,
    assert_counts,
    assert_same_bits,
    assert_same_contents,
    contents,
)

SIZE = 40
ON_LISTS = first_of_each(lambda case: case.optimizer._rule, PLAIN)
# Rows that step weight by weight in torch's operations: those over lists refuse negated weights.
ONE_BY_ONE = tuple(case for case in WITH_STATES if case.optimizer in WITH_FOREACH)


KINDS = {
    "negated": negated,
    "negated number": lambda values: negated(values[:1])[0],
    "zeros": lambda values: torch._efficientzerotensor(values.shape),
    "wrapper": lambda values: TwoTensor(values, values.clone()),
    "arriving": AsyncCollectiveTensor,
}
NATIVE = ("arriving",)


def values_of(gradient):
    return gradient.a.clone() if isinstance(gradient, TwoTensor) else gradient + 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", PLAIN, ids=str)
class TestGradientsThatHoldOtherValues:
    def test_the_step_is_that_of_their_values(self, case, kind):
        """True of the first step, of steps after others alike and after plain gradients."""
        # At most 5: a weight that crosses zero would keep the errors of larger values.
        values = [torch.arange(1.0, SIZE + 1) / SIZE * step for step in range(1, 6)]
        gradients = [KINDS[kind](value) for value in values]
        plain = values_of(gradients[0])
        ours, other = as_parameters([torch.ones_like(plain), torch.ones_like(plain)])
        # A wrapper's operations are taken twice, those that write to something plain too.
        is_wrapper = kind == "wrapper"
        optimizer = case.build([ours], fused=None)
        expected = case.build([other], fused=not is_wrapper)
        for step, value in enumerate((0, None, None, 1, 2, None, 3)):
            grad = plain.clone() if value is None else gradients[value]
            ours.grad = grad
            other.grad = grad if isinstance(grad, TwoTensor) else grad + 0
            optimizer.step()
            expected.step()
            torch.testing.assert_close(ours, other, rtol=2e-6, atol=0, msg=f"step {step}")

    def test_fused_refuses_them_with_nothing_changed(self, case, kind):
        gradient = KINDS[kind](torch.arange(1.0, SIZE + 1))
        (param,) = as_parameters([torch.ones_like(values_of(gradient))])
        optimizer = case.build([param], fused=True)
        param.grad = gradient
        if kind in NATIVE:
            for _ in range(2):  # the first step may move no weight
                optimizer.step()
            assert not (param == 1).any()
            return
        with pytest.raises(RuntimeError, match="all the gradients to be Tensors whose memory"):
            optimizer.step()
        assert (param == 1).all()


def complex_subjects(case):
    """Two weights of complex numbers, whose gradients are conjugated, and their optimizer."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(SIZE, dtype=torch.complex64, generator=generator) for _ in range(4)]
    params = as_parameters(values[:2])
    for param, value in zip(params, values[2:], strict=True):
        param.grad = value.conj()
    return params, case.build(params, fused=None)


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.5}, {"max_norm": 1e9}], ids=str)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_conjugated_gradient_is_taken_by_its_values(case, options):
    (params, optimizer), (others, expected) = complex_subjects(case), complex_subjects(case)
    for other in others:
        other.grad = other.grad.resolve_conj()
    norm = math.hypot(*torch.cat([p.grad.abs() for p in others]).double().tolist())
    found = optimizer.step(**options)
    expected.step(**options)
    assert_same_contents(contents(optimizer), contents(expected))
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param.grad, other.grad)
    if options:
        assert found.item() == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_conjugated_weight_is_an_error(case):
    params, optimizer = complex_subjects(case)
    params[1].data = params[1].detach().conj()
    before = params[0].detach().clone()
    with pytest.raises(RuntimeError, match="parameter 1 of group 0: the weight is a conjugated"):
        optimizer.step()
    assert torch.equal(params[0], before)


LATE = {
    "elements apart": (negated, (SIZE,)),
    "elements side by side": (negated_at_once, (SIZE,)),
    "one element": (negated_at_once, (1,)),
    "one element of a matrix": (negated_at_once, (1, 1)),
    "one element that is squeezed": (lambda v: negated(v).squeeze().view(1), (1,)),
    "number": (negated_at_once, ()),
    "five dimensions": (negated_at_once, (2, 1, 2, 1, 2)),
    "more dimensions than lie in a tensor": (negated_at_once, (2, 1, 2, 1, 2, 1)),
    "a side of a transposed matrix": (lambda v: negated_at_once(v.t()).t(), (3, 4)),
    "zeros": (lambda v: torch._efficientzerotensor(v.shape), (SIZE,)),
    "one zero": (lambda v: torch._efficientzerotensor(v.shape), (1,)),
}


def stepped_beside(case, shape, fused=None):
    """Two weights alike after two steps, with their optimizers."""
    params = as_parameters([torch.ones(shape), torch.ones(shape)])
    optimizers = [case.build([params[0]], fused=fused), case.build([params[1]])]
    for _ in range(2):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = torch.full(shape, 0.5)
            optimizer.step()
    return params, optimizers


AFTER = pytest.mark.parametrize(("case", "kind", "way"), thinned(PLAIN, LATE, WAYS), ids=str)


class TestAfterOrdinarySteps:
    """Every step looks for what the first step looks for, whichever way it takes."""

    @AFTER
    def test_a_gradient_is_taken_by_its_values(self, case, kind, way):
        make, shape = LATE[kind]
        (ours, other), (optimizer, expected) = stepped_beside(case, shape)
        for scale in (1.0, 2.0):
            values = torch.linspace(1, 2, other.numel()).view(shape) * scale
            ours.grad = make(values)
            other.grad = ours.grad + 0
            WAYS[way](optimizer)
            WAYS[way](expected)
            torch.testing.assert_close(ours, other, rtol=2e-6, atol=0)

    @AFTER
    def test_fused_refuses_a_gradient(self, case, kind, way):
        make, shape = LATE[kind]
        (ours, other), (optimizer, _) = stepped_beside(case, shape, fused=True)
        ours.grad = make(torch.ones(shape))
        with pytest.raises(RuntimeError, match="gradients to be Tensors whose memory"):
            WAYS[way](optimizer)
        assert_same_bits(ours.detach(), other.detach(), "weight")
        assert_counts(case, optimizer, [ours], [2])

    @AFTER
    def test_a_weight_that_has_become_one(self, case, kind, way):
        make, shape = LATE[kind]
        (ours, other), (optimizer, _) = stepped_beside(case, shape, fused=True)
        ours.data = make(other.detach().clone())
        before = ours.detach() + 0
        ours.grad = torch.ones(shape)
        with pytest.raises(RuntimeError, match=r"params to be Tensors whose|weight has no memory"):
            WAYS[way](optimizer)
        assert torch.equal(ours.detach(), before)

    @pytest.mark.parametrize(
        ("case", "kind", "way", "in_place"),
        thinned(WITH_STATES, LATE, WAYS, [False, True]),
        ids=str,
    )
    def test_a_state_that_has_become_one(self, case, kind, way, in_place):
        make, shape = LATE[kind]
        (ours, other), (optimizer, _) = stepped_beside(case, shape, fused=True)
        state, name = optimizer.state[ours], case.states[0]
        unusual = make(state[name].clone())
        if in_place:
            state[name].data = unusual
        else:
            state[name] = unusual
        ours.grad = torch.ones(shape)
        with pytest.raises(RuntimeError, match=r"states to be Tensors|state is a neg|no memory"):
            WAYS[way](optimizer)
        assert_same_bits(ours.detach(), other.detach(), "weight")
        assert_counts(case, optimizer, [ours], [2])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ONE_BY_ONE, ids=str)
def test_a_weight_and_a_state_that_are_negated_by_now(case, way):
    """They are stepped in torch's operations from then on."""
    (ours, other), (optimizer, expected) = stepped_beside(case, (SIZE,))
    name = case.states[0]
    ours.data = negated(other.detach().clone())
    optimizer.state[ours][name] = negated_at_once(optimizer.state[ours][name].clone())
    for _ in range(2):
        ours.grad, other.grad = torch.ones(SIZE), torch.ones(SIZE)
        WAYS[way](optimizer)
        WAYS[way](expected)
    torch.testing.assert_close(ours, other, rtol=2e-6, atol=0)
    ours_state, other_state = optimizer.state[ours][name], expected.state[other][name]
    torch.testing.assert_close(ours_state, other_state, rtol=2e-6, atol=0)


def transposed(tensor):
    tensor.data = tensor.data.t()


def of_another_dtype(tensor):
    tensor.data = tensor.data.view(torch.int32)


def of_fewer_elements(tensor):
    tensor.resize_(tensor.numel() - 1)


@pytest.mark.parametrize(
    ("case", "way", "change"),
    thinned(WITH_STATES, WAYS, [transposed, of_another_dtype, of_fewer_elements]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_state_changed_in_place_is_noticed(case, way, change):
    (ours, other), (optimizer, expected) = stepped_beside(case, (8, 8))
    name, values = case.states[0], torch.rand(8, 8)
    for each, param in ((optimizer, ours), (expected, other)):
        each.state[param][name].copy_(values)
        param.grad = torch.ones(8, 8)
    change(optimizer.state[ours][name])
    if change is not transposed:
        with pytest.raises(RuntimeError, match="state"):
            WAYS[way](optimizer)
        assert_same_bits(ours.detach(), other.detach(), "weight")
        return
    expected.state[other][name].copy_(values.t())
    WAYS[way](optimizer)
    WAYS[way](expected)
    assert_same_bits(ours.detach(), other.detach(), "weight")


@pytest.mark.parametrize(
    ("case", "way", "count"), thinned(WITH_COUNTS, WAYS, [-1.0, float("nan")]), ids=str
)
def test_a_negative_step_count_is_an_error(case, count, way):
    (ours, other), (optimizer, _) = stepped_beside(case, (8,))
    optimizer.state[ours]["step"].fill_(count)
    with pytest.raises(RuntimeError, match="the step count must be at least 0"):
        WAYS[way](optimizer)
    assert_same_bits(ours.detach(), other.detach(), "weight")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_gradient_in_the_memory_of_a_weight_is_an_error(case, way):
    own, other = "0 of .* its own weight in another layout", "0 of .* with the weight of .* 1 of"
    for gradient, text in (
        (lambda first, second: first.t(), own),
        (lambda first, second: second, other),
        (lambda first, second: second.view(-1)[:1].expand(8, 8), other),
    ):
        params = as_parameters([torch.rand(8, 8), torch.rand(8, 8)])
        optimizer = case.build(params)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones(8, 8)
            optimizer.step()
        before = [param.detach().clone() for param in params]
        params[0].grad = gradient(*(param.detach() for param in params))
        with pytest.raises(RuntimeError, match=text):
            WAYS[way](optimizer)
        for param, values in zip(params, before, strict=True):
            assert_same_bits(param.detach(), values, "weight")


# Leaves out the steps that clear gradients: they would clear the weight too.
@pytest.mark.parametrize("way", [way for way in WAYS if way != "clearing"])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_gradient_that_is_its_own_weight(case, way):
    (ours, other), (optimizer, expected) = stepped_beside(case, (60, 70))
    for _ in range(2):
        ours.grad, other.grad = ours.detach(), other.detach().clone()
        WAYS[way](optimizer)
        WAYS[way](expected)
        assert_same_bits(ours.detach(), other.detach(), "weight")


def test_a_negated_gradient_beside_a_sparse_one():
    weights = [torch.ones(3, 2), torch.ones(SIZE)]
    ours, others = as_parameters(weights), as_parameters(w.clone() for w in weights)
    optimizers = [optim.Adagrad(ours), optim.Adagrad(others)]
    for _ in range(3):
        values = torch.arange(1.0, SIZE + 1)
        for params, kind in ((ours, negated), (others, torch.clone)):
            params[0].grad = torch.sparse_coo_tensor([[0, 2]], [[1.0, 2.0], [3.0, 4.0]], (3, 2))
            params[1].grad = kind(values)
        for optimizer in optimizers:
            optimizer.step()
    for param, other in zip(ours, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", ONE_BY_ONE, ids=str)
def test_a_negated_weight(case):
    gradient = torch.arange(1.0, SIZE + 1)
    param = torch.nn.Parameter(negated(torch.ones(SIZE)))
    (other,) = as_parameters([torch.ones(SIZE)])
    param.grad, other.grad = gradient, gradient.clone()
    case.build([param], fused=None).step()
    case.build([other]).step()
    torch.testing.assert_close(param, other, rtol=1e-6, atol=0)
    with pytest.raises(RuntimeError, match="params to be Tensors whose memory"):
        case.build([param], fused=True).step()


@pytest.mark.parametrize("emptied", ["weight", "gradient", "state"])
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_memory_that_was_taken_away_is_an_error(case, emptied):
    params = as_parameters([torch.ones(SIZE), torch.ones(SIZE)])
    optimizer = case.build(params)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones(SIZE)
        optimizer.step()
    first, second = params
    before = first.detach().clone()
    state = optimizer.state[second][case.states[0]]
    {"weight": second, "gradient": second.grad, "state": state}[emptied].untyped_storage().resize_(
        0
    )
    with pytest.raises(RuntimeError, match=f"{emptied} has no memory"):
        optimizer.step()
    assert_same_bits(first.detach(), before, "weight")


@pytest.mark.parametrize("case", WITH_COUNTS, ids=str)
def test_a_step_count_that_becomes_another_number_is_an_error(case):
    (param,) = as_parameters([torch.ones(SIZE)])
    optimizer = case.build([param])
    for _ in range(2):
        param.grad = torch.ones(SIZE)
        optimizer.step()
    before = param.detach().clone()
    step = optimizer.state[param]["step"]
    step.data = step.data.double()
    with pytest.raises(RuntimeError, match="step count must be one float32 number"):
        optimizer.step()
    assert_same_bits(param.detach(), before, "weight")
    assert step.item() == 2


LIVES = """
import sys, threading, torch
from support.cases import PLAIN

def take_away(weight, version):
    while weight._version == version:  # until the step has what it needs, and lets others run
        pass
    weight.grad = None

for name in sys.argv[1:]:
    weight = torch.nn.Parameter(torch.zeros(1 << 22))
    optimizer = next(case for case in PLAIN if case.name == name).build([weight])
    for step in range(6):
        weight.grad = torch.ones(1 << 22)
        thread = threading.Thread(target=take_away, args=[weight, weight._version])
        thread.start()
        optimizer.step()
        thread.join()
        assert weight.grad is None
print("done")
"""


def test_a_gradient_lives_as_long_as_the_step(subprocess_environment):
    names = [case.name for case in first_of_each(lambda case: case.elementwise, PLAIN)]
    done = subprocess.run(
        [sys.executable, "-c", LIVES, *names],
        env=subprocess_environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "done\n", (done.returncode, done.stderr)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_max_norm_may_be_a_tensor(case, fused):
    params = as_parameters([torch.ones(4), torch.ones(4)])
    norms = []
    for param, max_norm in zip(params, (torch.tensor(1.0), 1.0), strict=True):
        param.grad = torch.full((4,), 2.0)
        norms.append(case.build([param], fused=fused).step(max_norm=max_norm))
    assert norms == [4.0, 4.0]
    assert_same_bits(params[0].grad, params[1].grad, "gradient")
    assert_same_bits(params[0].detach(), params[1].detach(), "weight")


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_max_grad_norm_may_be_a_tensor(case, fused):
    found = []
    for max_grad_norm in (torch.tensor(1.0), 1.0, 0.5):
        (param,) = as_parameters([torch.ones(4)])
        optimizer = case.build([param], max_grad_norm=max_grad_norm, fused=fused)
        for norm in (0.25, 4.0):
            param.grad = torch.full((4,), norm / 2)
            optimizer.step()
        found.append(contents(optimizer))
    assert_same_contents(*found[:2])
    assert any(not torch.equal(found[2][name], value) for name, value in found[1].items())


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_wrappers_gradients_are_each_clipped(case):
    params = [torch.nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4))) for _ in range(3)]
    for param in params:
        param.grad = TwoTensor(torch.full((4,), 2.0), torch.full((4,), 2.0))
    case.build(params, fused=None).step(max_norm=1.0)
    clipped = torch.full((4,), 12**-0.5)
    for param in params:
        torch.testing.assert_close(param.grad.a, clipped, rtol=1e-5, atol=0)


def test_the_norm_is_on_the_cpu_whatever_the_default_device():
    (param,) = as_parameters([torch.ones(4)])
    param.grad = torch.full((4,), 2.0)
    with torch.device("meta"):
        norm = optim.Adam([param]).step(max_norm=1.0)
    assert norm.item() == 4


def test_weights_without_a_shape_yet():
    model = torch.nn.LazyLinear(3)
    optimizer = optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not (model.weight == before).any()


def test_groups_that_share_weights_step_in_their_order():
    results = []
    for cls, options in ((optim.Adagrad, {"foreach": True}), (torch.optim.Adagrad, {})):
        memory = torch.ones(8)
        first, second = torch.nn.Parameter(memory), torch.nn.Parameter(memory.view(8))
        groups = [
            {"params": [first], "weight_decay": 0.5},
            {"params": [second], "weight_decay": 0.1, **options},
        ]
        optimizer = cls(groups, lr=0.1, eps=1.0)
        first.grad, second.grad = torch.ones(8), torch.full((8,), 3.0)
        optimizer.step()
        results.append(memory)
    torch.testing.assert_close(*results, rtol=1e-6, atol=0)


# Modes


def stepped_twice(case):
    (param,) = as_parameters([torch.ones(SIZE)])
    optimizer = case.build([param])
    for _ in range(2):
        param.grad = torch.ones(SIZE)
        optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("case", ON_LISTS, ids=str)
def test_a_traced_step_is_in_the_graph(case):
    (param, optimizer), (other, expected) = stepped_twice(case), stepped_twice(case)

    def train(gradient):
        param.grad = gradient
        optimizer.step()
        return param * 1

    graph = make_fx(train, tracing_mode="real")(torch.ones(SIZE))  # which steps once
    assert "fusedstep.step.default" in [str(node.target) for node in graph.graph.nodes]
    for _ in range(2):
        result = graph(torch.ones(SIZE))
    for _ in range(3):
        other.grad = torch.ones(SIZE)
        expected.step()
    assert_same_bits(param.detach(), other.detach(), "weight")
    assert_same_bits(result.detach(), other.detach(), "result")


@pytest.mark.parametrize("case", ON_LISTS, ids=str)
def test_fake_tensor_mode_refuses_real_weights(case):
    param, optimizer = stepped_twice(case)
    before = param.detach().clone()
    with (
        FakeTensorMode(),
        pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"),
    ):
        optimizer.step()
    with FakeTensorMode(allow_non_fake_inputs=True):
        optimizer.step()
    assert_same_bits(param.detach(), before, "weight")


@pytest.mark.parametrize("case", ON_LISTS, ids=str)
def test_a_mode_sees_every_step(case):
    param, optimizer = stepped_twice(case)
    other, expected = stepped_twice(case)
    for _ in range(2):
        with Seen() as mode:
            optimizer.step()
        assert "fusedstep.step.default" in mode.names
        expected.step()
    with Seen() as mode:
        optimizer.step(max_norm=1.0, zero_grad=True)
    assert "fusedstep.plan_prepare.default" in mode.names
    expected.step(max_norm=1.0, zero_grad=True)
    assert_same_bits(param.detach(), other.detach(), "weight")
    assert (param.grad == 0).all()


@pytest.mark.parametrize("kind", [*KINDS, "sparse"])
def test_unusual_gradients_under_a_mode(kind):
    make = KINDS.get(kind, lambda values: values.to_sparse())
    params = as_parameters([torch.ones(SIZE), torch.ones(SIZE)])
    if kind == "negated number":
        params = as_parameters([torch.ones(()), torch.ones(())])
    for param, mode in zip(params, (Seen(), contextlib.nullcontext()), strict=True):
        optimizer = optim.Adagrad([param])
        for _ in range(2):
            param.grad = make(torch.arange(1.0, SIZE + 1))
            with mode:
                optimizer.step()
    torch.testing.assert_close(*params, rtol=1e-6, atol=0)
