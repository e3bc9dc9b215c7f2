"""LAMB's variants: their options, their published formulas, and clipping by the norm of a step."""

import ast
import copy
import inspect
import math
import re

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep.optim.lamb import VARIANTS
from reference.lamb import lamb
from reference.lamb_variants import PUBLISHED
from support.stepping import (
    CHUNK,
    as_parameters,
    assert_contents_close,
    assert_same_bits,
    assert_same_contents,
    contents,
    forced_isa,
    make_gradients,
    make_weights,
    threads,
    train,
)

OPTIONS = tuple(VARIANTS["paper"])
CLIPPING = ("apex", "nvlamb", "timm")
SHAPES = ((33, 31), (7,), (), (5, 4), (CHUNK + 77,), (6,), (3,), (0,))
SCALES = (1.0, 1e-4, 1.0, 1e3, 1.0, 0.0, 1.0, 1.0)
"""Scales of the weights: bounds of the ratio and of norms are reached, and one weight is zero."""
ZERO_GRADIENT = 6
"""Index of the weight whose gradient is zero."""

MODES = {
    "fused": ({}, {}),
    "unfused": ({"fused": False}, {"fused": False}),
    "mixed groups": ({}, {"fused": False}),
}
ROWS = [
    *((name, {}) for name in VARIANTS),
    *((name, {"weight_decay": 0.0}) for name in VARIANTS),
    *((name, {"weight_decay": 0.05, "eps": 1e-3}) for name in VARIANTS),
    ("timm", {"max_ratio": 1.0}),
    ("timm", {"decoupled_decay": True, "weight_decay": 0.05}),
    ("timm", {"decoupled_decay": True, "max_ratio": 1.0, "max_grad_norm": 30.0}),
    ("timm", {"always_adapt": True, "weight_decay": 0.0}),
    ("deepspeed", {"min_ratio": 0.25, "max_ratio": 0.375}),
    ("apex", {"max_grad_norm": math.inf}),
]


def build(params, mode, **options):
    """In two groups, which are clipped together."""
    halves = (params[:3], params[3:])
    groups = [{"params": half} | more for half, more in zip(halves, MODES[mode], strict=True)]
    return optim.Lamb(groups, **options)


def published(variant):
    """The reference, with the norm of all gradients where it clips."""
    if variant == "paper":
        return lambda *args, grad_norm, **options: lamb(*args, **options)
    if variant not in CLIPPING:
        return lambda *args, grad_norm, **options: PUBLISHED[variant](*args, **options)
    return PUBLISHED[variant]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("variant", "options"), ROWS, ids=str)
def test_follows_its_published_formula(variant, options, mode):
    reference = published(variant)
    expected = [w * s for w, s in zip(make_weights(SHAPES, torch.float64), SCALES, strict=True)]
    params = as_parameters(expected)
    optimizer = build(params, mode, variant=variant, lr=0.01, **options)
    states, moved, clipped = [{} for _ in SHAPES], [0.0] * len(SHAPES), set()
    for step in range(1, 21):
        # Norms from 40 to 0.04.
        gradients = [
            g * 2.0 ** (-3 - step // 2) for g in make_gradients(SHAPES, torch.float64, step)
        ]
        gradients[ZERO_GRADIENT].zero_()
        grad_norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        clipped.add(grad_norm > optimizer.param_groups[0]["max_grad_norm"])
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
        for i, gradient in enumerate(gradients):
            before = expected[i]
            expected[i], states[i] = reference(
                before, gradient, states[i], step, lr=0.01, grad_norm=grad_norm, **options
            )
            if before.numel():
                moved[i] += (expected[i] - before).abs().max().item()
            torch.testing.assert_close(
                params[i], expected[i], rtol=1e-12, atol=1e-13 * moved[i],
                msg=lambda text, i=i, step=step: f"{SHAPES[i]} after step {step}: {text}",
            )  # fmt: skip
    can_clip = math.isfinite(optimizer.param_groups[0]["max_grad_norm"])
    assert clipped == ({True, False} if can_clip else {False}), "gradients of one kind only"


def test_the_law_notices_a_wrong_formula(monkeypatch):
    """apex and nvlamb differ only where nothing decays, and apex clips: each must show."""
    monkeypatch.setitem(PUBLISHED, "nvlamb", PUBLISHED["apex"])
    test_follows_its_published_formula("nvlamb", {}, "fused")
    with pytest.raises(AssertionError):
        test_follows_its_published_formula("nvlamb", {"weight_decay": 0.0}, "fused")
    monkeypatch.setitem(
        PUBLISHED,
        "timm",
        lambda *args, **options: PUBLISHED["apex"](*args, max_grad_norm=1.01, **options),
    )
    with pytest.raises(AssertionError):
        test_follows_its_published_formula("timm", {}, "fused")


# ---- Options -------------------------------------------------------------------------------------


def documented(repository):
    """The table of the page: for each option its value in each variant."""
    page = (repository / "docs" / "optimizers" / "lamb.md").read_text()
    head = re.search(r"^\| option (.*)\|$", page, re.MULTILINE)
    names = [name.strip().strip('`"') for name in head.group(1).strip(" |").split("|")]
    table = {name: {} for name in names}
    for option in OPTIONS:
        cells = re.search(rf"^\| `{option}` \|(.*)\|$", page, re.MULTILINE).group(1).split("|")
        for name, cell in zip(names, cells, strict=True):
            value = cell.strip()
            table[name][option] = math.inf if value == "inf" else ast.literal_eval(value)
    return table


def options_of(optimizer, group=0):
    return {name: optimizer.param_groups[group][name] for name in OPTIONS}


def test_variants_are_what_the_page_says(repository):
    table = documented(repository)
    assert list(table) == list(VARIANTS)
    for name, options in table.items():
        assert options_of(optim.Lamb([torch.zeros(3)], variant=name)) == options, name
    assert options_of(optim.Lamb([torch.zeros(3)])) == table["paper"]


def test_the_docstring_names_every_variant():
    for name in VARIANTS:
        assert f'"{name}"' in inspect.getdoc(optim.Lamb)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_given_is_taken_in_place_of_the_variants(variant):
    given = {
        "eps": 0.5,
        "weight_decay": 0.25,
        "debias": variant == "cybertron",
        "decoupled_decay": True,
        "always_adapt": variant in ("apex", "timm"),
        "max_grad_norm": 7.0,
        "max_weight_norm": 8.0,
        "min_ratio": 0.125,
        "max_ratio": 9.0,
    }
    optimizer = optim.Lamb([torch.zeros(3)], variant=variant, **given)
    assert options_of(optimizer) == given
    assert all(VARIANTS[variant][name] != value for name, value in given.items())
    optimizer = optim.Lamb([{"params": [torch.zeros(3)], "eps": 2.0}], variant=variant)
    assert options_of(optimizer) == VARIANTS[variant] | {"eps": 2.0}
    assert "variant" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"variant": "Apex"}, "variant must be one of paper, apex, .*, cybertron, not 'Apex'"),
        ({"variant": None}, "variant must be one of .*, not None"),
        ({"debias": "moments"}, "debias must be True, False or \"lr\", not 'moments'"),
        ({"max_grad_norm": 0.0}, "Invalid max_grad_norm value: 0.0"),
        ({"max_grad_norm": math.nan}, "Invalid max_grad_norm value: nan"),
        ({"max_weight_norm": -1.0}, "Invalid max_weight_norm value: -1.0"),
        ({"min_ratio": -1.0}, "Invalid min_ratio value: -1.0"),
        ({"min_ratio": math.nan}, "Invalid min_ratio value: nan"),
        ({"max_ratio": math.nan}, "Invalid max_ratio value: nan"),
        ({"min_ratio": 2.0, "max_ratio": 1.0}, "Invalid max_ratio value: 1.0, below min_ratio, 2"),
        ({"variant": "deepspeed", "min_ratio": 11.0}, "Invalid max_ratio value: 10.0, below"),
    ],
    ids=str,
)
def test_options_out_of_range(options, text):
    with pytest.raises(ValueError, match=text):
        optim.Lamb([torch.zeros(3)], **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"variant": "apex"}, "variant is for all groups"),
        ({"max_grad_norm": 2.0}, r"max_grad_norm must be the same in all groups, not \[1.0, 2.0\]"),
    ],
    ids=str,
)
def test_what_groups_cannot_have_of_their_own(options, text):
    group = {"params": [torch.zeros(3)]} | options
    with pytest.raises(ValueError, match=text):
        optim.Lamb([{"params": [torch.zeros(3)]}, group], variant="apex")
    optimizer = optim.Lamb([torch.zeros(3)], variant="apex")
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("mode", MODES)
def test_norms_that_have_come_to_differ_change_nothing(mode):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    optimizer = build(params, mode, variant="nvlamb")
    train(optimizer, params, [1])
    optimizer.param_groups[1]["max_grad_norm"] = 3.0
    before = contents(optimizer)
    with pytest.raises(ValueError, match=r"max_grad_norm must be the same in all groups"):
        train(optimizer, params, [2])
    assert_same_contents(contents(optimizer), before)


def test_dictionaries_without_the_options_are_the_papers():
    params = as_parameters(make_weights(SHAPES, torch.float32))
    plain = optim.Lamb(params, lr=0.01, weight_decay=0.05)
    train(plain, params, [1, 2])
    old = copy.deepcopy(plain.state_dict())
    for option in set(OPTIONS) - {"eps", "weight_decay"}:
        del old["param_groups"][0][option]
    resumed_params = as_parameters(params)
    resumed = optim.Lamb(resumed_params, variant="deepspeed")
    resumed.load_state_dict(old)
    for optimizer, weights in ((plain, params), (resumed, resumed_params)):
        train(optimizer, weights, [3, 4])
    assert_same_contents(contents(resumed), contents(plain))


@pytest.mark.parametrize("variant", VARIANTS)
def test_dictionaries_bring_the_variant_along(variant):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    optimizer = optim.Lamb(params, lr=0.01, variant=variant)
    train(optimizer, params, [1, 2])
    resumed_params = as_parameters(params)
    resumed = optim.Lamb(resumed_params)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, weights in ((optimizer, params), (resumed, resumed_params)):
        train(each, weights, [3, 4])
    assert_same_contents(contents(resumed), contents(optimizer))


# ---- The norm of a step --------------------------------------------------------------------------


def with_gradients(mode, scale=1.0, **options):
    """An optimizer that clips at its second step, in double, so that products can be compared."""
    params = as_parameters(make_weights(SHAPES, torch.float64))
    optimizer = build(params, mode, variant="nvlamb", lr=0.01, max_grad_norm=0.5, **options)
    train(optimizer, params, [1])
    for param, gradient in zip(params, make_gradients(SHAPES, torch.float64, 2), strict=True):
        param.grad = gradient * scale
    return optimizer, params


def assert_same_gradients(params, others):
    for index, (param, other) in enumerate(zip(params, others, strict=True)):
        assert_same_bits(param.grad, other.grad, f"gradient {index}")


@pytest.mark.parametrize("mode", MODES)
def test_gradients_stay_as_they_are(mode):
    optimizer, params = with_gradients(mode, keep_grad=True)
    _, others = with_gradients(mode)
    optimizer.step()
    assert_same_gradients(params, others)


@pytest.mark.parametrize("keep_grad", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_norm", [0.25, 2.0, 1e6])
def test_max_norm_clips_before(max_norm, mode, keep_grad):
    """As clip_grad_norm_ before the step does; `.grad` is what that leaves."""
    optimizer, params = with_gradients(mode, keep_grad=keep_grad)
    twin, twins = with_gradients(mode, keep_grad=keep_grad)
    norm = optimizer.step(max_norm=max_norm)
    expected = torch.nn.utils.clip_grad_norm_(twins, max_norm)
    twin.step()
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    assert_contents_close(contents(optimizer), contents(twin), rtol=1e-12, atol=1e-14)
    for param, other in zip(params, twins, strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("arguments", [{}, {"max_norm": 2.0}, {"zero_grad": True}], ids=str)
@pytest.mark.parametrize("keep_grad", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_norm_is_of_unscaled_gradients(mode, keep_grad, arguments):
    """A power of two as scale: the same bits, those of `.grad` included."""
    optimizer, params = with_gradients(mode, scale=1024.0, keep_grad=keep_grad)
    twin, twins = with_gradients(mode, keep_grad=keep_grad)
    optimizer.grad_scale = torch.tensor(1024.0)
    optimizer.step(**arguments)
    twin.step(**arguments)
    assert_same_contents(contents(optimizer), contents(twin))
    assert_same_gradients(params, twins)


@pytest.mark.parametrize("zero_grad", [True, "none"])
@pytest.mark.parametrize("mode", MODES)
def test_clearing_changes_no_bit_of_a_clipped_step(mode, zero_grad):
    optimizer, params = with_gradients(mode)
    twin, _ = with_gradients(mode)
    assert optimizer.step(zero_grad=zero_grad) is None
    twin.step()
    assert_same_contents(contents(optimizer), contents(twin))
    for param in params:
        assert param.grad is None if zero_grad == "none" else not param.grad.any()


def test_clipped_steps_have_the_same_bits_for_any_isa_and_thread_count():
    expected = None
    for isa in fusedstep.isas():
        for count in (1, 3):
            params = as_parameters(make_weights(SHAPES, torch.float32))
            optimizer = optim.Lamb(params, variant="apex")
            with forced_isa(isa), threads(count):
                train(optimizer, params, [1, 2, 3])
            expected = expected or contents(optimizer)
            assert_same_contents(contents(optimizer), expected, f"{isa}, {count} threads:")


@pytest.mark.parametrize("mode", MODES)
def test_norms_that_are_not_finite(mode):
    """An infinite norm makes finite gradients zero; one that is NaN clips nothing, as in apex."""
    for bad, remaining in ((math.inf, 0.0), (math.nan, 1.0)):
        optimizer, params = with_gradients(mode)
        twin, twins = with_gradients(mode)
        params[0].grad[3, 3] = bad
        for group in twin.param_groups:
            group["max_grad_norm"] = math.inf
        for other in twins:
            other.grad *= remaining
        optimizer.step()
        twin.step()
        assert not params[0].isfinite().any()
        for param, other in zip(params[1:], twins[1:], strict=True):
            assert_same_bits(param, other, "weight")
