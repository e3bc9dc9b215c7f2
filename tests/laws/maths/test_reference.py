"""Law: every optimizer matches its formula, its imperative twin and torch's namesake."""

import dataclasses

import pytest
import torch

from reference.adam import adam
from support.cases import (
    CASES,
    DTYPES,
    LOW_PRECISION,
    MOMENTS,
    MOMENTS_AND_MAX,
    WITH_NAMESAKE,
    Tolerance,
)
from support.stepping import (
    CHUNK,
    ISAS,
    Bounds,
    Reference,
    as_parameters,
    forced_isa,
    make_gradients,
    make_weights,
)

pytestmark = pytest.mark.whole

SHAPES = ((), (1,), (7,), (33, 31), (3, 4, 5), (0,), (CHUNK + 77,))
STEPS = 20
CHECKED = (1, 2, 3, 5, 10, 20)
"""Steps after which bounds are compared: an error once made stays."""
ROUNDED_AFTER_EVERY_OPERATION = Tolerance(weight=1.5, update=8, state=3)


def check_against_reference(case, shapes, dtype, steps, **overrides):
    weights = make_weights(shapes, dtype)
    references = [Reference(case, weight) for weight in weights]
    params = as_parameters(weights)
    optimizer = case.build(params, **overrides)
    for step in range(1, steps + 1):
        gradients = make_gradients(shapes, dtype, step)
        for param, reference, gradient in zip(params, references, gradients, strict=True):
            reference.step(gradient)
            param.grad = gradient
        optimizer.step()
        if step not in CHECKED and step != steps:
            continue
        for shape, param, reference in zip(shapes, params, references, strict=True):
            reference.check(param, optimizer.state[param], f"{shape} after step {step}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_matches_the_reference(case, dtype):
    check_against_reference(case, SHAPES, dtype, STEPS, fused=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_low_precision_is_rounded_to_nearest(case, dtype, isa):
    """Weights and states are the double results rounded to nearest even, save next to a tie.

    LAMB's update is made anew from the stored moments, whose rounding moves more weights over one.
    """
    shape = (CHUNK + 77,)
    (weight,), (gradient,) = make_weights([shape], dtype), make_gradients([shape], dtype, 1)
    reference = Reference(case, weight)
    reference.step(gradient)
    (param,) = as_parameters([weight])
    param.grad = gradient
    with forced_isa(isa):
        optimizer = case.build([param])
        optimizer.step()
    results = {"weight": (param.detach(), reference.weight)}
    for name in case.states:
        results[name] = (optimizer.state[param][name], reference.state[name])
    for name, (actual, expected) in results.items():
        share = (actual.double() != expected).double().mean().item()
        limit = 0.01 if case.elementwise or name != "weight" else 0.05
        assert share < limit, f"{name}: {share:.1%} of the elements are not the nearest"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_imperative_matches_the_reference(case, dtype):
    check_against_reference(case, SHAPES, dtype, STEPS, fused=False)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("decay", [0.0, 0.02])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_every_variant_of_adam(amsgrad, maximize, decoupled, decay, isa):
    """The flags choose kernels of their own; here is each combination."""
    flags = {"amsgrad": amsgrad, "maximize": maximize, "decoupled_weight_decay": decoupled}
    rows = (case for case in CASES if case.reference is adam and case.decoupled == decoupled)
    states = MOMENTS_AND_MAX if amsgrad else MOMENTS
    options = {"lr": 1e-2, "weight_decay": decay} | flags
    with forced_isa(isa):
        case = dataclasses.replace(next(rows), options=options, states=states)
        check_against_reference(case, ((33, 31),), torch.float32, steps=5)


def check_against_twin(case, build_twin, dtype):
    """Against an optimizer that is a sequence of torch operations.

    In low precision that one rounds after every operation, so it starts each step from the same
    weights and states and is given the roundings of one step; a few of these are enough.
    """
    low_precision = dtype in LOW_PRECISION
    tolerance = ROUNDED_AFTER_EVERY_OPERATION if low_precision else case.tolerances[dtype]
    weights = make_weights(SHAPES, dtype)
    params, twins = as_parameters(weights), as_parameters(weights)
    optimizer, twin = case.build(params), build_twin(twins)
    bounds = [Bounds(case, dtype, tolerance) for _ in SHAPES]
    for step in range(1, (6 if low_precision else STEPS) + 1):
        if low_precision and step > 1:
            bounds = [Bounds(case, dtype, tolerance) for _ in SHAPES]
            copy_contents(optimizer, params, twin, twins)
        gradients = make_gradients(SHAPES, dtype, step)
        before = [twin_param.detach().clone() for twin_param in twins]
        for param, twin_param, gradient in zip(params, twins, gradients, strict=True):
            param.grad, twin_param.grad = gradient.clone(), gradient
        optimizer.step()
        twin.step()
        for index, bound in enumerate(bounds):
            bound.note(before[index], twins[index], gradients[index])
            if not (low_precision or step in CHECKED):
                continue
            bound.check(
                params[index],
                optimizer.state[params[index]],
                twins[index],
                twin.state[twins[index]],
                f"{SHAPES[index]} after step {step}",
            )


def copy_contents(source, source_params, target, target_params):
    with torch.no_grad():
        for source_param, target_param in zip(source_params, target_params, strict=True):
            target_param.copy_(source_param)
            for name, value in source.state[source_param].items():
                target.state[target_param][name].copy_(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_matches_imperative(case, dtype):
    check_against_twin(case, lambda params: case.build(params, fused=False), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", WITH_NAMESAKE, ids=str)
def test_fused_matches_torch(case, dtype):
    check_against_twin(case, case.build_namesake, dtype)


def test_reference_law_notices_a_wrong_formula(monkeypatch):
    """The tolerances are narrow enough: beta2 off by 1e-4 of itself does not pass."""
    case = next(case for case in CASES if case.name == "adam")

    def wrong(weight, grad, state, step, **options):
        return adam(weight, grad, state, step, betas=(0.9, 0.999 * (1 - 1e-4)), **options)

    monkeypatch.setitem(case.__dict__, "reference", wrong)
    with pytest.raises(pytest.fail.Exception, match="exp_avg_sq"):
        check_against_reference(case, SHAPES, torch.float32, 2)
