"""Law: an optimizer does in a training program all that torch's optimizers do there."""

import math

import pytest
import torch

from support.cases import CASES, KINDS, WITH_NAMESAKE
from support.stepping import (
    as_parameters,
    assert_contents_close,
    assert_counts,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
    run,
    train,
)

SHAPES = ((7,), (33, 31), (3, 4, 5))


def pair(case, **overrides):
    """The same weights under a fused optimizer and under its imperative twin."""
    weights = make_weights(SHAPES, torch.float32)
    params, twins = as_parameters(weights), as_parameters(weights)
    fused = case.build(params, **overrides)
    twin = case.build(twins, **overrides, fused=False)
    return (fused, params), (twin, twins)


def assert_pair_close(fused, twin):
    assert_contents_close(contents(fused), contents(twin), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_descends_rosenbrock(case):
    """From the usual start, (1 - x)^2 + 100 (y - x^2)^2 falls to a small part."""
    sign = -1 if case.options.get("maximize") else 1
    point = torch.nn.Parameter(torch.tensor([-1.5, 2.0]))
    optimizer = case.build([point], lr=case.rosenbrock_lr)

    def loss():
        x, y = point
        return (1 - x) ** 2 + 100 * (y - x * x) ** 2

    start = loss().item()
    for _ in range(300):
        optimizer.zero_grad()
        (sign * loss()).backward()
        optimizer.step()
    assert loss().item() < 0.5 * start


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_parameters_without_gradient_are_left_alone(case):
    (fused, params), _ = pair(case)
    before = params[1].detach().clone()
    params[0].grad, params[2].grad = torch.ones_like(params[0]), torch.ones_like(params[2])
    fused.step()
    assert_same_bits(params[1], before, "weight without gradient")
    assert_counts(case, fused, params, [1, 0, 1])


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_no_gradient_at_all_is_no_step(case):
    (fused, params), _ = pair(case)
    before = [param.detach().clone() for param in params]
    fused.step()
    for param, value in zip(params, before, strict=True):
        assert_same_bits(param, value, "weight")


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_gradient_that_comes_and_goes(case):
    """A weight's step counts the times it had a gradient."""
    pairs = pair(case)
    for step in range(1, 7):
        gradients = make_gradients(SHAPES, torch.float32, step)
        for optimizer, params in pairs:
            for index, param in enumerate(params):
                present = index == 0 or step % (index + 1) == 0
                param.grad = gradients[index].clone() if present else None
            optimizer.step()
    (fused, params), (twin, _) = pairs
    assert_pair_close(fused, twin)
    assert_counts(case, fused, params, [6, 3, 2])


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_learning_rate_that_is_a_tensor(case):
    _, with_float = run(case, SHAPES, torch.float32, steps=3)
    _, with_tensor = run(
        case, SHAPES, torch.float32, steps=3, lr=torch.tensor(case.lr, dtype=torch.float64)
    )
    assert_same_contents(contents(with_tensor), contents(with_float))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups_with_options_of_their_own(case):
    """Each group gets what an optimizer of its own with these options gives."""
    weights = make_weights(SHAPES, torch.float32)
    together = as_parameters(weights)
    per_group = ({}, {"lr": 0.5 * case.lr, "eps": 1e-3}, {"weight_decay": 0.3, "maximize": True})
    per_group = [
        {name: value for name, value in options.items() if case.has(name)} for options in per_group
    ]
    groups = [
        {"params": [param]} | options for param, options in zip(together, per_group, strict=True)
    ]
    optimizer = case.build(groups)
    train(optimizer, together, range(1, 5))
    apart = as_parameters(weights)
    for index, (param, options) in enumerate(zip(apart, per_group, strict=True)):
        single = case.build([param], **options)
        for step in range(1, 5):
            param.grad = make_gradients(SHAPES, torch.float32, step)[index]
            single.step()
        assert_same_bits(together[index], param, f"group {index}")


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_group_added_later(case):
    pairs = pair(case)
    late = make_weights([(50,), (6, 7)], torch.float32, seed=5)
    for optimizer, params in pairs:
        train(optimizer, params, [1, 2])
        added = as_parameters(late)
        optimizer.add_param_group({"params": added, "lr": 0.5 * case.lr})
        train(optimizer, [*params, *added], [3, 4])
        assert_counts(case, optimizer, added, [2, 2])
    assert_pair_close(pairs[0][0], pairs[1][0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_options_changed_between_steps(case):
    pairs = pair(case)
    for optimizer, params in pairs:
        train(optimizer, params, [1, 2])
        optimizer.param_groups[0].update(lr=3 * case.lr, weight_decay=0.1, eps=1e-5)
        train(optimizer, params, [3, 4])
    assert_pair_close(pairs[0][0], pairs[1][0])


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_closure_is_evaluated_with_gradients_on(case):
    (param,) = as_parameters(make_weights([(20,)], torch.float32))
    optimizer = case.build([param])
    losses = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        losses.append(loss)
        return loss

    before = param.detach().clone()
    for number in range(2):  # the first step of some moves no weight
        assert optimizer.step(closure) is losses[number]
    assert not torch.equal(param, before)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_zero_grad_and_accumulation(case, set_to_none):
    """The update that fused LAMB leaves in `.grad` is gone after zero_grad."""
    pairs = pair(case)
    for optimizer, params in pairs:
        for step in range(1, 4):
            optimizer.zero_grad(set_to_none=set_to_none)
            for half in (1, 2):
                loss = sum((param**2).sum() * half * step for param in params)
                loss.backward()
            optimizer.step()
    assert_pair_close(pairs[0][0], pairs[1][0])


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_gradient_scaler_unscales_and_skips(case):
    """torch's GradScaler: finite gradients are unscaled first, a step with inf is left out."""
    pairs = pair(case)
    for optimizer, params in pairs:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(1, 4):
            optimizer.zero_grad()
            loss = sum((param**2).sum() for param in params) * (math.inf if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert_counts(case, optimizer, params, [2, 2, 2])
    assert_pair_close(pairs[0][0], pairs[1][0])


@pytest.mark.parametrize("case", WITH_NAMESAKE, ids=str)
def test_a_small_network_learns_as_with_torch(case):
    def losses(build):
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3)
        )
        inputs, targets = torch.randn(16, 1, 8, 8), torch.randint(0, 3, (16,))
        optimizer = build(list(network.parameters()))
        found = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(inputs), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return torch.tensor(found)

    torch.testing.assert_close(
        losses(case.build), losses(case.build_namesake), rtol=1e-4, atol=1e-5
    )
