"""GaLoreAdamW and APOLLO with states in codes, and GaLoreAdamW8bit."""

import inspect

import pytest
import torch

from fusedstep import optim
from fusedstep._matrix.projection import RIGHT
from reference.codes import MAPS, rounded, values
from reference.galore import galore
from support.low_rank import (
    OPTIONS,
    assert_same,
    by_reference,
    coded_groups,
    groups,
    run,
    tensors_of,
    weights_of,
)
from support.stepping import assert_same_contents, contents

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
                most = optimizer.state[p][name + "_absmax"].double().flatten()
                most = most.repeat_interleave(MAPS[kind, True][1])[: right.numel()]
                most = most.view(right.shape)
                expected, clear = rounded(right / most, kind, name == "exp_avg", 3)
                assert clear.double().mean() > 0.99
                torch.testing.assert_close(
                    found[clear].double(), (expected * most)[clear], rtol=1e-6, atol=0
                )
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


# ---- GaLoreAdamW8bit -----------------------------------------------------------------------------


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_eps_of_the_8_bit_class_is_added_after_the_correction(fused, corrects):
    """As by bitsandbytes; with float64 weights, whose moments are never in codes."""
    own = [group | {"correct_bias": corrects} for group in groups()]
    optimizer = optim.GaLoreAdamW8bit(own, **OPTIONS, fused=fused)

    def after(group, weight, step):
        beta2 = group.get("betas", OPTIONS["betas"])[1]
        correction = (1 - beta2**step) ** 0.5 if corrects else 1.0
        return {"eps": OPTIONS["eps"] * correction, "correct_bias": corrects}

    options = {name: value for name, value in OPTIONS.items() if name != "eps"}
    expected = by_reference(galore, groups(), range(6), more=after, **options)
    for found, weight in zip(run(optimizer, range(6)), expected, strict=True):
        torch.testing.assert_close(found.detach(), weight, rtol=1e-9, atol=1e-9)


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
