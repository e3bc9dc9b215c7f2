"""Law: a weight and a gradient of any layout give the result of dense ones, and nothing outside of
the view is touched.

Elementwise rules give the same bits. With norms the sums run in another order, which may move the
trust ratio by one unit of fp32.
"""

import math
from typing import NamedTuple

import pytest
import torch

import fusedstep
from fusedstep import optim
from support.cases import CASES, DTYPES, FAMILIES, LOW_PRECISION, PLAIN, WITH_STATES, dealt
from support.layouts import GRADIENT_LAYOUTS, WEIGHT_LAYOUTS, Layout, Placed
from support.stepping import (
    as_parameters,
    assert_same_bits,
    assert_within,
    bits,
    forced_isa,
    make_gradients,
    make_weights,
    one_ulp_of_ratio,
)

STEPS = 2
LAMB = next(case for case in PLAIN if case.optimizer is optim.Lamb)


class Dense(NamedTuple):
    """A step of dense weights: the weights before it and after, and the states after."""

    before: list[torch.Tensor]
    after: list[torch.Tensor]
    states: list[dict[str, torch.Tensor]]


def gradients_of(layout, dtype, step):
    """One in each of the gradient layouts."""
    values = make_gradients([layout.shape] * len(GRADIENT_LAYOUTS), dtype, step)
    strides = [strides_of(layout) for strides_of in GRADIENT_LAYOUTS.values()]
    return list(map(Placed, values, strides))


def dense_steps(case, layout, dtype):
    """The steps that those of a layout are compared with, which has the gradients' values."""
    params = as_parameters(make_weights([layout.shape] * len(GRADIENT_LAYOUTS), dtype))
    optimizer = case.build(params)
    for step in range(1, STEPS + 1):
        before = [param.detach().clone() for param in params]
        for param, gradient in zip(params, gradients_of(layout, dtype, step), strict=True):
            param.grad = gradient.view.clone(memory_format=torch.contiguous_format)
        optimizer.step()
        states = [
            {name: optimizer.state[param][name].clone() for name in case.states} for param in params
        ]
        yield Dense(before, [param.detach().clone() for param in params], states)


def check_layout(case, layout, dtype, expected):
    """One weight of the layout for each gradient layout, beside the dense steps."""
    placed = [layout.place(value) for value in expected[0].before]
    params = [torch.nn.Parameter(place.view) for place in placed]
    optimizer = case.build(params)
    for step, dense in enumerate(expected, start=1):
        with torch.no_grad():
            # With norms a step may have moved a weight within its bound: start anew from the same.
            for param, value in zip(params, dense.before, strict=True):
                param.copy_(value)
        gradients = gradients_of(layout, dtype, step)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.view
        given = [gradient.view.clone() for gradient in gradients]
        optimizer.step()
        for index, name in enumerate(GRADIENT_LAYOUTS):
            what = f"{layout}, gradient {name}, step {step}"
            param, before, after = params[index], dense.before[index], dense.after[index]
            placed[index].assert_outside_untouched(f"weight, {what}")
            gradients[index].assert_outside_untouched(f"gradient, {what}")
            if not case.stores_update_in_grad(dtype) or gradients[index].shares_elements:
                assert_same_bits(gradients[index].view, given[index], f"gradient itself, {what}")
            if case.elementwise:
                assert_same_bits(param, after, f"weight, {what}")
            else:
                assert_within(param, after, one_ulp_of_ratio(before, after), f"weight, {what}")
            for state, value in dense.states[index].items():
                assert_same_bits(optimizer.state[param][state], value, f"{state}, {what}")


@pytest.mark.parametrize(
    ("case", "layout"),
    dealt([case for case in CASES if case not in PLAIN], WEIGHT_LAYOUTS, 4),
    ids=str,
)
def test_any_layout(case, layout):
    """The plain rows have this on every instruction set."""
    check_layout(case, layout, torch.float32, [*dense_steps(case, layout, torch.float32)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_any_layout_on_any_isa(case, dtype):
    """The dense steps have the same bits on each: once is enough of them."""
    # Rows that are not the first of a family: a layout in one of the dtypes. Elements of two bytes
    # move alike, whatever they are.
    some = slice(None)
    if case not in FAMILIES or dtype is torch.float16:
        some = slice((PLAIN.index(case) + DTYPES.index(dtype)) % len(DTYPES), None, len(DTYPES))
    for layout in WEIGHT_LAYOUTS[some]:
        expected = [*dense_steps(case, layout, dtype)]
        for isa in fusedstep.isas():
            with forced_isa(isa):
                check_layout(case, layout, dtype, expected)


def same_order(tensor, other) -> bool:
    """True if both are laid out in the same order of dimensions."""

    def order(strides):
        long = [dim for dim, size in enumerate(tensor.shape) if size > 1]
        return sorted(long, key=lambda dim: (strides[dim], dim))

    return order(tensor.stride()) == order(other.stride())


@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS, ids=str)
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_states_are_dense_in_the_order_of_the_weight(case, layout):
    (value,) = make_weights([layout.shape], torch.float32)
    param = torch.nn.Parameter(layout.place(value).view)
    optimizer = case.build([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    for name in case.states:
        state = optimizer.state[param][name]
        span = 1 + sum(
            (n - 1) * stride for n, stride in zip(state.shape, state.stride(), strict=True)
        )
        assert state.dtype == param.dtype
        assert state.numel() == 0 or span == state.numel(), name
        assert same_order(state, param), name


@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS, ids=str)
def test_trust_ratio_within_one_ulp(layout):
    """A weight of zero moves by minus lr times ratio times update: with lr 1 it shows the ratio.

    The update itself is elementwise, so a dense weight's gradient holds the very same one.
    """
    if math.prod(layout.shape) < 2:
        layout = Layout(layout.name, (2,), (3,))
    (value,) = make_weights([layout.shape], torch.float32)
    value.view(-1)[::3] = 0.0
    (gradient,) = make_gradients([layout.shape], torch.float32, 1)
    dense, param = as_parameters([value, value])
    param.data = layout.place(value).view
    for each, options in ((dense, {}), (param, {"keep_grad": True})):
        each.grad = gradient.clone()
        LAMB.build([each], lr=1.0, **options).step()
    update = dense.grad.double()
    expected = (value.double().norm() / update.norm()).expand(value.shape)
    unit = torch.finfo(torch.float32).eps
    for each in (dense, param):
        # One unit for the ratio, and half of one for rounding its product with the update.
        seen = (-each.detach().double() / update)[value == 0]
        assert_within(seen, expected[value == 0], 1.5 * unit * expected[value == 0], "ratio")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lamb_leaves_its_update_in_a_dense_gradient(dtype):
    (value,) = make_weights([(131, 257)], dtype)
    (gradient,) = make_gradients([(131, 257)], dtype, 1)
    for keep_grad in (False, True):
        param = torch.nn.Parameter(value.clone())
        param.grad = gradient.clone()
        LAMB.build([param], weight_decay=0.02, keep_grad=keep_grad).step()
        if keep_grad or dtype in LOW_PRECISION:
            assert_same_bits(param.grad, gradient, "gradient")
        else:
            wide, weight = gradient.double(), value.double()
            update = wide / (wide.abs() + 1e-8) + 0.02 * weight
            bound = 8 * torch.finfo(dtype).eps * update.abs().max()
            assert_within(param.grad, update, bound, "update")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_that_share_memory(case):
    """Weights with the very same gradient, and a gradient that is another one's view."""
    shapes = ((40, 50), (40, 50), (20, 50))
    values = make_weights(shapes, torch.float32)
    params, alone = as_parameters(values), as_parameters(values)
    (gradient, *_) = make_gradients(shapes, torch.float32, 1)
    for param, own, view in zip(params, alone, (gradient, gradient, gradient[:20]), strict=True):
        param.grad, own.grad = view, view.clone()
    given = gradient.clone()
    case.build(params).step()
    case.build(alone).step()
    for index, (param, own) in enumerate(zip(params, alone, strict=True)):
        assert_same_bits(param, own, f"weight {index}")
    assert torch.equal(bits(gradient), bits(given))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_that_is_the_weight(case):
    (value,) = make_weights([(3, 50)], torch.float32)
    param, other = as_parameters([value, value])
    param.grad, other.grad = param.detach(), other.detach().clone()
    case.build([param]).step()
    case.build([other]).step()
    assert_same_bits(param, other, "weight")
