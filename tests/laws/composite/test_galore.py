"""GaLoreAdamW: its formula, bad input, and what the published one gets wrong."""

import inspect
import re

import pytest
import torch

from fusedstep import optim
from fusedstep._matrix import low_rank, low_rank_strategy
from fusedstep._matrix.projection import LEFT, RIGHT
from fusedstep._matrix.scratch import Scratch
from fusedstep._native import ops
from fusedstep._step.nonfinite import not_finite
from reference.galore import galore
from support.low_rank import (
    OPTIONS,
    SHAPES,
    allocated,
    as_params,
    assert_same,
    by_reference,
    gradient,
    groups,
    projected,
    run,
    set_gradients,
    tensors_of,
    weights_of,
)

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
    assert not run(optimizer, range(2))[0].any()


def test_a_learning_rate_that_changes_is_followed():
    """A step of plain groups that repeats the last one takes its own learning rate."""
    runs = []
    for fused in (True, False):
        optimizer = optim.GaLoreAdamW(groups(rank=None), **OPTIONS, fused=fused)
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            set_gradients(optimizer, step)
            optimizer.step()
            assert (optimizer._last_step is not None) == (fused and ops.bind is not None)
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
            assert any(
                scratch.has_products for scratch in optimizer._group_strategy.scratch.values()
            )
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
        (lambda group, state: group.update(lr=[1]), "Invalid options of group"),
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
    grad = torch.full((16, 8), 3e37)
    grad[0] = 1e37
    assert not not_finite(grad)


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
    assert bool(optimizer._group_strategy.scratch) == (fused is True)


def test_a_group_may_leave_native_kernels():
    optimizer = optim.GaLoreAdamW(groups(), **OPTIONS)
    run(optimizer, range(2))
    for group in optimizer.param_groups:
        group["fused"] = False
    run(optimizer, range(2, 3))
    assert not optimizer._group_strategy.scratch


@pytest.mark.parametrize("cls", [optim.GaLoreAdamW, optim.APOLLOAdamW])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("group", [0, 1])
def test_sparse_gradients_are_refused(group, steps, cls):
    optimizer = cls(groups())
    run(optimizer, range(steps))
    weight = optimizer.param_groups[group]["params"][0]
    weight.grad = torch.zeros_like(weight).to_sparse()
    with pytest.raises(RuntimeError, match=rf"{cls.__name__} does not support sparse gradients"):
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
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("proj_type", ["std", "left"])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (optim.GaLoreAdamW, OPTIONS),
        (optim.GaLoreAdamW8bit, OPTIONS),
        (optim.GaLoreAdafactor, {"max_relative_step": 0.03, "beta1": 0.8}),
        (optim.APOLLOAdamW, OPTIONS),
    ],
)
def test_weights_of_two_gpus_are_stepped_where_they_are(cls, options, proj_type, fused):
    """galore_torch's `.to(device.type)` loses the index of a device: its bases are on the first."""
    found = []
    for devices in (("cpu",), ("cuda:1", "cuda:0"), ("cuda:1",)):
        mine = as_params(
            [(projected(update_proj_gap=9, proj_type=proj_type), SHAPES)], torch.float64
        )
        (group,) = mine
        group["params"] = [
            torch.nn.Parameter(p.detach().to(devices[i % len(devices)]))
            for i, p in enumerate(group["params"])
        ]
        optimizer = cls(mine, **options, fused=fused)
        for step in range(4):
            for place, p in enumerate(group["params"]):
                p.grad = gradient(p.cpu(), step, place).to(p.device)
            optimizer.step()
        for p in group["params"]:
            for name in optimizer.state[p].keys() & {LEFT, RIGHT, "exp_avg", "exp_avg_sq"}:
                assert optimizer.state[p][name].device == p.device, name
        found.append([p.detach().cpu() for p in group["params"]])
    for others in found[1:]:
        for a, b in zip(others, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


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


@pytest.mark.parametrize("proj_type", ["std", "full"])
@pytest.mark.parametrize(
    ("cls", "options"),
    [(optim.GaLoreAdamW8bit, {}), (optim.GaLoreAdafactor, {"beta1": 0.8, "weight_decay": 0.1})],
)
def test_so_do_those_of_other_states(cls, options, proj_type):
    shapes = [(512, 256), (256, 512)]
    (group,) = as_params([(projected(rank=16, proj_type=proj_type), shapes)], torch.float32)
    optimizer = cls([group], **options)
    run(optimizer, range(1))
    assert allocated(optimizer) <= 512 * 256 * 4 // 8


def test_a_weight_has_one_scratch_memory():
    """Whatever weights it has been stepped together with."""
    optimizer = optim.GaLoreAdamW(groups(), fused=True)
    run(optimizer, range(8), lambda step, place: (step + place) % 3 == 1)
    weights = [p for scratch in optimizer._group_strategy.scratch.values() for p in scratch.weights]
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
    for shared in (low_rank.LowRankOptimizer, low_rank_strategy.LowRankSteps):
        for cls in shared.__mro__[:-1]:
            assert "galore" not in inspect.getsource(cls).lower()
