"""GaLoreAdamW: its formula, bad input, and what the published one gets wrong."""

import inspect
import re

import pytest
import torch

from fusedstep import optim
from fusedstep.optim import _low_rank
from fusedstep.optim._projection import LEFT, RIGHT
from fusedstep.optim._scratch import Scratch
from low_rank import (
    OPTIONS,
    SHAPES,
    allocated,
    as_params,
    assert_same,
    by_reference,
    coded_groups,
    gradient,
    groups,
    projected,
    run,
    set_gradients,
    tensors_of,
    weights_of,
)
from reference.codes import nearest, values
from reference.galore import galore
from reference.galore_adafactor import galore_adafactor
from stepping import assert_same_contents, contents

# ---- The formula ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right", "full"])
def test_is_the_published_formula(proj_type, fused):
    """With betas, eps and decay of every group, of which the published trainers drop some."""
    for options in ({}, {"correct_bias": False, "maximize": True}):
        optimizer = optim.GaLoreAdamW(
            groups(proj_type=proj_type), **OPTIONS, **options, fused=fused
        )
        expected = by_reference(galore, groups(proj_type=proj_type), range(7), **OPTIONS, **options)
        for found, weight in zip(run(optimizer, range(7)), expected, strict=True):
            torch.testing.assert_close(found.detach(), weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_float32_is_near_the_formula(fused):
    optimizer = optim.GaLoreAdamW(groups(torch.float32), **OPTIONS, fused=fused)
    expected = by_reference(galore, groups(torch.float32), range(5), **OPTIONS)
    for found, weight in zip(run(optimizer, range(5)), expected, strict=True):
        torch.testing.assert_close(found.detach(), weight.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_weight_counts_its_own_steps(dtype, fused):
    """Gradients that are missing at some steps: the numbers of a step follow from the count."""

    def skips(step, place):
        return (step + place) % 3 == 1

    optimizer = optim.GaLoreAdamW(groups(dtype), **OPTIONS, fused=fused)
    expected = by_reference(galore, groups(dtype), range(8), skips, **OPTIONS)
    bound = 1e-9 if dtype is torch.float64 else 0.04
    for found, weight in zip(run(optimizer, range(8), skips), expected, strict=True):
        torch.testing.assert_close(found.detach().double(), weight, rtol=bound, atol=bound)


def test_a_decay_that_leaves_nothing():
    (group,) = as_params([({}, [(3, 4)])], torch.float64)
    optimizer = optim.GaLoreAdamW([group], lr=0.5, weight_decay=2.0)
    assert run(optimizer, range(2))[0].abs().max() < 1e-14


def test_a_learning_rate_that_changes_is_followed():
    """A step of plain groups is not repeated with the numbers of the last one."""
    runs = []
    for fused in (True, False):
        optimizer = optim.GaLoreAdamW(groups(rank=None), **OPTIONS, fused=fused)
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            set_gradients(optimizer, step)
            optimizer.step()
        runs.append(weights_of(optimizer))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fused", [True, False])
def test_clipping(fused):
    norm = 0.3
    optimizer = optim.GaLoreAdamW(groups(), **OPTIONS, fused=fused)
    clipped = optim.GaLoreAdamW(groups(), **OPTIONS, fused=fused)
    for step in range(4):
        set_gradients(optimizer, step)
        set_gradients(clipped, step)
        torch.nn.utils.clip_grad_norm_(weights_of(clipped), norm)
        assert optimizer.step(max_norm=norm) > norm
        clipped.step()
        for p, q in zip(weights_of(optimizer), weights_of(clipped), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


def test_steps_under_a_dispatch_mode_are_the_same():
    class Sees(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    optimizer, other = (optim.GaLoreAdamW(groups(), **OPTIONS, fused=True) for _ in range(2))
    run(optimizer, range(2))
    with Sees():
        run(other, range(2))
    assert_same(weights_of(optimizer), weights_of(other))


# ---- 16 bits -------------------------------------------------------------------------------------

WAYS = [
    {},
    {"master_weights": True},
    {"master_weights": "split"},
    {"rounding": "kahan"},
    {"rounding": "stochastic"},
]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_bfloat16_weights_have_float32_states(way, fused):
    optimizer = optim.GaLoreAdamW(groups(torch.bfloat16), **OPTIONS, fused=fused, **way)
    expected = by_reference(galore, groups(torch.bfloat16), range(4), **OPTIONS)
    for found, weight in zip(run(optimizer, range(4)), expected, strict=True):
        torch.testing.assert_close(found.detach().double(), weight, rtol=0.02, atol=0.02)
    for p in optimizer.param_groups[1]["params"]:
        state = optimizer.state[p]
        assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq", "step")} == {torch.float32}
        assert all(state[name].dtype is torch.float32 for name in (LEFT, RIGHT) if name in state)


@pytest.mark.parametrize("way", WAYS[:4], ids=str)
def test_two_groups_with_a_rank_step_as_one(way):
    found = []
    for parts in ([[(8, 6), (8, 6)]], [[(8, 6)], [(8, 6)]]):
        several = as_params([(projected(), shapes) for shapes in parts], torch.bfloat16)
        found.append(run(optim.GaLoreAdamW(several, **OPTIONS, **way), range(3)))
    assert_same(*found)


@pytest.mark.parametrize("way", [{"master_weights": True}, {"master_weights": "split"}], ids=str)
def test_moves_too_small_for_bfloat16_add_up(way):
    (group,) = as_params([(projected(), [(16, 8)])], torch.bfloat16)
    optimizer = optim.GaLoreAdamW([group], lr=1e-4, **way)
    (weight,) = group["params"]
    start, value = weight.detach().clone(), weight.detach().double()
    optimizer.zero_grad()
    weight.grad = gradient(weight, 1, 1)
    for _ in range(100):
        optimizer.step()
    reference, state = value, {}
    for step in range(1, 101):
        reference, state = galore(
            reference, weight.grad.double(), state, step, lr=1e-4, **projected()
        )
    assert not torch.equal(weight, start)
    torch.testing.assert_close(weight.double(), reference, rtol=2**-8, atol=1e-4)


# ---- States in codes -----------------------------------------------------------------------------


def decoded(optimizer, weight, name, kind):
    """A moment as float32 numbers, by the reference, and whether it is in codes."""
    state = optimizer.state[weight]
    if name + "_absmax" not in state:
        return state[name], False
    rows, columns = weight.shape
    shape = (rows, 48) if rows >= columns else (48, columns)
    signed = name == "exp_avg"
    return values(state[name], state[name + "_absmax"], kind, signed, shape).float(), True


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("cls", [optim.GaLoreAdamW, optim.APOLLOAdamW])
def test_a_step_of_codes_is_that_of_their_numbers(cls, kind, dtype, fused):
    """From the numbers that the codes stand for, and new moments are rounded to codes."""
    optimizer = cls(coded_groups(dtype), lr=0.01, state_dtype=kind, fused=fused)
    run(optimizer, range(2))
    twin = cls(coded_groups(dtype), lr=0.01, state_dtype=torch.float32, fused=fused)
    run(twin, range(2))
    weights, twins, coded = weights_of(optimizer), weights_of(twin), []
    with torch.no_grad():
        for p, q in zip(weights, twins, strict=True):
            q.copy_(p)
            for name, value in twin.state[q].items():
                if name in ("exp_avg", "exp_avg_sq"):
                    numbers, is_coded = decoded(optimizer, p, name, kind)
                    value.copy_(numbers)
                    coded.append(is_coded)
                else:
                    value.copy_(optimizer.state[p][name])
    assert coded == [True] * 4 + [False] * 2
    run(optimizer, range(2, 3))
    run(twin, range(2, 3))
    for p, q in zip(weights, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        for name in ("exp_avg", "exp_avg_sq"):
            found, is_coded = decoded(optimizer, p, name, kind)
            right = twin.state[q][name]
            if is_coded:
                error = (found - right).abs() - nearest(right, kind, name == "exp_avg")[0]
                assert error.max() <= 2e-6 * right.abs().max()
            else:
                assert torch.equal(found, right)


@pytest.mark.parametrize("fused", [True, False])
def test_states_are_converted_as_the_option_says(fused):
    optimizer = optim.GaLoreAdamW(coded_groups(), lr=0.01, fused=fused)
    run(optimizer, range(2))
    weight = weights_of(optimizer)[0]
    numbers = {name: optimizer.state[weight][name].clone() for name in ("exp_avg", "exp_avg_sq")}
    for kind in ("int8", "int4", torch.float32):
        for group in optimizer.param_groups:
            group["state_dtype"] = kind
        optimizer.load_state_dict(optimizer.state_dict())
        state = optimizer.state[weight]
        assert (state["exp_avg"].dtype is torch.float32) == (kind is torch.float32)
        assert ("exp_avg_absmax" in state) == (kind is not torch.float32)
        assert state[RIGHT].dtype is torch.float32
    for name, right in numbers.items():
        error = (optimizer.state[weight][name] - right).abs().max()
        assert 0 < error <= 0.2 * right.abs().max()
    run(optimizer, range(2, 3))


@pytest.mark.parametrize("fused", [True, False])
def test_codes_that_do_not_fit_are_refused(fused):
    optimizer = optim.GaLoreAdamW(coded_groups(), state_dtype="int8", fused=fused)
    run(optimizer, range(1))
    optimizer.param_groups[0]["rank"] = 47
    before = tensors_of(optimizer)
    with pytest.raises(RuntimeError, match=r"exp_avg of parameter 0 of group 0 is .* new optim"):
        run(optimizer, range(1))
    assert_same(tensors_of(optimizer), before)
    dictionary = optimizer.state_dict()
    dictionary["param_groups"][0]["rank"] = 48
    dictionary["state"][0]["exp_avg_absmax"] = torch.zeros(3)
    with pytest.raises(ValueError, match="absmax of exp_avg of parameter 0 of group 0 has 3 numb"):
        optimizer.load_state_dict(dictionary)


# ---- GaLoreAdamW8bit -----------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_eps_of_the_8_bit_class_is_added_after_the_correction(fused):
    """As by bitsandbytes; with float64 weights, whose moments are never in codes."""
    optimizer = optim.GaLoreAdamW8bit(groups(), **OPTIONS, fused=fused)

    def after(group, weight, step):
        beta2 = group.get("betas", OPTIONS["betas"])[1]
        return {"eps": OPTIONS["eps"] * (1 - beta2**step) ** 0.5}

    options = {name: value for name, value in OPTIONS.items() if name != "eps"}
    expected = by_reference(galore, groups(), range(6), more=after, **options)
    for found, weight in zip(run(optimizer, range(6)), expected, strict=True):
        torch.testing.assert_close(found.detach(), weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("before", "after"), [(None, "int8"), ("int8", "int4"), ("fp8", None)])
def test_groups_that_ask_for_other_states_in_mid_run(before, after, fused):
    """The next step converts moments, as loading a dictionary with this option does."""
    found = []
    for is_loaded in (True, False):
        optimizer = optim.GaLoreAdamW(coded_groups(state_dtype=before), **OPTIONS, fused=fused)
        run(optimizer, range(2))
        changed = optimizer.state_dict() if is_loaded else optimizer
        for group in changed["param_groups"] if is_loaded else changed.param_groups:
            group["state_dtype"] = after
        if is_loaded:
            optimizer.load_state_dict(changed)
        run(optimizer, range(2, 4))
        found.append(contents(optimizer))
    assert_same_contents(*found)
    kind = optimizer.state[weights_of(optimizer)[0]]["exp_avg"].dtype
    assert kind is (torch.float32 if after is None else torch.uint8)


def test_positional_arguments_of_the_8_bit_class():
    """The published class passes its own on by position, and newer bitsandbytes reads others.

    percentile_clipping=100 and block_wise=True then are max_unorm and skip_zeros, by which weights
    that begin as zeros never move.
    """
    names = list(inspect.signature(optim.GaLoreAdamW8bit).parameters)
    published = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False,
        "optim_bits": 32, "args": None, "min_8bit_size": 4096, "percentile_clipping": 100,
        "block_wise": True, "is_paged": False,
    }  # fmt: skip
    assert names[:12] == ["params", *published]
    defaults = inspect.signature(optim.GaLoreAdamW8bit).parameters
    assert {name: defaults[name].default for name in published} == published
    given = (0.1, (0.5, 0.6), 0.2, 0.3, False, 32, None, 4096, 100, True, False)
    zeros = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((160, 96), (9,))]
    split = [{"params": zeros[:1], "rank": 48}, {"params": zeros[1:]}]
    optimizer = optim.GaLoreAdamW8bit(split, *given)
    for group in optimizer.param_groups:
        assert [group[name] for name in names[1:5]] == list(given[:4])
        assert group["state_dtype"] == "int8"
    for p in zeros:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[zeros[0]]["exp_avg"].dtype is torch.uint8
    assert all(p.count_nonzero() == p.numel() for p in zeros)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("amsgrad", True),
        ("args", object()),
        ("min_8bit_size", 1024),
        ("percentile_clipping", 5),
        ("block_wise", False),
        ("is_paged", True),
    ],
)
def test_options_of_bitsandbytes_without_counterpart_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        optim.GaLoreAdamW8bit([torch.zeros(3)], **{name: value})


# ---- GaLoreAdafactor -----------------------------------------------------------------------------

ADAFACTOR = {"lr": 0.03, "weight_decay": 0.1, "clip_threshold": 0.7, "decay_rate": -0.6}
ADAFACTOR_PLAIN = ({"weight_decay": 0.3, "lr": 0.05}, [(9,), (), (3, 4)])


def adafactor_groups(dtype=torch.float64, **options):
    return as_params([ADAFACTOR_PLAIN, (projected(**options), SHAPES)], dtype)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta1": 0.8, "maximize": True},
        {"scale_parameter": False, "relative_step": False},
        {"warmup_init": True, "eps": (1e-6, 0.5)},
    ],
    ids=str,
)
@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right", "full"])
def test_adafactor_is_the_published_formula(proj_type, options, fused):
    options = ADAFACTOR | {"eps": (1e-30, 0.02)} | options
    optimizer = optim.GaLoreAdafactor(adafactor_groups(proj_type=proj_type), **options, fused=fused)
    groups = adafactor_groups(proj_type=proj_type)
    expected = by_reference(galore_adafactor, groups, range(7), **options)
    for found, weight in zip(run(optimizer, range(7)), expected, strict=True):
        torch.testing.assert_close(found.detach(), weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fused", [None, False])
def test_adafactor_of_a_convolution_of_one_element(fused):
    """Strides of dimensions of one element are any: a matrix of the same memory has others."""
    shapes = [(8, 6, 1, 1)]
    params = [as_params([({"rank": 2}, shapes)], torch.float64)[0] for _ in range(2)]
    (other,) = params[1]["params"]
    other.data = other.data.to(memory_format=torch.channels_last)
    assert other.stride() != params[0]["params"][0].stride()
    found = [run(optim.GaLoreAdafactor([group], fused=fused), range(3)) for group in params]
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def test_adafactor_of_bfloat16():
    optimizer = optim.GaLoreAdafactor(adafactor_groups(torch.bfloat16), **ADAFACTOR)
    groups = adafactor_groups(torch.bfloat16)
    expected = by_reference(galore_adafactor, groups, range(4), **ADAFACTOR)
    for found, weight in zip(run(optimizer, range(4)), expected, strict=True):
        torch.testing.assert_close(found.detach().double(), weight, rtol=0.02, atol=0.02)
    for p in optimizer.param_groups[1]["params"]:
        assert {value.dtype for value in optimizer.state[p].values()} == {torch.float32}


def test_arguments_of_adafactor_are_the_published_ones():
    parameters = inspect.signature(optim.GaLoreAdafactor).parameters
    published = {
        "lr": None, "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": None,
        "weight_decay": 0.0, "scale_parameter": True, "relative_step": True, "warmup_init": False,
    }  # fmt: skip
    assert list(parameters)[:10] == ["params", *published]
    assert {name: parameters[name].default for name in published} == published


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_adafactor_names_a_gradient_that_is_not_finite(bad):
    optimizer = optim.GaLoreAdafactor(adafactor_groups(), **ADAFACTOR)
    run(optimizer, range(2))
    set_gradients(optimizer, 5)
    before = tensors_of(optimizer)
    optimizer.param_groups[1]["params"][2].grad[1, 1] = bad
    with pytest.raises(RuntimeError, match="gradient of parameter 2 of group 1 has elements that"):
        optimizer.step()
    assert_same(tensors_of(optimizer), before)


def test_adafactor_checks_its_options():
    for options, shapes, text in (
        ({"rank": 8}, [(12, 7)], "rank=8 is over that"),
        ({}, [(9,)], "has 1 dimensions"),
        ({"proj_type": "up"}, [(12, 7)], "proj_type must be one of"),
    ):
        with pytest.raises(ValueError, match=text):
            optim.GaLoreAdafactor(as_params([(projected(**options), shapes)], torch.float32))
    with pytest.raises(ValueError, match="warmup_init=True requires relative_step=True"):
        optim.GaLoreAdafactor([torch.zeros(3)], warmup_init=True, relative_step=False)


# ---- Bad input -----------------------------------------------------------------------------------

BAD = [
    ({"rank": 8}, [(12, 7)], ValueError, r"parameter 0 of group 1 is a matrix \[12, 7\].*rank=8"),
    ({"rank": 7}, [(12, 8), (3, 2, 3)], ValueError, r"parameter 1 of group 1 is a matrix \[3, 6\]"),
    ({}, [(12, 7), (9,)], ValueError, "parameter 1 of group 1 has 1 dimensions"),
    ({}, [()], ValueError, "parameter 0 of group 1 has 0 dimensions"),
    ({}, [(0, 4)], ValueError, "parameter 0 of group 1 is a matrix"),
    ({"rank": 0}, [(12, 7)], ValueError, "Invalid rank value: 0"),
    ({"rank": 2.5}, [(12, 7)], TypeError, "rank must be an int, not 2.5"),
    ({"rank": True}, [(12, 7)], TypeError, "rank must be an int, not True"),
    ({"update_proj_gap": 0}, [(12, 7)], ValueError, "Invalid update_proj_gap value: 0"),
    ({"scale": -1.0}, [(12, 7)], ValueError, "Invalid scale value: -1.0"),
    ({"proj_type": "up"}, [(12, 7)], ValueError, "proj_type must be one of 'std', .* not 'up'"),
    ({"svd": "fast"}, [(12, 7)], ValueError, "svd must be one of 'exact', .* not 'fast'"),
]


@pytest.mark.parametrize(("options", "shapes", "error", "text"), BAD)
def test_bad_options_are_named_and_add_no_group(options, shapes, error, text):
    plain, bad = groups(shapes=shapes, **options)
    with pytest.raises(error, match=text):
        optim.GaLoreAdamW([plain, bad])
    optimizer = optim.GaLoreAdamW([plain])
    with pytest.raises(error, match=text):
        optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("option", ["rank", "update_proj_gap", "scale", "proj_type", "svd"])
def test_options_of_a_constructor_are_checked(option):
    with pytest.raises((TypeError, ValueError), match=option):
        optim.GaLoreAdamW([torch.zeros(4, 4)], **{option: "half"})


def test_named_parameters_are_named():
    named = [("head", torch.zeros(3, requires_grad=True))]
    with pytest.raises(ValueError, match="parameter 'head' has 1 dimensions"):
        optim.GaLoreAdamW(named, rank=2)


def test_complex_weights_are_refused():
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 is torch\.complex64"):
        optim.GaLoreAdamW([torch.zeros(4, 4, dtype=torch.complex64)], rank=2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("steps", [0, 1], ids=["refresh", "between"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_that_is_not_finite_is_named_before_anything_moves(fused, steps, bad):
    optimizer = optim.GaLoreAdamW(groups(), **OPTIONS, fused=fused)
    run(optimizer, range(steps))
    set_gradients(optimizer, 5)
    before = tensors_of(optimizer)
    optimizer.param_groups[1]["params"][2].grad[1, 1] = bad
    with pytest.raises(RuntimeError, match="gradient of parameter 2 of group 1 has elements that"):
        optimizer.step()
    after = tensors_of(optimizer)
    assert_same(after[: len(before)], before)
    assert not any(state.any() for state in after[len(before) :])  # made, and still 0
    run(optimizer, range(steps, 4))
    fresh = optim.GaLoreAdamW(groups(), **OPTIONS, fused=fused)
    assert_same(weights_of(optimizer), run(fresh, range(4)))


@pytest.mark.parametrize("cls", [optim.GaLoreAdamW, optim.APOLLOAdamW])
@pytest.mark.parametrize("norm", [0.01, None])
def test_products_taken_early_are_those_of_the_step(norm, cls):
    """Compares steps after one that has stopped half way, or with another factor of gradients."""
    found = []
    for fused in (None, False):
        optimizer = cls(groups()[::-1], **OPTIONS, fused=fused)
        *matrices, other, _, _ = weights_of(optimizer)
        run(optimizer, range(2))
        memory = [p.grad for p in matrices]
        if fused is None:
            stopped = [gradient(p, 7, 0) for p in matrices]
            torch._foreach_copy_(memory, stopped)
            other.grad = other.grad.to_sparse()
            with pytest.raises(RuntimeError, match="sparse"):
                optimizer.step()
            assert optimizer._early
        set_gradients(optimizer, 2)
        if norm is not None:  # else they are elsewhere, and no product is taken early
            torch._foreach_copy_(memory, [p.grad for p in matrices])
            for p, grad in zip(matrices, memory, strict=True):
                p.grad = grad
        optimizer.step(max_norm=norm)
        found.append(weights_of(optimizer))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cls", [optim.GaLoreAdamW, optim.APOLLOAdamW])
def test_a_gpu_steps_as_a_cpu_and_finds_what_is_not_finite(cls):
    found, optimizers = [], []
    for device in ("cpu", "cuda"):
        mine = groups(
            update_proj_gap=9
        )  # later bases have signs that the library of a device chooses
        for group in mine:
            group["params"] = [torch.nn.Parameter(p.detach().to(device)) for p in group["params"]]
        optimizer = cls(mine, **OPTIONS, fused=True)
        for step in range(5):  # the later ones have products that are taken early
            for place, p in enumerate(weights_of(optimizer)):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad.copy_(gradient(p.cpu(), step, place))
            optimizer.step()
        found.append([p.detach().cpu() for p in weights_of(optimizer)])
        optimizers.append(optimizer)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    before = tensors_of(optimizers[1])
    optimizers[1].param_groups[1]["params"][2].grad[1, 1] = torch.nan
    with pytest.raises(RuntimeError, match="gradient of parameter 2 of group 1 has elements that"):
        optimizers[1].step()
    assert_same(tensors_of(optimizers[1]), before)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda group, state: group.update(rank=2), "exp_avg of parameter 0 of group 1 is"),
        (lambda group, state: group.update(rank=9), "rank=9 is over that"),
        (lambda group, state: group.update(proj_type="up"), "proj_type must be one of"),
        (lambda group, state: group.update(lr=[1]), "Invalid options of a group"),
        (lambda group, state: state.update(exp_avg=state["exp_avg"].float()), "exp_avg is torch."),
        (lambda group, state: state["exp_avg"].t_(), "exp_avg of parameter 0 of group 1 is"),
        (lambda group, state: state["step"].fill_(-1), "step count must be at least 0"),
    ],
)
def test_changes_between_steps_are_noticed(change, text):
    """With gradients where they were, so that nothing else is looked at again."""
    optimizer = optim.GaLoreAdamW(groups(), **OPTIONS)
    run(optimizer, range(2))
    group = optimizer.param_groups[1]
    change(group, optimizer.state[group["params"][0]])
    before = tensors_of(optimizer)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
        optimizer.step()
    assert_same(tensors_of(optimizer), before)


def test_large_gradients_are_finite():
    """Their sum is not."""
    (group,) = as_params([(projected(), [(16, 8)])], torch.float32)
    optimizer = optim.GaLoreAdamW([group], fused=True)
    (weight,) = group["params"]
    weight.grad = torch.full_like(weight, 3e37)
    weight.grad[0] = 1e37
    optimizer._check_finite(group, weight, weight.grad)


def test_finite_elements_whose_sum_is_not_are_stepped(monkeypatch):
    expected = run(optim.GaLoreAdamW(groups(), **OPTIONS), range(3))
    monkeypatch.setattr(Scratch, "is_finite", lambda self: False)
    assert_same(run(optim.GaLoreAdamW(groups(), **OPTIONS), range(3)), expected)


def test_a_low_rank_gradient_that_overflows_is_named():
    (group,) = as_params([(projected(), [(200, 100)])], torch.float16)
    optimizer = optim.GaLoreAdamW([group], fused=True)
    (weight,) = group["params"]
    weight.grad = torch.full_like(weight, 3e4)
    with pytest.raises(RuntimeError, match="low-rank gradient of parameter 0 of group 0 overflows"):
        optimizer.step()


@pytest.mark.parametrize("fused", [True, None])
def test_float16_on_a_cpu_takes_the_formula_unless_asked(fused):
    """Products of float16 take ten times as long there."""
    (group,) = as_params([(projected(), [(12, 7)])], torch.float16)
    optimizer = optim.GaLoreAdamW([group], **OPTIONS, fused=fused)
    (expected,) = by_reference(
        galore, as_params([(projected(), [(12, 7)])], torch.float16), range(3), **OPTIONS
    )
    (found,) = run(optimizer, range(3))
    torch.testing.assert_close(found.detach().double(), expected, rtol=5e-3, atol=5e-3)
    assert bool(optimizer._scratch) == (fused is True)


def test_sparse_gradients_are_refused():
    optimizer = optim.GaLoreAdamW(groups())
    weight = optimizer.param_groups[1]["params"][0]
    weight.grad = torch.zeros_like(weight).to_sparse()
    with pytest.raises(RuntimeError, match="GaLoreAdamW does not support sparse gradients"):
        optimizer.step()


# ---- What the published one gets wrong -----------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", [(6, 15), (15, 6), (8, 8)])
def test_reverse_std_takes_a_rank_of_the_smaller_side(shape, fused):
    """galore_torch chooses the side to go back by from the low-rank shape, which is square then."""
    options = projected(rank=min(shape), proj_type="reverse_std")
    groups = [as_params([(options, [shape])], torch.float64) for _ in range(2)]
    optimizer = optim.GaLoreAdamW(groups[0], **OPTIONS, fused=fused)
    (expected,) = by_reference(galore, groups[1], range(3), **OPTIONS)
    (found,) = run(optimizer, range(3))
    torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-9)


def test_reverse_std_refuses_a_rank_over_the_smaller_side():
    """galore_torch takes (64, 256) with rank 128, and fails in its first step."""
    with pytest.raises(ValueError, match=r"matrix \[64, 256\], whose rank is at most 64: rank=128"):
        optim.GaLoreAdamW([torch.zeros(64, 256)], rank=128, proj_type="reverse_std")


def test_positional_arguments_are_the_published_ones():
    names = list(inspect.signature(optim.GaLoreAdamW).parameters)
    assert names[:6] == ["params", "lr", "betas", "eps", "weight_decay", "correct_bias"]
    defaults = optim.GaLoreAdamW([torch.zeros(3)]).defaults
    assert {name: defaults[name] for name in names[1:6]} == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.0,
        "correct_bias": True,
    }
    optimizer = optim.GaLoreAdamW([torch.zeros(3)], 0.1, (0.5, 0.6), 0.2, 0.3, False)
    assert [optimizer.param_groups[0][name] for name in names[1:6]] == [
        0.1, (0.5, 0.6), 0.2, 0.3, False,
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_bases_stay_on_the_device_of_the_weight():
    """galore_torch's `.to(device.type)` loses the index of the device."""
    weight = torch.nn.Parameter(torch.randn(12, 8, device="cuda:1", dtype=torch.bfloat16))
    optimizer = optim.GaLoreAdamW([weight], rank=3)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert optimizer.state[weight][RIGHT].device == weight.device


# ---- Memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_between_refreshes_allocates_nothing_of_weight_size(dtype, proj_type):
    shapes, options = [(256, 128), (128, 256)], {"rank": 4, "svd": "randomized"}
    found = {}
    for fused in (True, False):
        (group,) = as_params([(projected(proj_type=proj_type, **options), shapes)], dtype)
        optimizer = optim.GaLoreAdamW([group], **OPTIONS, fused=fused)
        run(optimizer, range(1))
        found[fused] = allocated(optimizer)
    assert found[True] <= 256 * 128 * dtype.itemsize // 8
    assert found[False] >= 256 * 128 * 4  # the control: the formula allocates updates


def test_a_weight_has_one_scratch_memory():
    """Whatever weights it has been stepped together with."""
    optimizer = optim.GaLoreAdamW(groups(), fused=True)
    run(optimizer, range(8), lambda step, place: (step + place) % 3 == 1)
    weights = [p for scratch in optimizer._scratch.values() for p in scratch.weights]
    assert 0 < len(weights) == len(set(weights))


# ---- Its pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GaLoreAdamW", "GaLoreAdafactor", "APOLLOAdamW"])
def test_is_documented(name, repository):
    text = inspect.getdoc(getattr(optim, name))
    assert text.startswith(f"Implements the {name} algorithm")
    assert re.search(r"::\n\n(    .*\n)*    w = .*\blr\b", text)
    assert "https://arxiv.org" in text
    for option in inspect.signature(getattr(optim, name)).parameters:
        assert re.search(rf"\b{option}\b", text), option
    for page in ("CHANGELOG.md", "README.md", "docs/choosing.md"):
        assert name in (repository / page).read_text(), page
    page = name.removesuffix("AdamW").removesuffix("Adafactor").lower()
    page = (repository / f"docs/optimizers/{page}.md").read_text()
    for option in inspect.signature(getattr(optim, name)).parameters:
        assert f"`{option}`" in page, option


def test_the_shared_part_knows_no_class_by_name():
    assert "galore" not in inspect.getsource(_low_rank.LowRankSteps).lower()
