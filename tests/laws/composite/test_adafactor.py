"""Laws of Adafactor in both variants: its formula, bits, checkpoints, options and errors."""

import copy
import functools
import itertools
import math
from unittest import mock

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep._native import ops
from reference.adafactor import adafactor
from support.factored import ADAFACTOR as CASES
from support.factored import stepped
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

#: Matrices of one block and of several, stacks of matrices, vectors and a number.
SHAPES = ((7, 5), (300, 2100), (3, 40), (4, 5, 6, 7), (2, 33, 18), (700,), (1, 9), (9, 1), ())

NAMES = {"row": ("row_var", "exp_avg_sq_row"), "column": ("col_var", "exp_avg_sq_col")}


def case(function):
    return pytest.mark.parametrize("name", CASES)(function)


def steps_of(weights, steps=3, options=(), grads=None, **more):
    """An optimizer of these weights after some steps; the weights are changed."""
    optimizer = optim.Adafactor(weights, **{"fused": True, **dict(options), **more})
    return stepped(optimizer, weights, steps, grads)


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


def theirs(name, params):
    if CASES[name][1]["torchs"]:
        return torch.optim.Adafactor(params, foreach=False, **CASES[name][0])
    transformers = pytest.importorskip("transformers.optimization", exc_type=ImportError)
    options = {k: v for k, v in CASES[name][0].items() if k != "variant"}
    if "max_relative_step" in options:
        pytest.skip("transformers' class has no such option")
    return transformers.Adafactor(params, **options)


@case
def test_goes_on_from_checkpoints_of_the_namesakes(name, tmp_path):
    weights, others = make_weights(SHAPES, torch.float32), make_weights(SHAPES, torch.float32)
    gradients = [make_gradients(SHAPES, torch.float32, step) for step in range(4)]
    ours, namesake = optim.Adafactor(weights, **CASES[name][0]), theirs(name, others)
    for step, grads in enumerate(gradients):
        if step == 2:  # each goes on with the other's state
            dictionaries = [copy.deepcopy(each.state_dict()) for each in (ours, namesake)]
            torch.save(dictionaries[1], tmp_path / "saved.pt")
            ours = optim.Adafactor(weights, fused=True)
            ours.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))
            if CASES[name][1]["torchs"]:
                namesake = theirs(name, others)
                namesake.load_state_dict(dictionaries[0])
        for weight, other, grad in zip(weights, others, grads, strict=True):
            weight.grad, other.grad = grad.clone(), grad.clone()
        ours.step()
        namesake.step()
    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=5e-6)


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


CHANGES = {
    "nothing": lambda optimizer, weights: None,
    "lr": lambda optimizer, weights: optimizer.param_groups[0].update(lr=0.5),
    "weight_decay": lambda optimizer, weights: optimizer.param_groups[1].update(weight_decay=0.3),
    "relative_step": lambda optimizer, weights: optimizer.param_groups[0].update(
        relative_step=False
    ),
    "eps": lambda optimizer, weights: optimizer.param_groups[0].update(eps=(0.3, 2.0)),
    "fused": lambda optimizer, weights: optimizer.param_groups[0].update(fused=False),
    "no gradient": lambda optimizer, weights: setattr(weights[1], "grad", None),
    "a count": lambda optimizer, weights: optimizer.state[weights[0]]["step"].add_(5),
    "all counts": lambda optimizer, weights: [
        optimizer.state[weight]["step"].data.add_(5) for weight in weights
    ],
    "a state": lambda optimizer, weights: optimizer.state[weights[0]].update(
        row_var=optimizer.state[weights[0]]["row_var"] * 2
    ),
    "no state": lambda optimizer, weights: optimizer.state.pop(weights[0]),
    "memory": lambda optimizer, weights: setattr(
        weights[0], "data", weights[0].t().contiguous().t()
    ),
    "strides": lambda optimizer, weights: setattr(
        weights[0], "data", weights[0].data.as_strided(weights[0].shape, (1, len(weights[0])))
    ),
    "order": lambda optimizer, weights: optimizer.param_groups[0]["params"].reverse(),
    "less weights": lambda optimizer, weights: optimizer.state.pop(
        optimizer.param_groups[0]["params"].pop()
    ),
    "zeros": lambda optimizer, weights: setattr(
        weights[0], "grad", torch._efficientzerotensor(weights[0].shape)
    ),
    "negated": lambda optimizer, weights: setattr(
        weights[0], "grad", torch.complex(weights[0].grad, weights[0].grad).conj().imag
    ),
}


class WithoutPlans(optim.Adafactor):
    """Steps on the CPU by the operator that steps weights on a device."""

    def _is_native(self, *operands):
        super()._is_native(*operands)
        return False


@pytest.mark.parametrize("cls", [optim.Adafactor, WithoutPlans])
@pytest.mark.parametrize("change", CHANGES)
def test_steps_alike_see_what_has_changed(change, cls):
    """A step repeats the last one, or is bound from the start: with the same bits."""
    kept = []
    for repeats in (True, False):
        weights = make_weights(SHAPES, torch.float32)
        groups = [{"params": weights[:4]}, {"params": weights[4:], "weight_decay": 0.1}]
        optimizer = cls(groups)
        for step in range(5):
            for weight, grad in zip(
                weights, make_gradients(SHAPES, torch.float32, step), strict=True
            ):
                if weight.grad is None or step == 4:  # after a change of gradients
                    weight.grad = grad
                weight.grad.copy_(grad)
            if step == 3:
                CHANGES[change](optimizer, weights)
            if step == 3 and cls is WithoutPlans:
                assert optimizer._memory[weights[0]].derived
            elif step == 3 and ops.bind:
                assert optimizer._last_step
            if not repeats:
                optimizer._forget_plans()
            version = weights[2]._version
            optimizer.step()
            assert weights[2]._version > version
        kept.append((weights, optimizer.state_dict()["state"]))
    (weights, states), (others, other_states) = kept
    assert all(map(torch.equal, weights, others))
    for key, state in states.items():
        assert all(torch.equal(value, other_states[key][name]) for name, value in state.items())


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["a number", "a tensor"])
def test_parts_of_a_step_are_made_once(lr):
    weights = make_weights(SHAPES, torch.float32)
    for weight, grad in zip(weights, make_gradients(SHAPES, torch.float32, 0), strict=True):
        weight.grad = grad
    optimizer = WithoutPlans(weights, lr=lr)
    optimizer.step()
    parts = optimizer._memory[weights[0]].derived
    optimizer.step()
    assert optimizer._memory[weights[0]].derived is parts


def test_an_lr_that_changes_in_place_is_checked_at_each_step():
    weight, lr = torch.ones(3, 4), torch.tensor(1e-2)
    weight.grad = torch.ones(3, 4)
    optimizer = WithoutPlans([weight], lr=lr)
    for _ in range(2):
        optimizer.step()
    before = weight.clone()
    lr.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"Invalid options of group 0.*Learning rate"):
        optimizer.step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("variant", ["torch", "transformers"])
def test_an_lr_of_two_elements_is_an_error_that_names_it(variant):
    lr = torch.tensor([0.1, 0.2])
    (weight,) = make_weights([(4, 3)], torch.float32)
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        optim.Adafactor([weight], lr=lr, variant=variant)
    optimizer = steps_of([weight], 2)
    before = weight.clone()
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        optimizer.step()
    assert torch.equal(weight, before)


def test_an_lr_below_0_is_an_error_of_a_repeated_step_too():
    weights = make_weights(SHAPES, torch.float32)
    optimizer = steps_of(weights, 3)
    before = [weight.clone() for weight in weights]
    optimizer.param_groups[0]["lr"] = -0.5
    with pytest.raises(ValueError, match=r"Learning rate should be >= 0 but is: -0\.5"):
        optimizer.step()
    assert all(map(torch.equal, weights, before))


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


@pytest.mark.parametrize(
    ("role", "spoil", "text"),
    [
        (0, torch.Tensor.double, "a state of rows is float64 but has to be float32"),
        (1, lambda state: state[:2].clone(), "a number for each of the 3 columns"),
        (2, torch.Tensor.bfloat16, "a state is bfloat16 but the weight is float32"),
    ],
)
def test_a_plan_refuses_states_of_another_form(role, spoil, text):
    weight, grad = torch.ones(4, 3), torch.ones(4, 3)
    states = [torch.zeros(4), torch.zeros(3), torch.zeros(4, 3)]
    states[role] = spoil(states[role])
    plan = torch.ops.fusedstep.plan_new([weight], states, [torch.zeros(())])
    torch.ops.fusedstep.plan_roles(plan, ops.rule_index["adafactor"])
    with pytest.raises(RuntimeError, match=text):
        torch.ops.fusedstep.plan_bind(plan, [weight], [grad])
    torch.ops.fusedstep.plan_delete(plan)


@pytest.mark.parametrize(
    ("dtype", "use", "text"),
    [
        (torch.float32, 3, "leaves gradients as they are"),
        (torch.bfloat16, 0, "the first moment must be float32"),
    ],
)
def test_a_plan_refuses_what_its_step_cannot_do(dtype, use, text):
    weight, grad = (torch.ones(4, 3, dtype=dtype) for _ in range(2))
    states = [torch.zeros(4), torch.zeros(3), torch.zeros_like(weight)]
    plan = torch.ops.fusedstep.plan_new([weight], states, [torch.zeros(())])
    torch.ops.fusedstep.plan_roles(plan, ops.rule_index["adafactor"])
    torch.ops.fusedstep.plan_bind(plan, [weight], [grad])
    options = [*torch.ops.fusedstep.rule_defaults("adafactor"), 0.0]
    options[ops.rule_options["adafactor"].index("averages")] = 1.0
    with pytest.raises(RuntimeError, match=text):
        torch.ops.fusedstep.plan_prepare(plan, ops.rule_index["adafactor"], options, 1.0, use)
    torch.ops.fusedstep.plan_delete(plan)


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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"eps": 1e-3}, r"eps must be \(eps1, eps2\)"),
        ({"eps": (None, -1.0)}, "epsilon2 should be >= 0"),
        ({"eps": (-1.0, 1.0)}, "epsilon1 should be >= 0"),
        ({"eps": (1e-30, "1")}, r"eps\[1\] must be a number"),
        ({"beta2_decay": 0.8}, "beta2_decay"),
        ({"decay_rate": 0.8}, "beta2_decay"),
        ({"d": 0.5}, "d should be >= 1"),
        ({"clip_threshold": "1"}, "d must be a number"),
        ({"beta1": 1.0}, "beta1"),
        ({"variant": "fairseq"}, "variant"),
        ({"lr": -1.0}, "Learning rate should"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"warmup_init": True, "relative_step": False}, "warmup_init"),
        ({"max_relative_step": -1.0}, "max_relative_step should be >= 0"),
        ({"max_relative_step": "1"}, "max_relative_step must be a number"),
        ({"max_relative_step": 0.1, "variant": "torch"}, "max_relative_step is lr"),
        ({"master_weights": "half"}, "master_weights"),
    ],
    ids=str,
)
def test_refuses_what_is_out_of_range(options, text):
    weight = torch.ones(3, 4)
    with pytest.raises((TypeError, ValueError), match=text):
        optim.Adafactor([weight], **options)
    optimizer = optim.Adafactor([weight])
    with pytest.raises((TypeError, ValueError), match=text):
        optimizer.add_param_group({"params": [torch.ones(2)], **options})
    assert len(optimizer.param_groups) == 1


def test_refuses_complex_weights_by_name():
    with pytest.raises(RuntimeError, match="complex parameters: parameter 0 of group 0"):
        optim.Adafactor([torch.ones(3, 4, dtype=torch.complex64)])


#: Optimizers whose relative steps are those of transformers' class, by what they are made of.
RELATIVE = {
    "transformers": lambda params, **options: optim.Adafactor(
        params, lr=None, relative_step=True, **options
    ),
    "galore": lambda params, **options: optim.GaLoreAdafactor(
        [{"params": params, "rank": 2}], **options
    ),
    "galore without a rank": optim.GaLoreAdafactor,
}
relative = pytest.mark.parametrize("name", RELATIVE)


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """transformers' AdafactorSchedule."""

    def __init__(self, optimizer):
        for group in optimizer.param_groups:
            group["initial_lr"] = 0.0
        super().__init__(optimizer, lambda _: 0.0)

    def get_lr(self):
        opt, groups = self.optimizer, self.optimizer.param_groups
        firsts = [(group, group["params"][0]) for group in groups]
        found = [opt._get_lr(g, opt.state[p]) for g, p in firsts if p.grad is not None]
        return found or self.base_lrs


def trained(make, schedule=None, is_zeroed_first=False, fused=None, steps=3):
    weights = [torch.nn.Parameter(0.05 * w) for w in make_weights([(6, 5), (4, 7)], torch.float32)]
    optimizer = make(weights, fused=fused)
    scheduler = schedule and schedule(optimizer)
    for step in range(steps):
        for weight, grad in zip(
            weights, make_gradients([w.shape for w in weights], torch.float32, step), strict=True
        ):
            weight.grad = grad
        optimizer.step()
        if is_zeroed_first:
            optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        optimizer.zero_grad()
    return optimizer, weights


@relative
@pytest.mark.parametrize("fused", [None, False])
def test_relative_steps_of_transformers_read_no_lr(name, fused):
    def falling(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * step)

    _, expected = trained(RELATIVE[name], fused=fused)
    for schedule in (falling, Schedule):
        for is_zeroed_first in (True, False):
            optimizer, weights = trained(RELATIVE[name], schedule, is_zeroed_first, fused)
            assert all(map(torch.equal, weights, expected))
    shown = 1e-2 * max(1e-3, weights[0].square().mean().sqrt().item())  # by the last of them
    assert optimizer.param_groups[0]["lr"] == pytest.approx(shown, rel=1e-5)


def test_a_schedule_that_shows_steps_is_refused_where_they_follow_lr():
    with pytest.raises(RuntimeError, match="variant='transformers'"):
        trained(optim.Adafactor, Schedule)


@pytest.mark.parametrize("cls", [optim.Adafactor, optim.GaLoreAdafactor])
def test_an_lr_that_no_step_reads_is_refused(cls):
    with pytest.raises(ValueError, match="give max_relative_step"):
        cls([torch.ones(2, 3)], lr=0.1, relative_step=True)


@pytest.mark.parametrize("door", ["load_state_dict", "import_state_dict", "convert"])
@pytest.mark.parametrize("shown", [0.0, torch.tensor(5.1e-4)], ids=str)
def test_checkpoints_under_a_schedule_go_on(door, shown):
    """Their lr is what was shown; their other options are those of the steps to come."""
    options = {"clip_threshold": 0.5, "decay_rate": -0.6, "beta1": 0.8, "weight_decay": 0.1}
    whole, expected = trained(lambda weights, fused: optim.Adafactor(weights, **options), steps=2)
    weights = [torch.nn.Parameter(weight.detach().clone()) for weight in expected]
    other = type("Adafactor", (torch.optim.Optimizer,), {"__module__": "transformers.optimization"})
    of_class = {"eps": (1e-30, 1e-3), "scale_parameter": True, "relative_step": True}
    theirs = other(weights, {"lr": None, "warmup_init": False, **of_class, **options})
    theirs.param_groups[0]["lr"] = shown
    for weight, own in zip(weights, expected, strict=True):
        state = {name: value.clone() for name, value in whole.state[own].items()}
        theirs.state[weight] = state | {"step": int(state["step"]), "RMS": 0.05}
    if door == "convert":
        ours = fusedstep.convert(theirs)
    else:
        ours = optim.Adafactor(weights, relative_step=True, lr=None)
        load = ours.load_state_dict
        if door == "import_state_dict":
            load = functools.partial(fusedstep.import_state_dict, ours)
        load(theirs.state_dict())
    stepped(whole, expected, 2, begin=2)
    stepped(ours, weights, 2, begin=2)
    assert all(map(torch.equal, weights, expected))


def test_shows_what_the_schedule_of_transformers_shows():
    transformers = pytest.importorskip("transformers.optimization", exc_type=ImportError)
    for is_zeroed_first in (True, False):
        (ours, weights), (theirs, others) = (
            trained(make, transformers.AdafactorSchedule, is_zeroed_first)
            for make in (
                RELATIVE["transformers"],
                lambda weights, fused: transformers.Adafactor(weights),
            )
        )
        for weight, other in zip(weights, others, strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-5, atol=5e-6)
        lr, shown = (each.param_groups[0]["lr"] for each in (ours, theirs))
        assert lr == pytest.approx(float(shown), rel=0.01)  # by a weight before its last step


def test_is_converted_and_verified():
    weights = make_weights(SHAPES, torch.float32)
    namesake = torch.optim.Adafactor(weights, lr=0.05)
    for weight, grad in zip(weights, make_gradients(SHAPES, torch.float32, 0), strict=True):
        weight.grad = grad
    namesake.step()
    ours = fusedstep.convert(namesake, fused=True)
    assert type(ours) is optim.Adafactor
    assert ours.param_groups[0]["lr"] == 0.05
    fusedstep.verify(ours)


def test_groups_have_options_of_their_own():
    first, second = (make_weights(SHAPES[:2], torch.float32) for _ in range(2))
    alone = [copy.deepcopy(first), copy.deepcopy(second)]
    groups = [{"params": first}, {"params": second, "relative_step": False, "lr": 1e-3}]
    optimizer = optim.Adafactor(groups, fused=True)
    grads = make_gradients(SHAPES[:2], torch.float32, 0)
    for weight, grad in zip(itertools.chain(first, second), itertools.cycle(grads), strict=False):
        weight.grad = grad.clone()
    optimizer.step()
    steps_of(alone[0], 1)
    steps_of(alone[1], 1, {"relative_step": False, "lr": 1e-3, "variant": "torch"})
    assert all(map(torch.equal, (*first, *second), (*alone[0], *alone[1])))
    assert optimizer.param_groups[0].keys() >= {"beta2_decay", "d"}
    assert "variant" not in optimizer.param_groups[0]


def test_transformers_optimizer_is_converted():
    transformers = pytest.importorskip("transformers.optimization", exc_type=ImportError)
    weights = make_weights(SHAPES, torch.float32)
    other = transformers.Adafactor(weights, beta1=0.5, clip_threshold=0.9)
    for weight, grad in zip(weights, make_gradients(SHAPES, torch.float32, 0), strict=True):
        weight.grad = grad
    other.step()
    ours = fusedstep.convert(other)
    group = ours.param_groups[0]
    assert (group["variant"], group["d"], group["beta1"]) == ("transformers", 0.9, 0.5)
    assert ours.state[weights[0]].keys() == {"step", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg"}


@pytest.mark.parametrize(
    ("name", "of_all", "of_group"),
    [
        ("relative_step", False, True),
        ("scale_parameter", False, True),
        ("warmup_init", True, False),
        ("beta1", 0.9, None),
        ("variant", "transformers", "torch"),
    ],
)
def test_an_option_of_a_group_wins(name, of_all, of_group):
    weights = [torch.ones(2, 3), torch.ones(2, 3)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], name: of_group}]
    optimizer = optim.Adafactor(groups, **{name: of_all})
    assert [group[name] for group in optimizer.param_groups] == [of_all, of_group]


def test_a_variant_that_was_given_is_that_of_all_groups():
    groups = [{"params": [torch.ones(2)]}, {"params": [torch.ones(2)], "beta1": 0.9}]
    optimizer = optim.Adafactor(groups, variant="torch")
    assert not any("variant" in group for group in optimizer.param_groups)
    assert optimizer.param_groups[1]["beta1"] == 0.9


def test_dictionaries_say_which_variant_goes_on():
    weights, others = (make_weights(SHAPES, torch.float32) for _ in range(2))
    for variant, dictionary in (
        ("transformers", steps_of(weights, 1).state_dict()),
        ("torch", steps_of(others, 1, variant="transformers").state_dict()),
    ):
        optimizer = optim.Adafactor(weights, variant=variant, fused=True)
        optimizer.load_state_dict(dictionary)
        optimizer.step()
        names = optimizer.state[weights[0]].keys()
        assert ("row_var" in names) == (variant == "transformers")


def spoil_a_state(optimizer, weight):
    optimizer.state[weight]["row_var"] = torch.zeros(3, 3, dtype=weight.dtype)


def spoil_an_option(optimizer, weight):
    optimizer.param_groups[1]["eps"] = 1e-3


def spoil_a_gradient(optimizer, weight):
    weight.grad = weight.detach()


def spoil_a_dtype(optimizer, weight):
    weight.grad = None
    weight.data = weight.data.float()
    weight.grad = torch.ones_like(weight)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_a_state, "parameter 0 of group 1.*row_var"),
        (spoil_an_option, "options of group 1"),
        (spoil_a_gradient, "parameter 0 of group 1.*shares memory"),
        (spoil_a_dtype, "parameter 0 of group 1.*row_var"),
    ],
)
def test_no_group_steps_if_one_cannot(spoil, text):
    first, second = make_weights([(4, 6)], torch.float32), make_weights([(5, 7)], torch.float64)
    groups = [{"params": first}, {"params": second}]
    optimizer = optim.Adafactor(groups, fused=True)
    for weight in (*first, *second):
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    spoil(optimizer, second[0])
    weights = (*first, *second)
    before = [weight.clone() for weight in weights]
    states = copy.deepcopy(optimizer.state[first[0]])
    with pytest.raises((RuntimeError, TypeError), match=text):
        optimizer.step()
    assert all(map(torch.equal, weights, before))
    assert all(torch.equal(optimizer.state[first[0]][k], v) for k, v in states.items())


def test_a_variant_that_is_given_is_kept_by_a_dictionary():
    """beta1 is transformers' option, and asks for its variant unless another is given."""
    (weight,) = make_weights([(4, 3)], torch.float32)
    optimizer = optim.Adafactor([weight], variant="torch", beta1=0.5)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert {*optimizer.state[weight]} == {"step", "row_var", "col_var", "exp_avg"}
        assert optimizer.param_groups[0]["variant"] == "torch"


def test_a_beta1_of_a_group_leaves_its_variant_to_the_constructor():
    """A dictionary that says nothing of a variant, but has a beta1, is taken for transformers'."""
    params = [torch.nn.Parameter(torch.randn(6, 5)) for _ in range(2)]
    params[1].data.copy_(params[0])
    groups = [{"params": [params[0]], "beta1": 0.9}], [{"params": [params[1]]}]
    first, other = (optim.Adafactor(each, variant="torch") for each in groups)
    params[0].grad = torch.randn(6, 5)
    first.step()
    params[1].data.copy_(params[0])
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    assert {*other.state[params[1]]} == {"step", "row_var", "col_var", "exp_avg"}
    for p in params:
        p.grad = torch.ones(6, 5)
    first.step()
    other.step()
    assert torch.equal(*params)


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
