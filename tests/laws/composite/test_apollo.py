"""APOLLOAdamW: its formula, its random projections, and its rank-1 form."""

import inspect
import io

import pytest
import torch

from fusedstep import convert, optim
from fusedstep._step.binding import bind_groups
from reference.apollo import apollo
from reference.galore import galore
from reference.low_rank_bases import side_of
from support.low_rank import (
    allocated,
    as_params,
    by_reference,
    gradient,
    run,
    set_gradients,
    weights_of,
)

OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}
SHAPES = [(12, 7), (6, 15), (8, 8)]
PLAIN = ({"betas": (0.7, 0.9), "weight_decay": 0.3, "lr": 0.05}, [(9,), (3, 4)])
GAP = 3


def groups(dtype=torch.float64, **options):
    projected = {"rank": 3, "update_proj_gap": GAP, "scale": 2.0} | options
    return as_params([PLAIN, (projected, SHAPES)], dtype)


def basis_of(optimizer, weight, count):
    """The random basis of a weight at a step: that of its seed, its first place, and the gap."""
    for group in optimizer.param_groups:
        if group["rank"] is not None and any(p is weight for p in group["params"]):
            state, new_bases = optimizer._state[weight], optimizer._projection.new_bases
            found = new_bases(group, weight, state, weight, count - 1, False, False)
            (basis,) = found.values()
            return basis.double()
    return None


def expected_of(optimizer, steps, skips=None, **options):
    """The weights by the reference, which is told the random bases of an optimizer."""
    own = ("rank", "proj", "update_proj_gap")
    taken = inspect.signature(apollo).parameters.keys() | {"params"}
    plain = [
        {name: value for name, value in group.items() if name in taken and name not in own}
        for group in optimizer.param_groups
    ]

    def more(group, p, count):
        return {"basis": basis_of(optimizer, p, count)}

    return by_reference(apollo, plain, steps, skips, more)


def compared(optimizer, steps, skips=None):
    for group in optimizer.param_groups:
        for p in group["params"]:  # states, whose dtype bases have
            p.grad = torch.zeros_like(p)
    bind_groups(optimizer)
    expected = expected_of(optimizer, steps, skips)
    for found, weight in zip(run(optimizer, steps, skips), expected, strict=True):
        torch.testing.assert_close(found.detach(), weight, rtol=1e-9, atol=1e-9)


VARIANTS = [
    {},
    {"scale_type": "tensor"},
    {"scale_front": True},
    {"disable_nl": True},
    {"correct_bias": False},
    {"maximize": True},
    {"weight_decay": 0.0},
    {"rank": 1, "scale_type": "tensor", "scale": 128.0},
]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_is_the_published_formula(options, fused):
    given = {name: options[name] for name in options.keys() & {"rank", "scale_type", "scale"}}
    others = {name: options[name] for name in options.keys() - given.keys()}
    compared(optim.APOLLOAdamW(groups(**given), **OPTIONS | others, fused=fused), range(7))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("proj_type", ["reverse_std", "left", "right"])
def test_sides(proj_type, fused):
    optimizer = optim.APOLLOAdamW(groups(proj_type=proj_type), **OPTIONS, fused=fused)
    compared(optimizer, range(4))
    for p in optimizer.param_groups[1]["params"]:
        side = side_of(proj_type, *p.shape)
        shape = (p.shape[0], 3) if side == "right" else (3, p.shape[1])
        assert optimizer.state[p]["exp_avg"].shape == shape


@pytest.mark.parametrize("fused", [True, False])
def test_every_weight_counts_its_own_steps(fused):
    def skips(step, place):
        return (step + place) % 3 == 1

    compared(optim.APOLLOAdamW(groups(), **OPTIONS, fused=fused), range(8), skips)


@pytest.mark.parametrize("fused", [True, False])
def test_the_svd_is_that_of_galore(fused):
    """Its moments are GaLore's; so is the basis."""
    optimizer = optim.APOLLOAdamW(groups(proj="svd"), **OPTIONS, fused=fused)
    run(optimizer, range(5))
    options = {"rank": 3, "update_proj_gap": GAP}
    place = len(PLAIN[1])
    for p in optimizer.param_groups[1]["params"]:
        state = {}
        for step in range(5):
            grad = gradient(p, step, place)
            _, state = galore(torch.zeros_like(p), grad, state, step + 1, **OPTIONS, **options)
        torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], state["v"])
        place += 1


def test_updates_that_grow_are_limited():
    """To 1.01 a step, where moments fill up; not after zeros, at which the published one stops."""
    (group,) = as_params([({"rank": 2}, [(6, 5)])], torch.float64)
    optimizer = optim.APOLLOAdamW([group], lr=1e-3)
    (weight,) = group["params"]
    norms = []
    for factor in (1.0, 1.0, 1.0, 0.0, 1.0):
        weight.grad = factor * gradient(weight, 1, 1)
        optimizer.step()
        norms.append(optimizer.state[weight]["scaled_grad"].item())
    assert norms[1] == pytest.approx(1.01 * norms[0], rel=1e-6)
    assert norms[2] == pytest.approx(1.01 * norms[1], rel=1e-6)
    assert norms[3] == 0
    assert norms[4] > 1e-3


def test_a_gradient_of_zeros_after_others_moves_nothing_in_float16():
    """The moments go on: the factors of the channels are over the largest number of float16."""
    (group,) = as_params([({"rank": 2}, [(6, 5)])], torch.float16)
    optimizer = optim.APOLLOAdamW([group], lr=1.0, fused=True)
    run(optimizer, range(2))
    (weight,) = group["params"]
    before = weight.detach().clone()
    weight.grad.zero_()
    optimizer.step()
    assert torch.equal(weight, before)


def test_moments_in_bfloat16_training_are_float32():
    optimizer = optim.APOLLOAdamW(groups(torch.bfloat16), **OPTIONS, fused=True)
    other = optim.APOLLOAdamW(groups(torch.bfloat16), **OPTIONS, fused=False)
    for found, expected in zip(run(optimizer, range(4)), run(other, range(4)), strict=True):
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=0.02, atol=0.02)
    for p in optimizer.param_groups[1]["params"]:
        names = ("exp_avg", "exp_avg_sq", "scaled_grad")
        assert {optimizer.state[p][name].dtype for name in names} == {torch.float32}


def test_clipping():
    optimizer, clipped = (optim.APOLLOAdamW(groups(), **OPTIONS, fused=True) for _ in range(2))
    for step in range(4):
        set_gradients(optimizer, step)
        set_gradients(clipped, step)
        torch.nn.utils.clip_grad_norm_(weights_of(clipped), 0.3)
        optimizer.step(max_norm=0.3)
        clipped.step()
    for p, q in zip(weights_of(optimizer), weights_of(clipped), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_no_random_basis_is_stored_and_a_resumed_run_is_the_same(fused):
    def build(seed=5):
        return optim.APOLLOAdamW(groups(torch.float32), **OPTIONS, fused=fused, seed=seed)

    whole, first, second = build(), build(), build(seed=6)
    run(whole, range(8))
    run(first, range(4))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    dictionary = torch.load(file, weights_only=True)
    names = {name for state in dictionary["state"].values() for name in state}
    assert names == {"step", "exp_avg", "exp_avg_sq", "scaled_grad", "place"}
    second.load_state_dict(dictionary)
    with torch.no_grad():
        for p, q in zip(weights_of(second), weights_of(first), strict=True):
            p.copy_(q)
    run(second, range(4, 8))
    for p, q in zip(weights_of(second), weights_of(whole), strict=True):
        assert torch.equal(p, q)


def test_bases_are_others_for_every_weight_gap_and_seed():
    optimizer = optim.APOLLOAdamW(
        as_params([({"rank": 2}, [(6, 5), (6, 5)])], torch.float64), update_proj_gap=GAP
    )
    run(optimizer, range(1))
    a, b = weights_of(optimizer)
    assert torch.equal(basis_of(optimizer, a, 1), basis_of(optimizer, a, GAP))
    others = [basis_of(optimizer, b, 1), basis_of(optimizer, a, GAP + 1)]
    optimizer.param_groups[0]["seed"] = 1
    others.append(basis_of(optimizer, a, 1))
    optimizer.param_groups[0]["seed"] = 0
    for other in others:
        assert not torch.allclose(basis_of(optimizer, a, 1), other)


def test_bases_keep_lengths_in_the_mean():
    """Normal, with a variance of one over the rank."""
    optimizer = optim.APOLLOAdamW([torch.nn.Parameter(torch.zeros(400, 300))], rank=100)
    run(optimizer, range(1))
    basis = basis_of(optimizer, *weights_of(optimizer), 1)
    assert basis.shape == (100, 300)
    assert basis.var().item() == pytest.approx(1 / 100, rel=0.03)
    assert basis.mean().item() == pytest.approx(0, abs=2e-3)


def test_the_published_class_is_converted():
    """It goes on with its moments and other random numbers. States of weights begin with a seed."""
    published = type("AdamW", (torch.optim.Optimizer,), {"__module__": "apollo_torch.apollo"})
    params = [torch.nn.Parameter(torch.ones(6, 4)), torch.nn.Parameter(torch.ones(3))]
    keys = {"rank": 2, "proj": "random", "scale_type": "tensor", "update_proj_gap": 9, "scale": 4.0}
    theirs = published(
        [{"params": params[:1], "proj_type": "std"} | keys, {"params": params[1:]}],
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "correct_bias": True},
    )
    theirs.state[params[1]] = {"seed": 2}
    theirs.state[params[0]] = {
        "seed": 1,
        "step": 4,
        "projector": object(),
        "exp_avg": torch.full((6, 2), 0.5),
        "exp_avg_sq": torch.full((6, 2), 0.25),
        "scaled_grad": torch.tensor(3.0),
    }
    converted = convert(theirs)
    assert type(converted) is optim.APOLLOAdamW
    state = converted.state[params[0]]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "scaled_grad", "place"}
    assert (state["step"], state["scaled_grad"]) == (4, 3)
    assert (state["exp_avg"] == 0.5).all()
    assert params[1] not in converted.state
    run(converted, range(1))
    assert converted.state[params[0]]["step"] == 5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"proj": "qr"}, "proj must be one of 'random', 'svd', not 'qr'"),
        ({"scale_type": "row"}, "scale_type must be one of 'channel', 'tensor', not 'row'"),
        ({"proj_type": "full"}, "proj_type must be one of 'std', .*not 'full'"),
        ({"rank": 13}, r"parameter 0 of group 0 is a matrix \[14, 12\]"),
    ],
)
def test_bad_options_are_named(options, text):
    with pytest.raises(ValueError, match=text):
        optim.APOLLOAdamW([torch.zeros(14, 12)], **{"rank": 2} | options)


@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_that_is_not_finite_is_named_before_anything_moves(fused):
    optimizer = optim.APOLLOAdamW(groups(), **OPTIONS, fused=fused)
    run(optimizer, range(2))
    before = [p.detach().clone() for p in weights_of(optimizer)]
    set_gradients(optimizer, 3)
    optimizer.param_groups[1]["params"][1].grad[2, 3] = float("nan")
    with pytest.raises(RuntimeError, match="gradient of parameter 1 of group 1 has elements that"):
        optimizer.step()
    for p, q in zip(weights_of(optimizer), before, strict=True):
        assert torch.equal(p, q)
    assert all(state["step"] == 2 for state in optimizer.state.values())


def test_weights_that_share_memory_are_named_and_nothing_moves():
    memory = torch.randn(12, 8)
    params = [torch.nn.Parameter(memory[:8]), torch.nn.Parameter(memory[4:])]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = optim.APOLLOAdamW([{"params": params, "rank": 2}], fused=True)
    before = memory.clone()
    words = "parameter 1 of group 0: the weight shares memory with another weight"
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert memory.equal(before)


@pytest.mark.parametrize("scale_type", ["channel", "tensor"])
def test_a_step_between_refreshes_allocates_nothing_of_weight_size(scale_type):
    found = {}
    for fused in (True, False):
        options = {"rank": 4, "scale_type": scale_type}
        (group,) = as_params([(options, [(256, 128), (128, 256)])], torch.float32)
        optimizer = optim.APOLLOAdamW([group], **OPTIONS, fused=fused)
        run(optimizer, range(1))
        found[fused] = allocated(optimizer)
    assert found[True] <= 256 * 128 * 4 // 8
    assert found[False] >= 256 * 128 * 4  # the control


def test_positional_arguments_are_the_published_ones():
    names = list(inspect.signature(optim.APOLLOAdamW).parameters)
    assert names[:8] == [
        "params", "lr", "betas", "eps", "weight_decay", "correct_bias", "scale_front", "disable_nl",
    ]  # fmt: skip
