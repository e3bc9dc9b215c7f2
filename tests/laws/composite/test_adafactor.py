"""Laws of Adafactor in both variants: its formula, bits, and the options of a step."""

import math
from unittest import mock

import pytest
import torch

from fusedstep import optim
from reference.adafactor import adafactor
from support.adafactor import SHAPES, case, steps_of
from support.factored import ADAFACTOR as CASES
from support.layouts import GRADIENT_LAYOUTS, WEIGHT_LAYOUTS, Placed
from support.stepping import (
    ISAS,
    WAYS,
    assert_same_bits,
    forced_isa,
    make_gradients,
    make_weights,
    threads,
)

NAMES = {"row": ("row_var", "exp_avg_sq_row"), "column": ("col_var", "exp_avg_sq_col")}


def moments(optimizer, weight):
    """The state of a weight by the reference's names, in shapes without dimensions of one."""
    state = dict(optimizer.state[weight])
    found = {"moment": state.get("exp_avg")}
    for ours, names in NAMES.items():
        found[ours] = next((state[name] for name in names if name in state), None)
    if weight.dim() < 2:
        found["column"] = state.get("variance", state.get("exp_avg_sq"))
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@case
def test_is_the_formula(name, dtype, fused):
    options, formula = CASES[name]
    weights = make_weights(SHAPES, dtype)
    eps = torch.finfo(dtype).eps
    units = 8 if fused else 512  # torch's norms of 630,000 elements are less exact
    if formula["torchs"]:
        formula = {"eps1": eps} | formula
    expected = [(weight.double(), {}) for weight in weights]
    moved = [torch.zeros_like(weight) for weight, _ in expected]
    for step in range(3):
        for i, grad in enumerate(make_gradients(SHAPES, dtype, step)):
            before = expected[i][0]
            expected[i] = adafactor(before, grad.double(), expected[i][1], step + 1.0, **formula)
            moved[i] += (expected[i][0] - before).abs()
    optimizer = steps_of(weights, options=options, fused=fused)
    for weight, (value, state), move in zip(weights, expected, moved, strict=True):
        error = (weight.double() - value).abs()
        assert (error <= 4 * eps * weight.double().abs() + units * eps * move).all()
        found = moments(optimizer, weight)
        assert found.keys() == state.keys()
        for key, moment in state.items():
            torch.testing.assert_close(
                found[key].double().reshape(moment.shape),
                moment,
                rtol=0,
                atol=units * eps * moment.abs().max().item(),
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@case
def test_16_bits_are_computed_in_float32(name, dtype):
    """A step is that of float32 weights and gradients with these values, rounded at its end."""
    options = CASES[name][0]
    if "eps" not in options and CASES[name][1]["torchs"]:
        options = options | {"eps": (1e-3, 1e-3)}  # that of the dtype is another one
    weights, grads = make_weights(SHAPES, dtype), make_gradients(SHAPES, dtype, 0)
    wide = [weight.float() for weight in weights]
    steps_of(wide, 1, options, [grad.float() for grad in grads])
    narrow = steps_of(weights, 1, options, grads)
    assert narrow.state[weights[0]].keys() == narrow.state[weights[1]].keys()
    for weight, value in zip(weights, wide, strict=True):
        assert torch.equal(weight, value.to(dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@case
def test_same_bits_on_every_isa_and_number_of_threads(name, dtype, isa):
    shapes = ((600, 2100), (3, 5000), (70, 33), (5,))
    expected, weights = make_weights(shapes, dtype), make_weights(shapes, dtype)
    with threads(1), forced_isa("base"):
        steps_of(expected, 2, CASES[name][0])
    with threads(5), forced_isa(isa):
        steps_of(weights, 2, CASES[name][0])
    assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize("grad_layout", GRADIENT_LAYOUTS)
@pytest.mark.parametrize(
    "layout", [each for each in WEIGHT_LAYOUTS if 0 not in each.shape], ids=str
)
def test_same_bits_in_every_layout(layout, grad_layout):
    (values,), (gradient,) = (
        make([layout.shape], torch.float32, 1) for make in (make_weights, make_gradients)
    )
    placed = layout.place(values)
    grad = Placed(gradient, GRADIENT_LAYOUTS[grad_layout](layout))
    expected = values.clone()
    options = CASES["transformers-warmup"][0] | {"warmup_init": False}
    steps_of([expected], 2, options, [grad.view.contiguous()])
    steps_of([placed.view], 2, options, [grad.view])
    assert torch.equal(placed.view, expected)
    placed.assert_outside_untouched("weight")
    grad.assert_outside_untouched("gradient")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fused", [True, False])
def test_bfloat16_weights_can_take_small_steps(way, fused):
    weight = torch.ones(64, 64, dtype=torch.bfloat16)
    options = {"lr": 1e-3, "scale_parameter": False, "relative_step": False, "fused": fused}
    steps_of([weight], 200, options, [torch.ones_like(weight)], **WAYS[way])
    assert abs(weight.float().mean().item() - 0.8) < 2e-3
    stays = torch.ones(64, 64, dtype=torch.bfloat16)
    steps_of([stays], 200, options, [torch.ones_like(stays)])
    assert torch.equal(stays, torch.ones_like(stays))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fused", [True, False])
def test_a_float32_value_moves_by_small_gradients_as_a_float32_weight(way, fused):
    grad = torch.full((64, 64), 1e-5, dtype=torch.bfloat16)
    wide, narrow = torch.ones(64, 64), torch.ones(64, 64, dtype=torch.bfloat16)
    steps_of([wide], 50, {"lr": 1e-2, "fused": fused}, [grad.float()])
    steps_of([narrow], 50, {"lr": 1e-2, "fused": fused}, [grad], **WAYS[way])
    assert wide.max() < 0.9
    assert abs((narrow.float() - wide).mean()) < 5e-3


def test_one_weight_at_a_time_is_all_at_once():
    together, apart = (make_weights(SHAPES, torch.float32) for _ in range(2))
    steps_of(together, 3)
    for i, weight in enumerate(apart):
        optimizer = optim.Adafactor([weight], fused=True)
        for step in range(3):
            weight.grad = make_gradients(SHAPES, torch.float32, step)[i]
            optimizer.step()
    assert all(map(torch.equal, together, apart))


def test_weights_that_have_taken_other_numbers_of_steps_are_stepped_together():
    weights, others = (make_weights(SHAPES, torch.float32) for _ in range(2))
    options = {"beta1": 0.8, "weight_decay": 0.1}
    optimizer = steps_of(weights, 2, **options)
    apart = [steps_of([other], 0, **options) for other in others]
    for step in range(2):
        for other, grad in zip(others, make_gradients(SHAPES, torch.float32, step), strict=True):
            other.grad = grad
        for each in apart:
            each.step()
    counts = {id(weight): 2.0 + i % 3 for i, weight in enumerate(weights)}
    for weight, each, other in zip(weights, apart, others, strict=True):
        optimizer.state[weight]["step"].fill_(counts[id(weight)])
        each.state[other]["step"].fill_(counts[id(weight)])
        weight.grad = other.grad = torch.ones_like(weight)
    optimizer.step()
    for each in apart:
        each.step()
    assert all(map(torch.equal, weights, others))


def test_weights_without_elements_are_counted_and_left_alone():
    weights = [torch.ones(4, 3), torch.ones(0, 3), torch.ones(3, 0), torch.ones(0)]
    optimizer = optim.Adafactor(weights, fused=True)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert [optimizer.state[weight]["step"].item() for weight in weights] == [1.0] * 4
    assert not optimizer.state[weights[2]]["row_var"].any()


def test_defaults_are_those_of_the_rule():
    optimizer = optim.Adafactor([torch.zeros(3)])
    found = optimizer._options(optimizer.param_groups[0])
    assert [*map(float, found[:-1])] == torch.ops.fusedstep.rule_defaults("adafactor")


def test_clipping_and_zeroing_are_those_of_torch():
    weights, others = (make_weights(SHAPES, torch.float32) for _ in range(2))
    optimizers = [optim.Adafactor(each, fused=True) for each in (weights, others)]
    for step in range(2):
        for mine, other, grad in zip(
            weights, others, make_gradients(SHAPES, torch.float32, step), strict=True
        ):
            mine.grad, other.grad = grad.clone(), grad.clone()
        norm = optimizers[0].step(max_norm=0.5, zero_grad=True)
        exact = torch.cat([other.grad.double().flatten() for other in others]).norm()
        torch.nn.utils.clip_grad_norm_(others, 0.5)
        optimizers[1].step()
        torch.testing.assert_close(norm, exact, rtol=1e-12, atol=0)
        assert not any(weight.grad.any() for weight in weights)
    for mine, other in zip(weights, others, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"beta1": 0.8}], ids=str)
def test_clipped_gradients_are_multiplied_as_they_are_read(options):
    """Those that torch operations take, beforehand: a gradient's memory may not hold its values."""
    for is_negated in (False, True):
        found, norm = [], None
        for is_clipped in (True, False):
            weights = make_weights(SHAPES, torch.float32)
            grads = make_gradients(SHAPES, torch.float32, 0)
            if is_negated:
                grads[0] = torch.complex(grads[0], -grads[0]).conj().imag
                assert grads[0].is_neg()
            if not is_clipped:
                grads = torch._foreach_mul(grads, 0.5 / (norm.item() + 1e-6))
            for weight, grad in zip(weights, grads, strict=True):
                weight.grad = grad
            groups = [{"params": weights[:4]}, {"params": weights[4:], "weight_decay": 0.1}]
            optimizer = optim.Adafactor(groups, **options)
            with mock.patch("torch._foreach_mul", wraps=torch._foreach_mul) as copies:
                if is_clipped:
                    norm = optimizer.step(max_norm=0.5, zero_grad="none")
                    assert copies.call_count == is_negated
                else:
                    optimizer.step()
            found.append(weights)
        for clipped, other in zip(*found, strict=True):
            if is_negated:
                torch.testing.assert_close(clipped, other)
            else:
                assert torch.equal(clipped, other)


@case
def test_keeps_a_row_and_a_column(name):
    weight = torch.randn(300, 200)
    optimizer = steps_of([weight], 1, CASES[name][0])
    sizes = sum(t.numel() for key, t in optimizer.state[weight].items() if key != "step")
    assert sizes == 500 + (weight.numel() if "beta1" in CASES[name][0] else 0)


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("fused", [True, None, False])
def test_a_scaler_steps_as_unscaled_gradients_do(fused, overflows):
    """With ``fused=True`` the scaler leaves the division to the step, and the skipped step too."""

    def trained(scale):
        params = [torch.nn.Parameter(torch.ones(16, 16)), torch.nn.Parameter(torch.ones(9))]
        optimizer = optim.Adafactor(params, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        generator = torch.Generator().manual_seed(0)
        for number in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator) * scale
            is_skipped = overflows and number == 1
            if is_skipped:
                params[0].grad[0, 0] = math.inf
            if scale == 1:
                if not is_skipped:
                    optimizer.step()
                continue
            scaler.scale(torch.ones(1))
            scaler.step(optimizer)
            scaler.update(scale)
        return [*params, *(optimizer.state[p]["step"] for p in params)]

    for found, expected in zip(trained(1024.0), trained(1.0), strict=True):
        assert_same_bits(found.detach(), expected.detach(), "operand")
